"""What the loop assumes of what it trains, and nothing else: a loss, delegated synchronisation, a state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_training import read_checkpoint, trace, train_rank
from torch import Tensor, nn

from mm_trainer.errors import TrainingFault

STEPS, ACCUMULATE, LR = 3, 2, 0.05


class Bare(nn.Module):
    """No base class of ours, and its forward returns none of our types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, sample_key: Tensor) -> Any:
        return SimpleNamespace(loss=self.head(self.layer(x).tanh()).square().mean(), note="nothing that we know")


def make_bare(kind: type[Bare] = Bare) -> Bare:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind()


def rows(rank: int, ranks: int) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches: of the ``ACCUMULATE`` of a step, dealt over the ranks."""
    for number in range(rank, STEPS * ACCUMULATE, ranks):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        yield {"x": x, "sample_key": torch.tensor([2 * number, 2 * number + 1])}


class Halved(Bare):
    """Writes its state in other numbers than it computes with, and reads it back."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value / 2 for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: 2 * value for name, value in state_dict.items()}, *args, **kwargs)


def make_engine(model: Bare, folder: Path) -> Any:
    from mm_checkpoint import CheckpointManager
    from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, parallelize
    from mm_trainer.config.sections.training import MemoryProfileConfig, ProfileConfig, TrainingConfig
    from mm_trainer.engine.build import BuiltModel
    from mm_trainer.engine.checkpoint import CheckpointIO, Progress
    from mm_trainer.engine.loop import Services, TrainEngine
    from mm_trainer.engine.signals import RequestWatcher
    from mm_trainer.metrics.profiling import ProfileWindows
    from mm_trainer.metrics.writer import MetricsWriter
    from mm_trainer.optim.lr import LearningRate
    from mm_trainer.optim.optimizers import build_optimizers

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = ParallelMesh.build(MeshSizes(shard=ranks), device_type="cpu")
    parallelize(model, mesh=mesh, plan=FSDPPlan(param_dtype="fp32"))
    training = TrainingConfig(
        train_iters=STEPS,
        lr=LR,
        save=folder,
        clip_grad=0,
        weight_decay=0,
        gradient_accumulation_steps=ACCUMULATE // ranks,
    )
    optimizers = build_optimizers({"": model}, training)
    manager = CheckpointManager(folder, async_save=False)
    return TrainEngine(
        model,
        optimizers=optimizers,
        mesh=mesh,
        config=training,
        learning_rate=LearningRate(LR, LR, "constant", 0, STEPS),
        batches=rows(rank, ranks),
        services=Services(
            data_state=dict,
            checkpoints=CheckpointIO(manager, BuiltModel(model, {}, (), {}), optimizers, resolved_config=""),
            metrics=MetricsWriter([], enabled=False),
            requests=RequestWatcher(None),
            profiles=ProfileWindows(
                ProfileConfig(), MemoryProfileConfig(), folder=folder, rank=rank, sub_models={}, optimizers={}
            ),
        ),
        progress=Progress(),
    )


def whole(model: Bare) -> dict[str, Any]:
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().numpy() for name, p in model.named_parameters()}


