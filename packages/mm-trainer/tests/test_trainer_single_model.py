"""The single-model path, on ranks, with a model and a data set from a plain module (`training.plugin`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbers_close import FP32_OP, FP32_TRACE, assert_near
from rank_training import read_checkpoint, trace, train_rank

CONFIG = """
parallel:
  fsdp_plan: {{apply_modules: ["blocks.{{*}}"], param_dtype: fp32}}
model: {{model_id: single_regressor}}
data:
  dataset_param: {{dataset_type: single_rows}}
  dataloader_param: {{num_workers: 0}}
training:
  plugin: [trainer_plugin_models]
  save: {save}
  save_async: false
  micro_batch_size: 2
  global_batch_size: 4
  gradient_accumulation_steps: auto
  train_iters: 8
  lr: 0.02
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


def inspect_start(rank: int, world_size: int, config_file: str, overrides: list[str]) -> dict[str, Any]:
    """Whole weights as they are before the first step."""
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    config = resolve(load_config(config_file, overrides), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    state = engine.model.state_dict()
    return {name: getattr(t, "full_tensor", lambda t=t: t)().numpy() for name, t in state.items()}


@pytest.mark.numeric
def test_ranks_and_accumulation_give_one_trace_and_one_set_of_weights(run_ranks, config: str, tmp_path: Path) -> None:
    """B096, B097: also with `gradient_accumulation_steps: auto`, which keeps the global batch."""
    traces = {}
    for ranks in (1, 2):
        run = [f"training.save={tmp_path / str(ranks)}"]
        records = run_ranks(train_rank, ranks, {}, run, config)[0]
        traces[ranks] = trace(records)
    assert len(traces[1]) == 8
    assert traces[1][-1] < traces[1][0]
    np.testing.assert_allclose(traces[2], traces[1], rtol=FP32_TRACE)


def test_an_output_needs_nothing_but_a_loss(run_ranks, config: str, tmp_path: Path) -> None:
    whole, plain = (
        run_ranks(train_rank, 1, {}, [f"training.save={tmp_path / model}", f"model.model_id={model}"], config)[0]
        for model in ("single_regressor", "single_plain")
    )
    assert trace(plain) == trace(whole)
    validated = ["training.val_interval=1", "data.val_dataset_param.dataset_type=single_rows"]
    with pytest.raises(AssertionError, match="validation needs the losses of single samples"):
        run_ranks(train_rank, 1, {}, [*validated, "model.model_id=single_plain"], config)


def test_an_embedding_with_padding_idx_keeps_its_loaded_rows(run_ranks, config: str, tmp_path: Path) -> None:
    """B027's kind: meta build, wrap, materialise and load leave every row as the file has it, the padding row too."""
    import torch
    from safetensors.torch import save_file
    from trainer_plugin_models import PADDING, Regressor

    folder = tmp_path / "weights"
    folder.mkdir()
    tensors = {name: torch.randn(p.shape) for name, p in Regressor().named_parameters()}
    assert tensors["table.weight"][PADDING].abs().min() > 0
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}), encoding="utf-8")
    for rank_state in run_ranks(inspect_start, 2, config, [f"model.from_pretrained={folder}"]):
        assert rank_state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert np.array_equal(rank_state[name], tensor.numpy()), name


@pytest.mark.numeric
def test_random_initialisation_is_the_same_on_any_number_of_ranks(run_ranks, config: str) -> None:
    one = run_ranks(inspect_start, 1, config, [])[0]
    two = run_ranks(inspect_start, 2, config, [])[1]
    for name, array in one.items():
        assert np.array_equal(array, two[name]), name
    other_seed = run_ranks(inspect_start, 1, config, ["training.seed=7"])[0]
    assert not np.array_equal(one["head.weight"], other_seed["head.weight"])


