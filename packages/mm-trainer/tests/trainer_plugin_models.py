"""Code that isn't packaged: what `training.plugin: [trainer_plugin_models]` registers. A model without a container."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import mm_parallel
from mm_trainer.contracts import (
    BaseModel,
    DatasetContext,
    ModelContainer,
    ModelOutput,
    ModelSpec,
    Options,
    Sampler,
    SampleRequest,
)
from mm_trainer.contracts.pipeline import Batch, Conditions, PerSample
from mm_trainer.randomness import draw_quantile, keyed_generator, keyed_uniform
from mm_trainer.registry import register_container, register_dataset, register_model

VOCABULARY, WIDTH, PADDING = 11, 6, 0


@register_model("single_regressor")
class Regressor(BaseModel):
    """Predicts a number from a row of ids; row `PADDING` of its table is a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Regressor:
        return cls()

    def init_weights(self, init: Any, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            init.normal_(parameter, prefix + name, std=0.5)

    def forward(self, ids: Tensor, target: Tensor, sample_key: Tensor, **other: Tensor) -> ModelOutput:
        x = self.table(ids).mean(1)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        per_sample = (self.head(x).squeeze(1) - target).square()
        return ModelOutput(per_sample.mean(), PerSample(per_sample.detach()))


@register_model("single_plain")
class PlainRegressor(Regressor):
    """Returns what any model may: an object that has a loss and nothing else we know."""

    def forward(self, **batch: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=super().forward(**batch).loss, logits=None)


@register_model("single_dropout")
class DropoutRegressor(Regressor):
    """Drops half of every block's output, and weighs its loss by numpy's and Python's dice too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, **batch: Tensor) -> ModelOutput:  # type: ignore[override]
        output = super().forward(**batch)
        return replace(output, loss=output.loss * (1 + random.random() / 8 + float(np.random.rand()) / 8))


@register_model("single_forgetful")
class Forgetful(Regressor):
    """Initialises all parameters but one."""

    def init_weights(self, init: Any, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if name != "head.bias":
                init.normal_(parameter, prefix + name, std=0.5)


@register_model("single_half_filled")
class HalfFilled(Regressor):
    """Initialises the first rows of a table only."""

    def init_weights(self, init: Any, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if name != "table.weight":
                init.normal_(parameter, prefix + name, std=0.5)
        with torch.no_grad():
            getattr(self.table.weight, "_local_tensor", self.table.weight)[:3] = 0.5


@register_model("single_lost_buffer")
class LostBuffer(Regressor):
    """A persistent buffer made of a parameter, which is on meta then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self.head.weight.detach().abs().mean())


@register_model("single_lost_table")
class LostTable(Regressor):
    """The same, in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table_norm", self.table.weight.detach().norm(dim=1), persistent=False)


@register_model("single_table")
class TableRegressor(Regressor):
    """Rebuilds a table in place once it has its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(4), persistent=False)

    def post_load(self) -> None:
        self.steps.copy_(torch.arange(4.0))


@register_model("single_own_init")
class OwnInit(Regressor):
    """Initialises by torch's own functions."""

    def init_weights(self, init: Any, prefix: str = "") -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)


@register_model("single_rank_buffer")
class RankBuffer(Regressor):
    """A buffer that tells ranks apart."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.register_buffer("own", torch.tensor(own), persistent=False)


@register_model("single_rank_init")
class RankInit(Regressor):
    """Weights that depend on the rank: silently wrong where they are replicated."""

    def init_weights(self, init: Any, prefix: str = "") -> None:
        super().init_weights(init, prefix)
        with torch.no_grad():
            local = getattr(self.head.weight, "_local_tensor", self.head.weight)
            local += torch.distributed.get_rank()


@register_model("single_batch_norm")
class BatchNormRegressor(Regressor):
    """Statistics of each rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))


@register_model("single_infinite")
class InfiniteRegressor(Regressor):
    """The loss of one sample is infinite, and no gradient is: it comes by a constant."""

    def forward(self, sample_key: Tensor, **batch: Tensor) -> ModelOutput:  # type: ignore[override]
        output = super().forward(sample_key=sample_key, **batch)
        assert output.per_sample is not None
        extra = torch.where(sample_key == 9, torch.inf, 0.0)
        per_sample = replace(output.per_sample, loss=output.per_sample.loss + extra)
        return replace(output, loss=output.loss + extra.sum(), per_sample=per_sample)


STEPS = 1000


class CardOptions(Options):
    gain: float = 1.0


