"""The container's lifecycle duties, with two plain modules as components."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_trainer.contracts import BaseModel, InputSpec, ModelContainer, ModelSpec, NoOptions, Options, component
from mm_trainer.errors import ConfigError


class Part(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Part:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec(frame_stride=2, spatial_multiple=4)


class Pair(ModelContainer):
    checkpoint_submodels = ("predictor",)


def make_pair() -> Pair:
    container = Pair({"encoder": Part(), "predictor": Part()})
    container.encoder.requires_grad_(False).eval()
    return container


def test_components_are_flat_attributes() -> None:
    names = [name for name, _ in make_pair().named_modules()]
    assert "predictor.layer" in names
    assert list(make_pair().get_sub_models()) == ["encoder", "predictor"]


def test_train_leaves_frozen_components_in_eval() -> None:
    container = make_pair().train()
    assert container.predictor.dropout.training
    assert not container.encoder.dropout.training
    assert not container.eval().predictor.dropout.training


def test_what_is_frozen_in_a_trained_model_stays_in_eval() -> None:
    """The outermost module whose parameters are all frozen, with what is inside it; what has none: as its parent."""
    model = Part()
    model.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model.mixed = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    for frozen in (model.block, model.mixed[0]):
        frozen.requires_grad_(False)
    for _ in range(2):
        model.train()
        training = {name for name, module in model.named_modules() if module.training}
        assert training == {"", "layer", "dropout", "mixed", "mixed.1", "mixed.2"}
        model.eval()
        assert not any(module.training for module in model.modules())


def test_state_dict_holds_the_checkpointed_components_only() -> None:
    assert list(make_pair().state_dict()) == ["predictor.layer.weight", "predictor.layer.bias"]


def test_load_state_dict_dispatches_by_prefix_and_returns_the_incompatible_keys() -> None:
    source, target = make_pair(), make_pair()
    state = source.state_dict()
    target.load_state_dict(state)
    assert torch.equal(target.predictor.layer.weight, source.predictor.layer.weight)

    moved = {("encoder" + k[len("predictor") :] if k.endswith("bias") else k): v for k, v in state.items()}
    result = target.load_state_dict(moved, strict=False)
    assert result.missing_keys == ["predictor.layer.bias"]
    assert result.unexpected_keys == ["encoder.layer.bias"]
    with pytest.raises(RuntimeError, match=r"1 missing \['predictor.layer.bias'\], 1 unexpected"):
        target.load_state_dict(moved)


def test_a_container_opts_out_of_the_root_wrap() -> None:
    assert make_pair().wraps_root is False


def test_forward_without_a_pipeline_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Pair has no pipeline"):
        make_pair()(video=torch.zeros(1))


def test_checkpoint_submodels_must_be_declared_and_present() -> None:
    class Undeclared(ModelContainer):
        pass

    with pytest.raises(TypeError, match="must declare checkpoint_submodels"):
        Undeclared({"predictor": Part()})
    with pytest.raises(ValueError, match=r"checkpoints \['predictor'\], but is built from \['encoder'\]"):
        Pair({"encoder": Part()})


def test_input_specs_of_chained_models_multiply() -> None:
    spec = make_pair().input_spec()
    assert (spec.frame_stride, spec.spatial_multiple) == (4, 16)
    assert spec.tokens(frames=9, height=32, width=48) == 3 * 2 * 3


class Wide(Options):
    width: int = 1


class Narrow(Options):
    width: int = 2


def test_options_are_stated_once_as_the_type_argument() -> None:
    class Typed(BaseModel[Wide]):
        """States them."""

    class Heir(Typed):
        """Keeps them, as a class does that FSDP2 derives."""

    class Container(ModelContainer[Narrow]):
        """Another contract."""

    assert (Typed.Options, Heir.Options, Container.Options) == (Wide, Wide, Narrow)
    assert Part.Options is NoOptions
    with pytest.raises(TypeError, match="Twice: Options and the type argument name two classes"):

        class Twice(BaseModel[Wide]):
            Options = Narrow


def test_a_role_is_checked_where_a_pipeline_asks_for_its_class() -> None:
    components = make_pair().get_sub_models()
    assert component(components, "encoder", Part) is components["encoder"]

    class Other(Part):
        """Not what is there."""

    with pytest.raises(ConfigError, match="the role encoder takes a Other here, got a Part") as info:
        component(components, "encoder", Other)
    assert info.value.key == "model.models.encoder.model_id"
