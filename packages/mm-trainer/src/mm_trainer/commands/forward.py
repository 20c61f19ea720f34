"""``mm-trainer check --forward``: one tiny step on the CPU, which finds what only a step can find.

The step is that of a run: the configuration's own model, data set, plan and features. Sub-models are cut down where
their classes say how (`BaseModel.tiny_architecture`), and clips where the models say what fits them. Then the same step
again with other settings, whose results must agree, and an export that the model itself reads back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_checkpoint import CheckpointManager, WeightSourceConfig, export, resolve_source
from mm_parallel import FieldError, KeyedInitializer, ParallelMesh, check_features
from mm_parallel.config import FeaturesConfig, FSDPPlan, RecomputePlan
from mm_trainer import registry
from mm_trainer.commands.prepare import Prepared
from mm_trainer.config import BoundConfig
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.model import BaseModel
from mm_trainer.contracts.spec import InputSpec, ModelSpec
from mm_trainer.data import build_loader
from mm_trainer.data.batch import Batch, to_device
from mm_trainer.engine.build import BuiltModel, build_model
from mm_trainer.engine.checkpoint import CheckpointIO, Progress
from mm_trainer.engine.coverage import GradientCoverage
from mm_trainer.engine.forward import Forward, own_class
from mm_trainer.engine.replicas import check_replicas
from mm_trainer.engine.stepping import Stepping
from mm_trainer.errors import ConfigError, InputError, TrainingFault
from mm_trainer.launch.process import process_group, set_up_logging
from mm_trainer.launch.rank import RankEnvironment
from mm_trainer.optim.optimizers import build_optimizers
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)

SMALL_SIDE, SMALL_FRAMES = 64, 2
"""Pixels that a side of a clip is cut to, where that fits the model; latent frames after the first."""


def check_forward(prepared: Prepared, *, forward: bool = True) -> int:
    """Run the checks; called once in every rank's process.

    Returns:
        the exit code, 0. Whatever is wrong raises.
    """
    environment = RankEnvironment.read()
    set_up_logging((environment or RankEnvironment()).rank)
    with process_group(environment, "cpu", timeout_s=prepared.config.parallel.timeout_s):
        findings = run_checks(prepared)
    for finding in findings:
        log.info("%s", finding)
    return 0


def run_checks(prepared: Prepared) -> list[str]:
    """The checks on the ranks of the process group, a line each; the first that fails raises.

    Raises:
        InputError: a plugin's mistake, or a result that should equal another and doesn't.
        TrainingFault: a trained sub-model without gradients, or ranks that differ.
    """
    check = _Check.begin(prepared)
    return list(check.run())


@dataclass(frozen=True)
class _Step:
    """What one step gave."""

    loss: float
    gradients: Mapping[str, Tensor]
    """This rank's shards, by full name."""