@pytest.mark.parametrize("interval", [1, 4])
def test_a_bad_number_stops_all_ranks_and_names_its_sample(run_ranks, config: str, interval: int) -> None:
    """B111: the flag stays on the device until a log step; no checkpoint is written after it."""
    overrides = ["data.dataset_param.poison=9", f"training.log_interval={interval}", "training.save_interval=1"]
    with pytest.raises(
        AssertionError, match=r"step 3: the gradient norm is nan; .* sample \d+, position 9 of the global data"
    ) as info:
        run_ranks(train_rank, 2, {}, overrides, config)
    assert str(info.value).count("TrainingFault: step 3") >= 2, "both ranks say it"
    save = Path(config).parent / "run"
    assert sorted(p.name for p in save.glob("iter_*")) == ["iter_0000001", "iter_0000002"]


def test_a_bad_step_is_skipped_where_the_policy_says_so(run_ranks, config: str) -> None:
    """B111: weights and moments are those of the step before, and the run goes on."""
    overrides = ["data.dataset_param.poison=9", "training.nan_policy=skip"]
    records = run_ranks(train_rank, 2, {}, overrides, config)[0]
    losses = trace(records)
    assert [loss is None for loss in losses] == [False, False, True, False, False, False, False, False]
    assert records[-1]["skipped_steps"] == 1

    wider = [*overrides, "training.log_interval=4", f"training.save={Path(config).parent / 'wider'}"]
    records = run_ranks(train_rank, 2, {}, wider, config)[0]
    finite = [loss for loss in losses if loss is not None]
    assert records[0]["loss"] == pytest.approx(sum(finite[:3]) / 3), "the skipped step doesn't spoil its window"


def test_a_bad_loss_with_good_gradients_is_left_out_too(run_ranks, config: str) -> None:
    """One rank's sample: every rank stops, or goes on with the weights of the step before."""
    infinite = ["model.model_id=single_infinite", "training.save_interval=1", "training.keep_last=-1"]
    with pytest.raises(AssertionError, match=r"step 3: .* the loss isn't finite for sample \d+, position 9 of") as info:
        run_ranks(train_rank, 2, {}, [*infinite, "training.log_interval=4"], config)
    assert str(info.value).count("TrainingFault: step 3") >= 2, "both ranks say it"

    save = Path(config).parent / "skipped"
    skip = [*infinite, "training.nan_policy=skip", f"training.save={save}"]
    records = run_ranks(train_rank, 2, {}, skip, config)[0]
    assert records[-1]["skipped_steps"] == 1
    before, after = (read_checkpoint(save / f"iter_000000{step}") for step in (2, 3))
    assert all(before[name].equal(after[name]) for name in before if name.startswith("model."))


def test_batched_conditions_need_a_pipeline(run_ranks, config: str) -> None:
    with pytest.raises(AssertionError, match=r"training\.condition_mbs: .* this model has none: leave it at 1"):
        run_ranks(train_rank, 1, {}, ["training.condition_mbs=2"], config)


@pytest.mark.numeric
def test_ema_follows_the_weights_and_survives_a_resume(run_ranks, config: str, tmp_path: Path) -> None:
    """The average after 8 steps equals the recurrence over the checkpoints of every step, resumed or not."""
    import torch

    ema = ["training.ema.enable=true", "training.ema.decay=0.5", "training.save_interval=1", "training.keep_last=-1"]
    run_ranks(train_rank, 2, {}, ema, config)
    save = Path(config).parent / "run"
    rest = [*ema, f"training.load={save / 'iter_0000004'}", f"training.save={tmp_path / 'rest'}"]
    run_ranks(train_rank, 2, {}, rest, config)
    start = run_ranks(inspect_start, 1, config, [f"training.save={tmp_path / 'fresh'}"])[0]
    average = {name: torch.tensor(array) for name, array in start.items()}
    for step in range(1, 9):
        state = read_checkpoint(save / f"iter_{step:07d}")
        average = {name: 0.5 * value + 0.5 * state[f"model.{name}"] for name, value in average.items()}
    for final in (save, tmp_path / "rest"):
        state = read_checkpoint(final / "iter_0000008")
        for name, value in average.items():
            assert_near(state[f"ema.{name}"], value, FP32_OP, name)
