"""What authors of plugins get wrong, one class a mistake; `test_trainer_plugin_mistakes` installs it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from mm_checkpoint import KeyMap
from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, DatasetContext, GenerativePipeline, InputSpec, ModelContainer, ModelSpec


class CastLinear(nn.Linear):
    """Casts its input in the unit that owns the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Right(BaseModel):
    """No mistake: the mean of squares of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = CastLinear(4, 4)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            init.normal_(parameter, prefix + name, std=0.5)

    def losses(self, row: Tensor) -> Tensor:
        """(B, 4) → (B,)."""
        return self.layer(row).square().mean(1)

    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=self.losses(row).mean())


class NoCast(Right):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class CastOutside(NoCast):
    """Asks for the weight's dtype outside the unit, where it is still that of the shards."""

    def losses(self, row: Tensor) -> Tensor:
        return super().losses(row.to(self.layer.weight.dtype))


class OwnDice(Right):
    """Draws from a generator of its own, which nobody sets back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DiceLinear(4, 4)


class DiceLinear(CastLinear):
    dice = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand((), generator=self.dice))


class Forgetful(Right):
    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        init.normal_(self.layer.weight, prefix + "layer.weight", std=0.5)


class OutsideRoot(Right):
    """Exports would lack what stands outside its root."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(CastLinear(4, 4))

    def weight_root(self) -> nn.Module:
        return self.net

    def losses(self, row: Tensor) -> Tensor:
        return super().losses(self.net(row))


class NotANumber(Right):
    def losses(self, row: Tensor) -> Tensor:
        return super().losses(row) / 0.0


class VectorLoss(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=self.losses(row))


class IntegerLoss(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=self.losses(row).sum().long())


class NumberLoss(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=float(self.losses(row).mean()))


class DetachedLoss(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=self.losses(row).mean().detach())


class NoGradLoss(Right):
    @torch.no_grad()
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(loss=self.losses(row).mean())


class LossInDict(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return {"loss": self.losses(row).mean()}


class BareLoss(Right):
    def forward(self, row: Tensor, **rest: Any) -> Any:
        return self.losses(row).mean()


class FewerKeys(Right):
    def forward(self, row: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=self.losses(row).mean())


class OtherKeys(Right):
    def forward(self, pixels: Tensor, **rest: Any) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=self.losses(pixels).mean())


class LooksUp(Right):
    def forward(self, **batch: Any) -> Any:
        return SimpleNamespace(loss=self.losses(batch["pixels"]).mean())


class Raising(Right):
    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        raise KeyError("width")


class NoStructure(BaseModel):
    def input_spec(self) -> InputSpec:
        return InputSpec()


class RaisingInit(Right):
    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        init.normal_(self.head.weight, prefix + "head.weight", std=0.5)  # there is no head


class MapItself(Right):
    key_map = KeyMap("mistaken")  # type: ignore[assignment]


class MapUnknown(Right):
    key_map = "mistakn"


class Rows:
    """No mistake: eight rows of four numbers."""

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        self.seed = context.seed

    def __len__(self) -> int:
        return 8

    def bucket(self, index: int) -> int:
        return 0

    def tokens(self, index: int) -> int:
        return 1

    def load(self, index: int, sample_key: int) -> Any:
        return {"row": torch.full((4,), 1.0 + index)}


class NoLength:
    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        """Nothing to keep."""

    bucket, tokens, load = Rows.bucket, Rows.tokens, Rows.load


class RaisingRows(Rows):
    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        raise OSError("no such bucket")


class TupleRows(Rows):
    def load(self, index: int, sample_key: int) -> Any:
        return torch.ones(4), index


class RaisingLoad(Rows):
    def load(self, index: int, sample_key: int) -> Any:
        raise KeyError("caption")


class MixedTypes(Rows):
    def load(self, index: int, sample_key: int) -> Any:
        return {**super().load(index, sample_key), "width": (1, None)[sample_key % 2]}


class Alone(ModelContainer):
    checkpoint_submodels = ("predictor",)
    pipeline_id = "mistaken_abstract"


class Undeclared(ModelContainer):
    pipeline_id = "mistaken_abstract"


class RaisingContainer(ModelContainer):
    checkpoint_submodels = ("predictor",)

    def __init__(self, components: Mapping[str, BaseModel], pipeline: Any = None) -> None:
        raise ZeroDivisionError("division by zero")


class Lonely(ModelContainer):
    """Two components of which it calls one."""

    checkpoint_submodels = ("predictor", "other")

    def forward(self, **batch: Any) -> Any:
        return self.get_sub_models()["predictor"](**batch)


class Abstract(GenerativePipeline):
    """Two of four stages."""

    @classmethod
    def build(cls, **settings: Any) -> Any:
        return cls()  # type: ignore[abstract]

    def prepare_conditions(self, components: Any, context: Any, batch: Any) -> Any:
        return {}

    def noising(self, components: Any, context: Any, conditions: Any, batch: Any) -> Any:
        return None


ENTRY_POINTS = """
[mm_trainer.models]
right = mistaken_plugin:Right
no_cast = mistaken_plugin:NoCast
cast_outside = mistaken_plugin:CastOutside
own_dice = mistaken_plugin:OwnDice
not_a_number = mistaken_plugin:NotANumber
forgetful = mistaken_plugin:Forgetful
outside_root = mistaken_plugin:OutsideRoot
vector_loss = mistaken_plugin:VectorLoss
integer_loss = mistaken_plugin:IntegerLoss
number_loss = mistaken_plugin:NumberLoss
detached_loss = mistaken_plugin:DetachedLoss
no_grad_loss = mistaken_plugin:NoGradLoss
loss_in_dict = mistaken_plugin:LossInDict
bare_loss = mistaken_plugin:BareLoss
fewer_keys = mistaken_plugin:FewerKeys
other_keys = mistaken_plugin:OtherKeys
looks_up = mistaken_plugin:LooksUp
raising = mistaken_plugin:Raising
no_structure = mistaken_plugin:NoStructure
raising_init = mistaken_plugin:RaisingInit
map_itself = mistaken_plugin:MapItself
map_unknown = mistaken_plugin:MapUnknown
no_class = mistaken_plugin
dotted = mistaken_plugin.Right
[mm_trainer.containers]
alone = mistaken_plugin:Alone
undeclared = mistaken_plugin:Undeclared
raising_container = mistaken_plugin:RaisingContainer
lonely = mistaken_plugin:Lonely
[mm_trainer.pipelines]
mistaken_abstract = mistaken_plugin:Abstract
[mm_trainer.datasets]
mistaken_rows = mistaken_plugin:Rows
no_length = mistaken_plugin:NoLength
raising_rows = mistaken_plugin:RaisingRows
tuple_rows = mistaken_plugin:TupleRows
raising_load = mistaken_plugin:RaisingLoad
mixed_types = mistaken_plugin:MixedTypes
"""