@dataclass(frozen=True)
class _Check:
    prepared: Prepared
    mesh: ParallelMesh
    bound: BoundConfig
    batch: Batch
    cut: tuple[str, ...] = field(default=())

    @classmethod
    def begin(cls, prepared: Prepared) -> _Check:
        config = prepared.config
        mesh = ParallelMesh.build(config.mesh, device_type="cpu")
        structure = prepared.structure
        spec = InputSpec() if structure is None else structure.model.input_spec()
        with registry.blaming(prepared.bound.datasets[0].factory, "reading the first micro-batch"):
            batch = next(iter(build_loader(config, prepared.bound, mesh, spec)))
        bound, cut = (prepared.bound, ()) if "conditions" in batch else _cut_models(prepared.bound)
        return cls(prepared, mesh, bound, _cut_clips(batch, spec) if cut else batch, cut)

    def run(self) -> Iterator[str]:
        plan, features = self.prepared.config.parallel.fsdp_plan, self.prepared.config.features
        if self.cut:
            yield f"cut down, with random weights: {', '.join(self.cut)}"
        built, step = self._step(plan, features)
        yield f"forward and backward: loss {step.loss:.6g}, {len(step.gradients)} parameters received gradients"
        folder = Path(self.prepared.config.training.save)
        paths = self._export(built, folder)
        self._read_back(built, paths)
        yield f"export: {', '.join(path.name for path in paths)}, read back as written"
        if plan.param_dtype != "bf16":
            yield self._in_bf16(plan, features)
        yield self._other_recompute(built, step, plan, features)

    def _build(self, plan: FSDPPlan, features: FeaturesConfig, bound: BoundConfig | None = None) -> BuiltModel:
        config = self.prepared.config
        try:
            return build_model(
                bound or self.bound,
                self.mesh,
                plan=plan,
                features=features,
                seed=config.training.seed,
                attention_kernel=config.parallel.attention_kernel,
                unused=self.prepared.bound.frozen if "conditions" in self.batch else (),
            )
        except FieldError as error:  # the patterns fitted the whole model
            raise InputError(f"{error} (in the model as it was cut down)") from error

    def _step(self, plan: FSDPPlan, features: FeaturesConfig) -> tuple[BuiltModel, _Step]:
        """Build, and run one forward and backward."""
        built = self._build(plan, features)
        optimizers = build_optimizers(built.trainable, self.prepared.config.training)
        alternation = built.model.alternation if isinstance(built.model, ModelContainer) else None
        trained = Stepping(alternation).begin(0, list(optimizers))
        check_replicas(built.model)
        with registry.blaming(own_class(built.model), f"a forward and backward under param_dtype: {plan.param_dtype}"):
            seed_generators(self.prepared.config.training.seed, "step", int(self.batch["sample_key"][0]))
            output = Forward(built.model)(to_device(self.batch, self.mesh.device))
            output.loss.backward()
        check_replicas(built.model, parameters=False)
        loss = float(output.loss.detach())
        if not math.isfinite(loss):
            raise InputError(f"{registry.origin(own_class(built.model))}: the loss of the first micro-batch is {loss}")
        if self.prepared.config.training.val_interval and output.per_sample is None:
            raise ConfigError("validation needs the losses of single samples (per_sample)", key="training.val_interval")
        try:
            GradientCoverage().check(trained, optimizers)
        except TrainingFault as error:  # a fault in a run, a finding here
            raise InputError(f"{registry.origin(own_class(built.model))}: {error}") from error
        gradients = {
            name: _local(parameter.grad).clone()
            for optimizer in optimizers.values()
            for parameter, name in optimizer.names.items()
            if parameter.grad is not None
        }
        return built, _Step(loss, gradients)

    def _in_bf16(self, plan: FSDPPlan, features: FeaturesConfig) -> str:
        """What the model does where its weights compute in bf16; no fault of a run that doesn't ask for it."""
        try:
            _, step = self._step(replace(plan, param_dtype="bf16"), features)
        except InputError as error:
            return f"param_dtype: bf16 would fail: {error}"
        return f"param_dtype: bf16: loss {step.loss:.6g}"

    def _other_recompute(self, built: BuiltModel, step: _Step, plan: FSDPPlan, features: FeaturesConfig) -> str:
        """The step without its recompute, or with that of all FSDP units."""
        if features.recomputes:
            on, plan_of_it = "off", RecomputePlan()
        else:
            on, plan_of_it = "on", RecomputePlan(apply_modules=plan.apply_modules)
        if on == "on" and not plan.apply_modules:
            return "recompute on: not tried: fsdp_plan.apply_modules names no units"
        changed = replace(features, recompute=on == "on", recompute_plan=plan_of_it)
        try:
            check_features(built.model, changed)
        except FieldError as error:  # units may hold other units, and there may be none
            return f"recompute {on}: not tried: {error}"
        _, other = self._step(plan, changed)
        self._compare(step, other, f"recompute {on}")
        return f"recompute {on}: loss and gradients equal"

    def _compare(self, step: _Step, other: _Step, what: str) -> None:
        """Both computed the same in the same order, so they agree to the bit."""
        differing = [name for name, value in step.gradients.items() if not torch.equal(value, other.gradients[name])]
        if step.loss != other.loss or differing:
            raise InputError(
                f"{what}: the step isn't the same: loss {step.loss!r} and {other.loss!r}, other gradients of "
                f"{', '.join(differing[:3]) or 'none'}; does a forward keep state, or draw from a generator of its own?"
            )

    # --- export -------------------------------------------------------------------------------------------------------

    def _export(self, built: BuiltModel, folder: Path) -> list[Path]:
        """Save a checkpoint and export it; the folders are known on all ranks."""
        for model in built.trainable.values():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                _local(parameter).add_(1)  # away from the initial values, which a load may come to by itself
        optimizers = build_optimizers(built.trainable, self.prepared.config.training)
        manager = CheckpointManager(folder, async_save=False)
        CheckpointIO(manager, built, optimizers, resolved_config="").save(Progress(), {})
        manager.close()
        told: list[Any] = [None]
        if self.mesh.rank == 0:
            told = [export(folder, folder / "exported")]
        dist.broadcast_object_list(told, src=0)
        paths: list[Path] = told[0]
        return paths

    def _read_back(self, built: BuiltModel, paths: list[Path]) -> None:
        """Load the exported folders by the models' own means, and compare everything."""
        folders = dict(zip((built.specs[name].name for name in built.checkpointed), paths, strict=True))
        specs = {
            name: _from(spec, folders[name]) if name in folders else spec for name, spec in self.bound.specs.items()
        }
        again = self._build(
            self.prepared.config.parallel.fsdp_plan, self.prepared.config.features, replace(self.bound, specs=specs)
        )
        expected, found = built.model.state_dict(), again.model.state_dict()
        differing = sorted(
            name
            for name, value in expected.items()
            if isinstance(value, Tensor) and not torch.equal(_local(value), _local(found[name]))
        )
        if differing:
            raise InputError(
                f"{len(differing)} of {len(expected)} tensors differ after an export and a load: "
                f"{', '.join(differing[:3])}; does weight_root() hold everything that is trained?"
            )


