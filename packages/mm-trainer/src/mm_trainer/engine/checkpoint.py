"""Between the engine's objects and `mm_checkpoint`: what a checkpoint holds, and how it is restored."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mm_checkpoint import CheckpointManager, find_source, read_manifest
from mm_trainer import registry
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.model import BaseModel
from mm_trainer.engine.build import BuiltModel, refuse_unwritten
from mm_trainer.engine.config_diff import Difference, compare_configs
from mm_trainer.errors import InputError
from mm_trainer.optim.ema import WeightAverage
from mm_trainer.optim.optimizers import NamedOptimizer

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come; saved and restored as one."""

    step: int = 0
    """Finished optimizer steps."""
    samples: int = 0
    """Samples of the global batch seen so far."""


class CheckpointIO:
    """Saves and restores one run.

    A checkpoint holds ``model`` (the checkpointed sub-models), ``optimizer`` (every state tensor under its parameter's
    name), ``ema`` if there is an average, and ``train`` (step, samples, data position). Learning rate and weight decay
    are never stored: they follow from the configuration and the step.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        built: BuiltModel,
        optimizers: Mapping[str, NamedOptimizer],
        *,
        resolved_config: str,
        ema: WeightAverage | None = None,
    ) -> None:
        self._manager, self._built, self._optimizers, self._ema = manager, built, optimizers, ema
        # Element types of the original weight files, so that an export gives back what was loaded.
        self._source_dtypes = {name: report.source_dtypes for name, report in built.loads.items()}
        self._source_ties = {name: report.ties for name, report in built.loads.items()}
        self._config = resolved_config
        for name in built.checkpointed:
            _warn_of_what_no_export_holds(name, built.sub_models[name])
        self._export_folders = (
            built.model.export_folders(built.specs)
            if isinstance(built.model, ModelContainer)
            else {name: model.export_folder(built.specs[name]) for name, model in built.sub_models.items()}
        )

    def save(self, progress: Progress, data_state: Mapping[str, Any]) -> None:
        """Write the checkpoint of ``progress.step`` finished steps; called on all ranks."""
        manifest = {
            "samples_seen": progress.samples,
            "config_digest": hashlib.sha256(self._config.encode()).hexdigest(),
            "config": self._config,
            "sub_models": {name or "model": self._describe(name) for name in self._built.checkpointed},
        }
        path = self._manager.save(progress.step, self._state(progress, data_state), manifest=manifest)
        log.info("checkpoint of step %d: %s", progress.step, path)

    def _state(self, progress: Progress, data_state: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self._built.model.state_dict(),
            "optimizer": {k: v for o in self._optimizers.values() for k, v in o.state().items()},
            "train": {**asdict(progress), "data": dict(data_state)},
        }
        if self._ema is not None:
            state["ema"] = self._ema.state()
        return state

    def load(self, path: Path, *, with_optimizer: bool = True) -> dict[str, Any]:
        """Fill model, average and (fresh) optimizers from ``path``; returns the ``train`` part. Called on all ranks.

        Raises:
            InputError: the checkpoint holds optimizer state of parameters that this run doesn't train.
        """
        with closing(find_source(path, "dcp").open()) as source:
            stored = list(source.tensors)
        state: dict[str, Any] = {"model": self._built.model.state_dict(), "train": None}
        if with_optimizer:
            # A fresh optimizer has no state tensors yet, and the load needs sharded tensors to fill.
            state["optimizer"] = self._allocate_optimizers(
                [name.removeprefix("optimizer.") for name in stored if name.startswith("optimizer.")]
            )
        averaged = any(name.startswith("ema.") for name in stored)
        # The stored names decide what is asked for: a checkpoint without an average must still load.
        if self._ema is not None and averaged:
            state["ema"] = self._ema.state()
        plain = self._manager.load(path, state)
        self._put_back(state["model"], plain)
        for name, entry in read_manifest(path)["sub_models"].items():
            self._source_dtypes["" if name == "model" else name] = entry["source_dtypes"]
            self._source_ties["" if name == "model" else name] = entry.get("ties") or {}
        if self._ema is not None and not averaged:
            # The average was taken when the engine was built, before these weights were loaded.
            self._ema.restart()
            log.info("the checkpoint holds no running average (training.ema): it starts from the weights")
        elif self._ema is None and averaged:
            log.warning("the checkpoint's running average isn't continued: training.ema is off")
        train: dict[str, Any] = plain["train"]
        return train

    def _allocate_optimizers(self, stored: Sequence[str]) -> dict[str, Tensor]:
        """State tensors of the fresh optimizers for everything that the checkpoint holds."""
        targets: dict[str, Tensor] = {}
        known: set[str] = set()
        for optimizer in self._optimizers.values():
            own = set(optimizer.names.values())
            mine = [name for name in stored if name.rsplit(".", 1)[0] in own]
            targets |= optimizer.allocate_state(mine)
            fresh = own - {name.rsplit(".", 1)[0] for name in mine}
            if mine and fresh:
                log.warning("%d parameters have no optimizer state there and start afresh: %s", *_named(fresh))
            known |= own
        foreign = {name.rsplit(".", 1)[0] for name in stored} - known
        if foreign:
            count, names = _named(foreign)
            raise InputError(
                f"the checkpoint holds optimizer state of {count} parameters that this run doesn't train ({names}): "
                "was `freeze` changed? training.no_load_optim: true resumes with a fresh optimizer"
            )
        return targets

    def load_weights(self, path: Path) -> None:
        """Fill the model's weights only, from another run's checkpoint: a warm start. Called on all ranks."""
        state = {"model": self._built.model.state_dict()}
        self._put_back(state["model"], self._manager.load(path, state))

    def _put_back(self, model_state: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        """Hand the model its state, which may hold more than its parameters, or something else."""
        self._built.model.load_state_dict({**model_state, **plain.get("model", {})})
        for name in self._built.checkpointed:
            # Loading may have filled tied parameters or what tables are computed from.
            self._built.sub_models[name].post_load()
            refuse_unwritten(self._built.sub_models[name], name)

    def differences(self, path: Path) -> list[Difference]:
        """What differs between this run's configuration and the checkpoint's."""
        return compare_configs(read_manifest(path)["config"], self._config)

    def prepare(self, progress: Progress, data_state: Mapping[str, Any]) -> None:
        """Find out before the first step whether saving will work: folder, free space, other runs' checkpoints."""
        self._manager.prepare(progress.step, self._state(progress, data_state))

    def close(self) -> None:
        """Wait for a save that is still being written."""
        self._manager.close()

    def _describe(self, name: str) -> dict[str, Any]:
        """What `mm-checkpoint export` needs to know of a sub-model, so that it needs no knowledge of any model."""
        model, spec = self._built.sub_models[name], self._built.specs[name]
        container = self._built.model
        pipeline = container.pipeline if isinstance(container, ModelContainer) else None
        return {
            "key_map": model.key_map,
            "source": str(spec.weights.path) if spec.weights is not None else None,
            "source_config": type(model).export_config(spec),
            "export_folder": self._export_folders[name],
            "prefix": _dotted(name, _root_path(model)),
            "ties": _ties(model.weight_root(), self._source_ties.get(name, {})),
            "source_dtypes": self._source_dtypes.get(name),
            "schedule": pipeline.describe() if pipeline is not None else {},
        }


