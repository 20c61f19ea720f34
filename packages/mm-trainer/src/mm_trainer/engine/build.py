"""From a bound configuration to a built, sharded, loaded model.

[Note: build order]
plugins named by the config → typed config → names, patterns and tasks resolved on a meta build → process group and mesh
→ sub-models (parameters on meta, or real where ``meta_init: false``) → freeze → recompute and activation offload →
FSDP2 wrap → materialise → weights stream into the local shards, or resume → optimizer → data → loop.

- What stands before the process group is what ``mm-trainer check`` runs (`build_structure`), without weights.
- Features replace a module's forward, so names stay; they come before the wrap.
- Materialisation comes after the wrap, so that the sharded layout exists first and no rank ever holds a full copy.
- A resumed run fills its trained sub-models from the checkpoint; frozen ones still load from their own source.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from mm_checkpoint import LoadReport, get_key_map
from mm_parallel import (
    KeyedInitializer,
    ParallelMesh,
    ParallelReport,
    apply_features,
    find_unwritten,
    materialize,
    meta_parameters,
    parallelize,
)
from mm_parallel.config import FeaturesConfig, FSDPPlan
from mm_trainer import registry
from mm_trainer.config import BoundConfig
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.model import DTYPES, BaseModel
from mm_trainer.contracts.pipeline import GenerativePipeline
from mm_trainer.contracts.spec import ModelSpec
from mm_trainer.errors import ConfigError, InputError
from mm_trainer.optim.parameters import match_parameters
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train, however it was built."""

    model: BaseModel | ModelContainer
    """`ModelContainer`, or the single model: ``model(**batch).loss``."""
    sub_models: Mapping[str, BaseModel]
    """Dotted prefix of parameter names → sub-model; the single-model path has one, under the empty name."""
    checkpointed: tuple[str, ...]
    """Those of `sub_models` that go into a checkpoint."""
    specs: Mapping[str, ModelSpec]
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sub-model → one line that says where its weights came from."""
    loads: Mapping[str, LoadReport] = field(default_factory=dict)
    """Sub-model → what was read, for those that were streamed from files."""
    parallel_report: ParallelReport | None = None

    @property
    def trainable(self) -> dict[str, BaseModel]:
        """The sub-models that have a parameter to train."""
        return {n: m for n, m in self.sub_models.items() if any(p.requires_grad for p in m.parameters())}

    @property
    def frozen(self) -> list[BaseModel]:
        """The sub-models that have nothing to train."""
        return [m for m in self.sub_models.values() if not any(p.requires_grad for p in m.parameters())]

    @property
    def roots(self) -> Mapping[str, BaseModel] | None:
        """The sub-models, where each is an FSDP root of its own; None: the model is the only root."""
        separate = isinstance(self.model, ModelContainer) and not self.model.wraps_root
        return self.sub_models if separate else None


def build_structure(bound: BoundConfig, *, seed: int = 0) -> BuiltModel:
    """Build everything on meta, freeze, and check what can be checked without weights or ranks.

    Raises:
        ConfigError: shapes can't be found, a task doesn't fit, a freeze pattern matches nothing.
    """
    components = {name: _on_meta(bound, name, seed) for name in bound.specs}
    return _assemble(bound, components, seed)


def build_model(
    bound: BoundConfig,
    mesh: ParallelMesh,
    *,
    structure: BuiltModel | None = None,
    plan: FSDPPlan,
    features: FeaturesConfig,
    seed: int,
    attention_kernel: str = "auto",
    resuming: bool = False,
    unused: Collection[str] = (),
) -> BuiltModel:
    """Build, shard, materialise and load, in the order of [Note: build order]; called on all ranks.

    Args:
        structure: what `build_structure` made of ``bound``, to continue from: its sub-models become this model's.
        attention_kernel: local kernel of self-attention, see `mm_parallel.ContextParallel`.
        resuming: leave the checkpointed sub-models' weights to the checkpoint that is loaded next.
        unused: sub-models that this run never calls (encoders whose output is cached): they stay on meta, without
            memory or weights.
    """
    from_checkpoint = _checkpointed_names(bound) if resuming else ()
    ready = {} if structure is None else {structure.specs[p].name: m for p, m in structure.sub_models.items()}
    components = {
        name: (ready[name] if name in ready else _on_meta(bound, name, seed))
        if spec.meta_init or name in from_checkpoint or name in unused
        else bound.model_classes[name].from_pretrained(spec)
        for name, spec in bound.specs.items()
    }
    built = _assemble(bound, components, seed)
    for model in components.values():
        model.set_context_parallel(mesh.context_parallel(kernel=attention_kernel))
    # Before the wrap: recompute and offload replace forwards, which FSDP2's hooks must then surround.
    apply_features(built.model, features)
    if built.roots is None:
        plan = replace(plan, output_dtype=None)  # what the only root returns is the loss, which stays float32
    report = parallelize(built.model, mesh=mesh, plan=plan, sub_models=built.roots)
    for name, model in components.items():
        if name not in unused:
            # Only now, with the sharded layout in place: no rank allocates more than its shards.
            materialize(model, mesh.device)
    sources, loads = {}, {}
    for prefix, model in built.sub_models.items():
        spec = built.specs[prefix]
        if spec.name in unused:
            sources[prefix] = "none: this run doesn't use it"
        elif spec.name in from_checkpoint:
            sources[prefix] = "a checkpoint, filled in below"
        elif not spec.meta_init:
            sources[prefix] = spec.weights.describe() if spec.weights is not None else "no source"
        elif spec.weights is not None:
            with registry.blaming(model, "setup_weights"):
                loads[prefix] = model.setup_weights(spec.weights, allow_missing=spec.source.allow_missing)
            sources[prefix] = loads[prefix].summary() + _init_the_rest(model, prefix, seed)
        else:
            with registry.blaming(model, "init_weights"):
                model.init_weights(KeyedInitializer(seed), f"{prefix}." if prefix else "")
                model.post_load()
            sources[prefix] = f"initialised at random from seed {seed}: no weight source is named"
        if spec.meta_init and spec.name not in (*from_checkpoint, *unused):
            refuse_unwritten(model, prefix)
    return replace(built, sources=sources, loads=loads, parallel_report=report)


def _init_the_rest(model: BaseModel, prefix: str, seed: int) -> str:
    """Initialise what the weights didn't bring: names that may be missing, and parameters outside the weight root.

    Returns:
        what was done, to be put behind the source's line; empty if the weights brought everything.
    """
    left = find_unwritten(model)
    if not left or type(model).init_weights is BaseModel.init_weights:
        return ""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: _versions(tensor) for name, tensor in tensors.items() if name not in left}
    with registry.blaming(model, "init_weights"):
        rest = KeyedInitializer(seed, only=[tensors[name] for name in left])
        model.init_weights(rest, f"{prefix}." if prefix else "")
    changed = [name for name, versions in kept.items() if _versions(tensors[name]) != versions]
    if changed:
        raise InputError(
            f"{registry.origin(model)}: init_weights writes {changed[0]} by other means than its initializer, and so "
            f"over loaded weights; the weights lack {', '.join(left[:3])}"
        )
    with registry.blaming(model, "post_load"):
        model.post_load()
    return f", initialised at random: {', '.join(left[:5])}{', …' if len(left) > 5 else ''}"


def _versions(tensor: Tensor) -> tuple[int, int]:
    """Counts of writes; those into a shard are counted there."""
    return tensor._version, getattr(tensor, "_local_tensor", tensor)._version


def refuse_unwritten(model: BaseModel, prefix: str) -> None:
    """Raise if memory of a sub-model was never filled; called on all ranks, after weights and `BaseModel.post_load`.

    Raises:
        InputError: on all ranks, with the names.
    """
    left = find_unwritten(model)
    if left:
        raise InputError(
            f"{registry.origin(model)}: {len(left)} tensor(s) of {prefix or 'the model'} were never filled, neither by "
            f"weights nor by init_weights or post_load: {', '.join(left[:5])}{', …' if len(left) > 5 else ''}"
        )


def _on_meta(bound: BoundConfig, name: str, seed: int) -> BaseModel:
    spec = bound.specs[name]
    seed_generators(seed, name, 0)  # a constructor may fill a buffer at random, equal on all ranks
    kind = bound.model_classes[name]
    with registry.blaming(kind, "from_config"), meta_parameters():
        model = kind.from_config(spec)
    return model.to(DTYPES[spec.dtype])


def _checkpointed_names(bound: BoundConfig) -> tuple[str, ...]:
    if bound.container_class is None:
        return tuple(bound.specs)
    return bound.container_class.checkpointed(bound.specs)


def _assemble(bound: BoundConfig, components: dict[str, BaseModel], seed: int) -> BuiltModel:
    for name, model in components.items():
        apply_freeze(model, bound.specs[name])
    if bound.container_class is None:
        (name, model), *_ = components.items()
        _check_key_map(model, bound.specs[name])
        return BuiltModel(
            model=model.train(), sub_models={"": model}, checkpointed=("",), specs={"": bound.specs[name]}
        )
    pipeline = _build_pipeline(bound, components, seed)
    with registry.blaming(bound.container_class, "the constructor"):
        container = bound.container_class(components, pipeline)
    built = BuiltModel(
        model=container.train(),
        sub_models=container.get_sub_models(),
        checkpointed=tuple(container.checkpoint_submodels),
        specs=bound.specs,
    )
    # A sub-model that is trained but not checkpointed would silently lose its training on resume.
    lost = [name for name in built.trainable if name not in built.checkpointed]
    if lost:
        raise ConfigError(
            f"{lost[0]} is neither frozen nor part of a checkpoint, so its training would be lost; set freeze: true "
            f"(checkpointed here: {', '.join(built.checkpointed)})",
            key=f"model.models.{lost[0]}.freeze",
        )
    for name in built.checkpointed:
        _check_key_map(built.sub_models[name], built.specs[name])
    if not built.trainable:
        raise ConfigError("every sub-model is frozen: there is nothing to train", key="model.models")
    return built


def _build_pipeline(bound: BoundConfig, components: Mapping[str, BaseModel], seed: int) -> GenerativePipeline | None:
    kind, options = bound.pipeline_class, bound.container_options
    if kind is None:
        return None
    if not isinstance(options, kind.Options):
        raise ConfigError(
            f"{kind.__qualname__} reads options of {kind.Options.__qualname__}, which those of this container "
            f"({type(options).__qualname__}) aren't derived from",
            key="model.pipeline",
        )
    # Python refuses an abstract class only when one is made, which `build` may not do.
    if kind.__abstractmethods__:
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"{registry.origin(kind)} doesn't implement {missing}", key="model.pipeline")
    with registry.blaming(kind, "build"):
        return kind.build(options=options, components=components, task=bound.task, seed=seed)


def _check_key_map(model: BaseModel, spec: ModelSpec) -> None:
    """What is trained will be exported: a name without a place in the weight file is better reported before the run."""
    if model.key_map is None:
        return
    uncovered = get_key_map(model.key_map).uncovered(model.weight_root().state_dict(), to="source")
    if uncovered:
        raise ConfigError(
            f"the key map {model.key_map} of {spec.model_id} has no rule for {len(uncovered)} name(s), which therefore "
            f"could never be exported: {', '.join(sorted(uncovered)[:3])}{', …' if len(uncovered) > 3 else ''}",
            key=spec.key,
        )


def apply_freeze(model: BaseModel, spec: ModelSpec) -> None:
    """Turn gradients off: of the whole sub-model, which then stays in eval, or of the parameters that patterns name."""
    if spec.freeze is True:
        model.requires_grad_(False).eval()
        return
    if spec.freeze:
        parameters = dict(model.named_parameters())
        for name in match_parameters(parameters, spec.freeze, key=f"{spec.key}.freeze"):
            parameters[name].requires_grad_(False)