def _from(spec: ModelSpec, folder: Path) -> ModelSpec:
    source = WeightSourceConfig(from_pretrained=str(folder))
    return replace(spec, source=source, weights=resolve_source(source))


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local.detach()


# --- cutting down ---------------------------------------------------------------------------------------------------


def _cut_models(bound: BoundConfig) -> tuple[BoundConfig, tuple[str, ...]]:
    """Every sub-model in a tiny architecture, if all say how: what they hand each other must go on fitting."""
    specs, classes = dict(bound.specs), dict(bound.model_classes)
    for name, kind in bound.model_classes.items():
        spec = bound.specs[name]
        tiny = kind.tiny_architecture(kind.read_architecture(spec)) if _has_architecture(spec) else None
        if tiny is None:
            return bound, ()
        specs[name] = replace(spec, architecture=_known(tiny, kind), weights=None, meta_init=True)
        if kind.init_weights is BaseModel.init_weights:
            classes[name] = _with_init(kind)
    return replace(bound, specs=specs, model_classes=classes), tuple(specs)


def _known(shapes: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Without what only the file says: as ``architecture``, a key that the class doesn't know would be refused."""
    fields = kind.architecture_fields()
    return {key: value for key, value in shapes.items() if not fields or key in fields}


def _has_architecture(spec: ModelSpec) -> bool:
    return spec.architecture is not None or spec.weights is not None


def _with_init(kind: type[BaseModel]) -> type[BaseModel]:
    """The class with a rule for random weights, for one that is always loaded."""

    def init_weights(self: nn.Module, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                init.normal_(parameter, prefix + name, std=parameter[0].numel() ** -0.5)
            elif name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.ones_(parameter)

    names = {"init_weights": init_weights, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _cut_clips(batch: Batch, spec: InputSpec) -> Batch:
    """Pixels, see [Note: pixels] in `mm_trainer.data.batch`, cut to a few frames and a size that fit the models."""
    side = -(-SMALL_SIDE // spec.spatial_multiple) * spec.spatial_multiple
    frames = SMALL_FRAMES * spec.frame_stride + 1

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: cut(entry) for name, entry in value.items()}
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim < 4:
            return value
        value = value[..., :side, :side]
        return value[..., :frames, :, :].contiguous() if value.ndim > 4 else value.contiguous()

    return {name: cut(value) for name, value in batch.items()}