def _root_path(model: BaseModel) -> str:
    """Where `BaseModel.weight_root` stands in the model; empty if it is the model itself."""
    root = model.weight_root()
    for path, module in model.named_modules():
        if module is root:
            return path
    raise InputError(f"{registry.origin(model)}: weight_root() must return a module of the model, or the model itself")


def _warn_of_what_no_export_holds(name: str, model: BaseModel) -> None:
    inside = {id(parameter) for parameter in model.weight_root().parameters()}
    outside = [path for path, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        count, listed = _named(outside)
        log.warning(
            "%s: %d trained parameters lie outside weight_root(): checkpoints hold them, exports don't: %s",
            name or "model",
            count,
            listed,
        )


def _dotted(*parts: str) -> str:
    """The parts that aren't empty, each followed by a dot."""
    return "".join(f"{part}." for part in parts if part)


def _ties(root: nn.Module, from_source: Mapping[str, str]) -> dict[str, str]:
    """Each further name of a tensor that has several → the one that files hold: that of the source it came from, else
    the first in the order of the modules, as torch counts parameters and transformers writes them."""
    groups: dict[int, list[str]] = {}
    for name, tensor in root.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            groups.setdefault(id(tensor), []).append(name)
    held = set(from_source.values())
    ties: dict[str, str] = {}
    for names in groups.values():
        kept = next((name for name in names if name in held), names[0])
        ties |= {name: kept for name in names if name != kept}
    return ties


def _named(names: Collection[str]) -> tuple[int, str]:
    """How many, and the first few."""
    return len(names), ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