def train_bare(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights after `STEPS` steps of `TrainEngine`, and those that a fresh model has from the last checkpoint."""
    model, fresh = make_bare(Halved), make_bare(Halved)
    make_engine(model, folder).train()
    make_engine(fresh, folder).services.checkpoints.load(folder / f"iter_{STEPS:07d}")
    return whole(model), whole(fresh)


def reference() -> dict[str, Tensor]:
    """The same steps by torch alone."""
    model = make_bare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    batches = rows(0, 1)
    for _ in range(STEPS):
        for _ in range(ACCUMULATE):
            (model(**next(batches)).loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bare_module_is_trained(run_ranks: Any, tmp_path: Path, ranks: int) -> None:
    """On two ranks by FSDP2, whose hooks find no tensor in such an output unless it becomes one of ours."""
    expected, start = reference(), make_bare().state_dict()
    for weights, loaded in run_ranks(train_bare, ranks, tmp_path):
        for name, value in expected.items():
            assert not torch.equal(value, start[name]), "the reference trains all of them"
            torch.testing.assert_close(torch.from_numpy(weights[name]), value, rtol=1e-5, atol=1e-6)
            assert np.array_equal(loaded[name], weights[name]), "the checkpoint went through the model's own methods"


CONFIG = """
parallel:
  fsdp_plan: {{apply_modules: ["{blocks}"], param_dtype: fp32}}
model: {model}
data:
  dataset_param: {{dataset_type: single_rows}}
  dataloader_param: {{num_workers: 0}}
training:
  plugin: [trainer_plugin_models]
  save: {save}
  save_async: false
  micro_batch_size: 2
  train_iters: 4
  lr: 0.02
"""


def write_config(folder: Path, model_id: str, *, single: bool = False) -> str:
    models = "" if single else ", models: {a: {model_id: single_regressor}, b: {model_id: single_regressor}}"
    blocks = "blocks.{*}" if single else "{*}.blocks.{*}"
    path = folder / f"{model_id}.yaml"
    text = CONFIG.format(blocks=blocks, model=f"{{model_id: {model_id}{models}}}", save=folder / "run")
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_an_alternation_with_one_view_is_asked(run_ranks: Any, tmp_path: Path) -> None:
    """A step trains the sub-model that the alternation names, though both have a gradient: the other's is dropped."""
    config = write_config(tmp_path, "taking_turns")
    overrides = ["training.save_interval=1", "training.keep_last=-1", "training.val_interval=2"]
    overrides.append("data.val_dataset_param.dataset_type=single_rows")
    records = run_ranks(train_rank, 2, {}, overrides, config)[0]
    states = [read_checkpoint(tmp_path / "run" / f"iter_{step:07d}") for step in (1, 2, 3, 4)]
    for trained, before, after in zip("bab", states, states[1:], strict=False):
        moved = {name for name in before if name.startswith("model.") and not before[name].equal(after[name])}
        assert moved
        assert {name.split(".")[1] for name in moved} == {trained}
    assert "loss_a" in records[1]
    validations = [record for record in records if record["kind"] == "validation"]
    assert len(validations) == 3
    assert all("loss" in record for record in validations), "one view, without a name"


def test_gradients_of_what_a_step_does_not_train_are_dropped(run_ranks: Any, tmp_path: Path) -> None:
    """They count neither in that step's norm nor in the next step: as if the idle sub-model had not run."""
    weights = {}
    for model_id in ("taking_turns", "running_in_turns"):
        run = [f"training.save={tmp_path / model_id}"]
        run_ranks(train_rank, 2, {}, run, write_config(tmp_path, model_id))
        state = read_checkpoint(tmp_path / model_id / "iter_0000004")
        weights[model_id] = {name: value for name, value in state.items() if name.startswith("model.")}
    for name, value in weights["running_in_turns"].items():
        torch.testing.assert_close(weights["taking_turns"][name], value, rtol=1e-6, atol=1e-7)


def test_ranks_that_disagree_on_what_a_step_trains_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step 3: the ranks disagree on which sub-model it trains") as info:
        run_ranks(train_rank, 2, {}, [], write_config(tmp_path, "going_astray"))
    assert str(info.value).count("TrainingFault: step 3") >= 2, "both ranks say it"


def test_a_choice_that_cannot_be_trained_is_refused() -> None:
    from mm_trainer.engine.stepping import Stepping
    from mm_trainer.errors import TrainingFault

    for chosen, said in (((), "nothing"), (("a", "c"), r"\('a', 'c'\)")):
        stepping = Stepping(SimpleNamespace(begin=lambda step, chosen=chosen: chosen, views=lambda: iter(())))
        with pytest.raises(TrainingFault, match=rf"step 5: .* wants to train {said}; what can be trained: a, b"):
            stepping.begin(4, ["a", "b"])


def test_one_root_over_all_sub_models_trains_the_same(run_ranks: Any, tmp_path: Path) -> None:
    roots = {}
    for model_id in ("all_at_once", "own_sync"):
        run = [f"training.save={tmp_path / model_id}"]
        roots[model_id] = trace(run_ranks(train_rank, 2, {}, run, write_config(tmp_path, model_id))[0])
    assert roots["all_at_once"] == pytest.approx(roots["own_sync"], rel=1e-5)


def said_while_training(rank: int, world_size: int, config: str, overrides: list[str]) -> list[tuple[str, bool]]:
    from trainer_plugin_models import SAID

    train_rank(rank, world_size, {}, overrides, config)
    return SAID


@pytest.mark.parametrize("model_id", ["own_sync", "single_own_sync"])
def test_a_model_synchronises_its_gradients_itself_if_it_can(run_ranks: Any, tmp_path: Path, model_id: str) -> None:
    config = write_config(tmp_path, model_id, single=model_id.startswith("single"))
    overrides = ["training.gradient_accumulation_steps=2", "training.train_iters=2"]
    once = [("last", False), ("sync", False), ("last", True), ("sync", True)]
    assert run_ranks(said_while_training, 2, config, overrides) == [2 * once] * 2

    overrides += ["parallel.fsdp_plan.reduce_every_micro_step=true", f"training.save={tmp_path / 'each'}"]
    each = [(name, value or name == "sync") for value in (False, True) for name in ("last", "sync", "all_reduce")]
    assert run_ranks(said_while_training, 2, config, overrides) == [2 * each] * 2


def test_half_a_synchronisation_is_refused() -> None:
    from mm_trainer.engine.sync import gradient_sync_of

    class Half(nn.Module):
        def set_is_last_backward(self, value: bool) -> None: ...

    with pytest.raises(TypeError, match=r"Half .* doesn't define \['set_requires_gradient_sync', 'set_requires_all"):
        gradient_sync_of(Half())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_keeps_its_dtype(run_ranks: Any, tmp_path: Path, ranks: int) -> None:
    """The plan's output_dtype is that of sub-models' outputs; of the loss it would spoil every gradient."""
    config = write_config(tmp_path, "single_regressor", single=True)
    traces = []
    for kind in ("null", "bf16"):
        run = [f"training.save={tmp_path / kind}", f"parallel.fsdp_plan.output_dtype={kind}"]
        traces.append(trace(run_ranks(train_rank, ranks, {}, run, config)[0]))
    assert traces[0] == traces[1]


class Detached(Bare):
    """Returns a loss that has a gradient, but not one of its own parameters."""

    def forward(self, x: Tensor, sample_key: Tensor) -> Any:
        return SimpleNamespace(loss=x.detach().clone().requires_grad_().sum())


def train_detached(rank: int, ranks: int, folder: str) -> str:
    with pytest.raises(TrainingFault, match="none of the") as caught:
        make_engine(make_bare(Detached), Path(folder)).train()
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_without_the_parameters_is_found_in_the_first_step(run_ranks: Any, tmp_path: Path, ranks: int) -> None:
    for message in run_ranks(train_detached, ranks, str(tmp_path)):
        assert "received a gradient in its first step" in message