@register_model("single_noised")
class Noised(Regressor):
    """Its objective has discrete noise levels t of `STEPS`, and nothing else: a sample's loss is t · |head's bias|."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Noised:
        return cls(spec.seed)

    def levels(self, batch: Any) -> Tensor:
        return (draw_quantile(batch, self.seed) * STEPS).long()

    def forward(self, **batch: Tensor) -> ModelOutput:  # type: ignore[override]
        per_sample = self.levels(batch) * self.head.bias.abs()
        loss = per_sample.mean() + 0 * super().forward(**batch).loss
        return ModelOutput(loss, PerSample(per_sample.detach()))


@register_model("single_fresh")
class Fresh(Noised):
    """As long as it is untrained, its loss is the same at every noise level."""

    def init_weights(self, init: Any, prefix: str = "") -> None:
        super().init_weights(init, prefix)
        init.zeros_(self.head.bias)

    def forward(self, **batch: Tensor) -> ModelOutput:  # type: ignore[override]
        per_sample = (1 - self.levels(batch) / STEPS * self.head.bias).square()
        loss = per_sample.mean() + 0 * Regressor.forward(self, **batch).loss
        return ModelOutput(loss, PerSample(per_sample.detach()))


@register_model("single_own_draw")
class OwnDraw(Noised):
    """Draws its noise levels past `draw_quantile`, and from a global generator too."""

    def levels(self, batch: Any) -> Tensor:
        return (keyed_uniform(self.seed, "own", batch["sample_key"]) * STEPS).long() + torch.randint(3, ())


@register_model("single_narrow")
class Narrow(Regressor):
    """Takes no more than training gives it."""

    def forward(self, ids: Tensor, target: Tensor, sample_key: Tensor) -> ModelOutput:  # type: ignore[override]
        return super().forward(ids, target, sample_key)


class Card(Sampler[CardOptions]):
    """Clips of one colour: how bright the head's bias is."""

    fps = 8

    def __init__(self, folder: Path, *, dtype: str, device: str, options: CardOptions) -> None:
        weights = load_file(folder / "model.safetensors")
        self.level, self.options = float(weights["head.bias"]), options

    def __call__(self, request: SampleRequest) -> Tensor:
        brightness = self.level * self.options.gain
        return torch.full((3, request.frames, request.height, request.width), brightness)


@register_model("single_encoding")
class Encoding(Regressor):
    """Its table, if frozen, makes conditions; it samples, too."""

    sampler = Card

    def prepare_conditions(self, batch: Batch) -> Conditions:
        return {"features": self.table(batch["ids"]).mean(1), "target": batch["target"]}

    def forward(self, **batch: Any) -> ModelOutput:  # type: ignore[override]
        conditions = batch.get("conditions") or self.prepare_conditions(batch)
        x = conditions["features"]
        for block in self.blocks:
            x = x + F.gelu(block(x))
        per_sample = (self.head(x).squeeze(1).float() - conditions["target"]).square()
        return ModelOutput(per_sample.mean(), PerSample(per_sample.detach()))


@register_dataset("single_rows")
class Rows:
    """Rows of ids and a target; ``poison`` makes one sample's target NaN at one point of the order."""

    class Options(Options):
        samples: int = 32
        poison: int = -1
        extra: str | None = None

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        self.options = self.Options.model_validate(config)
        self.seed = context.seed

    def __len__(self) -> int:
        return self.options.samples

    def bucket(self, index: int) -> Hashable:
        return 0

    def tokens(self, index: int) -> int:
        return 1

    def load(self, index: int, sample_key: int) -> dict[str, Tensor]:
        generator = keyed_generator(self.seed, "rows", index)
        ids = torch.randint(1, VOCABULARY, (5,), generator=generator)
        target = torch.tensor(float("nan")) if sample_key == self.options.poison else ids.float().mean() / VOCABULARY
        extra = {} if self.options.extra is None else {self.options.extra: torch.tensor(0.5)}
        return {"ids": ids, "target": target, **extra}


@dataclass
class Turns:
    """Sub-model a in even steps, b in odd ones, and one validation; ``astray``: a rank that takes the other one."""

    astray: bool = False
    current: str = "a"

    def begin(self, step: int) -> tuple[str, ...]:
        wrong = self.astray and torch.distributed.get_rank() == 1 and step == 2
        self.current = "ab"[(step + wrong) % 2]
        return (self.current,)

    def views(self) -> Iterator[str]:
        yield ""


@register_container("taking_turns")
class TakingTurns(ModelContainer):
    """Both sub-models have a gradient in every step; its alternation says which of them is trained."""

    checkpoint_submodels = ("a", "b")
    alternation = Turns()

    def forward(self, **batch: Any) -> Any:
        first, second = self.a(**batch), self.b(**batch)
        return replace(first, loss=first.loss + second.loss)


@register_container("running_in_turns")
class RunningInTurns(TakingTurns):
    """Only the sub-model that is trained runs, so the other one has no gradient."""

    alternation = Turns()

    def forward(self, **batch: Any) -> Any:
        return self.get_sub_models()[self.alternation.current](**batch)


@register_container("going_astray")
class GoingAstray(TakingTurns):
    alternation = Turns(astray=True)


@register_container("all_at_once")
class AllAtOnce(TakingTurns):
    """No alternation, and one FSDP root over both."""

    wraps_root = True
    alternation = None


SAID: list[tuple[str, bool]] = []
"""What the models below were told about gradient synchronisation, in order."""


class OwnSync:
    """Gradient synchronisation of a model's own: mm-parallel's, written down."""

    def set_is_last_backward(self, value: bool) -> None:
        SAID.append(("last", value))
        mm_parallel.set_is_last_backward(self, value)  # type: ignore[arg-type]

    def set_requires_gradient_sync(self, value: bool) -> None:
        SAID.append(("sync", value))
        mm_parallel.set_requires_gradient_sync(self, value)  # type: ignore[arg-type]

    def set_requires_all_reduce(self, value: bool) -> None:
        SAID.append(("all_reduce", value))
        mm_parallel.set_requires_all_reduce(self, value)  # type: ignore[arg-type]


@register_model("single_own_sync")
class OwnSyncRegressor(OwnSync, Regressor):
    """On several ranks FSDP2 puts methods of the same names before these."""


@register_container("own_sync")
class OwnSyncContainer(OwnSync, AllAtOnce):
    wraps_root = False
