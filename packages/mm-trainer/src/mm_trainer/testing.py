"""For the tests of a plugin: the checks of ``mm-trainer check --forward``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mm_trainer.errors import InputError


def check_plugin(config: str | Path | Mapping[str, Any], *overrides: str, world_size: int = 1) -> list[str]:
    """Run one tiny step of a plugin's model on the CPU, and everything that only a step can find.

    That is: what the forward takes and returns, the loss, gradients of every trained sub-model, bf16 compute, state
    that differs between ranks, the same step with recompute, and an export that the model reads back.

    Args:
        config: a configuration as a mapping, a YAML file or ``recipe:NAME``; its data set is read. What it names is
            found as in a run: by entry points, or in the modules of ``training.plugin``.
        overrides: ``key=value``.
        world_size: ranks. One runs in this process; more are processes of their own, which import the plugin anew.

    Returns:
        a line for each check that was made.

    Raises:
        InputError: something is wrong, in one message. With several ranks, the message is on stderr.
        TrainingFault: a trained sub-model received no gradient, or the ranks differ.
    """
    from mm_trainer.commands.check import check_step, tiny_overrides

    with tempfile.TemporaryDirectory(prefix="mm_trainer_check_") as name:
        folder = Path(name)
        if isinstance(config, Mapping):
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
            config = file
        if world_size > 1:
            if check_step(str(config), overrides, world_size):
                raise InputError(f"the check failed on {world_size} ranks; what is wrong stands on stderr")
            return [f"checked on {world_size} ranks"]
        import torch.distributed as dist

        from mm_trainer.commands.forward import run_checks
        from mm_trainer.commands.prepare import prepare
        from mm_trainer.config import load_config
        from mm_trainer.launch.process import process_group

        loaded = load_config(str(config), overrides)
        prepared = prepare(load_config(str(config), [*overrides, *tiny_overrides(loaded, folder / "run")]), world_size)
        try:
            with process_group(None, "cpu", timeout_s=prepared.config.parallel.timeout_s):
                return run_checks(prepared)
        finally:
            if dist.is_initialized():  # after a failure, so that the next check in this process finds none
                dist.destroy_process_group()
