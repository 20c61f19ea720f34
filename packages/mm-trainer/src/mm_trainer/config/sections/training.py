"""The sections ``training`` and ``tools``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mm_trainer.config.sections.fields import LocalPath, Section
from mm_trainer.errors import FieldError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EMAConfig(Section):
    """``training.ema``: a running average of the trained weights."""

    enable: bool | None = None
    """null: on as soon as decay is given."""
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the average that a step keeps; null: 0.9999."""

    @property
    def rate(self) -> float | None:
        """The decay, or None if there is no average."""
        is_on = self.decay is not None if self.enable is None else self.enable
        return (0.9999 if self.decay is None else self.decay) if is_on else None


class LRScale(Section):
    """One entry of ``training.lr_scaling_plan``."""

    apply_modules: tuple[str, ...] = Field(min_length=1)
    """Patterns of parameter or module names."""
    scale: Finite
    """Factor on the learning rate; 0 keeps the parameters as they are but in the optimizer."""


class TrainingConfig(Section):
    """How long, with which optimizer, and what is written when."""

    micro_batch_size: Positive = 1
    """Samples per forward of one data rank."""
    gradient_accumulation_steps: Positive | Literal["auto"] = 1
    """Micro-batches per update; auto divides global_batch_size by what the ranks make of one."""
    global_batch_size: Positive | None = None
    """Samples per update; if given, it must equal micro batch × data ranks × accumulation."""
    train_iters: Positive | None = None
    """Updates in all; or train_epochs."""
    train_epochs: Positive | None = None
    """Passes over the data; or train_iters."""

    optimizer: str = "adamw"
    """Name in the entry-point group mm_trainer.optimizers. adamw_8bit: 8-bit moments; adamw_sr: bf16 weights, rounded
    stochastically; muon: for the matrices of blocks."""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """Keys of an optimizer from elsewhere; those that mm-trainer brings have none."""
    lr: Finite = 1e-5
    """Learning rate after warm-up."""
    lr_min: Finite = 0.0
    """Learning rate at the end of a decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_ratio: Fraction = 0.0
    """Share of train_iters over which the learning rate rises; or lr_warmup_iters."""
    lr_warmup_iters: Count | None = None
    """Updates over which the learning rate rises."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Share of the momentum that a step keeps."""
    muon_params: tuple[str, ...] = ()
    """Patterns of parameter or module names whose matrices muon updates; empty: those in the models' nn.ModuleLists."""
    weight_decay: Finite = 0.01
    no_decay_params: tuple[str, ...] = ()
    """Patterns of parameter or module names without weight decay."""
    lr_scaling_plan: tuple[LRScale, ...] = ()
    """Learning rates that differ by module."""
    clip_grad: Finite | None = 1.0
    """Largest norm of the gradient; null or 0: no clipping."""
    condition_mbs: Positive = 1
    """Micro-batches whose conditions (latents, text) are computed in one go."""
    ema: EMAConfig = EMAConfig()

    save: LocalPath = Path("outputs/run")
    """Folder of the run: checkpoints, logs, samples, the resolved configuration."""
    save_interval: Count = 500
    """Updates between checkpoints; 0: only at the end."""
    save_async: bool = True
    """Write in the background; the step waits only for the copy out of the model."""
    keep_last: int = 3
    """Checkpoints kept; -1 keeps all."""
    keep_every: Positive | None = None
    """Checkpoints whose iteration is a multiple of this are kept for good."""
    load: Literal["auto"] | LocalPath | None = None
    """A run or an iteration to go on from; auto: the newest complete checkpoint in `save`, if there is one."""
    no_load_optim: bool = False
    """Resume the weights only, with a fresh optimizer."""
    init_from: LocalPath | None = None
    """Warm start: weights of an earlier run, step 0, fresh optimizer. With `load: auto` only the first start is one;
    once `save` holds a checkpoint, the run goes on from there."""
    init_model_with_meta_device: bool = True
    """Default of every sub-model's meta_init."""

    nan_policy: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that isn't finite does."""
    grace_time_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds after SIGTERM in which a checkpoint is written."""
    step_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which a step that hasn't ended prints every rank's stack; null: no watch."""
    gc_interval: Positive = 50
    """Updates between runs of Python's garbage collector, which is off otherwise so that ranks don't stall in turn."""
    log_interval: Positive = 1
    val_interval: Count = 0
    """Updates between validations; 0: none."""
    val_quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.1, 0.3, 0.5, 0.7, 0.9), min_length=1
    )
    """Points of the noise distribution at which the validation loss is taken."""
    seed: Count = 42
    deterministic: bool = False
    """Only operators that give the same bits in every run."""
    plugin: tuple[str, ...] = ()
    """Modules to import that register models, data sets, … with the decorators of `mm_trainer.registry`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_iters is not None and self.train_epochs is not None:
            raise FieldError("train_epochs", "train_iters is given as well; keep one of the two")
        if self.train_iters is None and self.train_epochs is None:
            raise FieldError("train_iters", "how long to train is missing; give train_iters or train_epochs")
        if self.lr_warmup_iters is not None and self.lr_warmup_ratio:
            raise FieldError("lr_warmup_iters", "lr_warmup_ratio is given as well; keep one of the two")
        if self.lr_min > self.lr:
            raise FieldError("lr_min", f"expected at most lr = {self.lr}, got {self.lr_min}")
        for name in ("muon_momentum", "muon_params"):
            if self.optimizer != "muon" and getattr(self, name) != type(self).model_fields[name].default:
                raise FieldError(name, f"only read by `optimizer: muon`, and it is {self.optimizer}")
        if self.keep_last == 0 or self.keep_last < -1:
            raise FieldError("keep_last", f"expected -1 (keep all) or at least 1, got {self.keep_last}")
        if self.gradient_accumulation_steps == "auto" and self.global_batch_size is None:
            raise FieldError("gradient_accumulation_steps", "auto follows from global_batch_size, which is not given")
        if self.load not in (None, "auto") and self.init_from is not None:
            raise FieldError(
                "init_from", "a warm start can't be combined with a resume; remove it, or set `load: auto`"
            )
        if self.no_load_optim and self.load is None:
            raise FieldError("no_load_optim", "nothing is loaded; give `load`, or use init_from for a warm start")
        if len(set(self.val_quantiles)) != len(self.val_quantiles):
            raise FieldError("val_quantiles", f"a value is given twice in {list(self.val_quantiles)}")
        return self


class WindowConfig(Section):
    """A recording over a few steps on some ranks."""

    enable: bool = False
    start_step: Positive
    """First update recorded, counted from 1."""
    end_step: Positive
    """Last update recorded."""
    ranks: tuple[Count, ...] = Field(default=(0,), min_length=1)
    save_path: LocalPath | None = None
    """Folder; null: a folder in `training.save`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end_step < self.start_step:
            raise FieldError("end_step", f"expected at least start_step = {self.start_step}, got {self.end_step}")
        return self


class ProfileConfig(WindowConfig):
    """``tools.profile``: traces of the torch profiler."""

    start_step: Positive = 10
    end_step: Positive = 12


class MemoryProfileConfig(WindowConfig):
    """``tools.memory_profile``: snapshots of the allocator, and what each sub-model holds."""

    start_step: Positive = 1
    end_step: Positive = 2


class WandbConfig(Section):
    """``tools.logging.wandb``."""

    project: str
    name: str | None = None
    entity: str | None = None


class TrackioConfig(Section):
    """``tools.logging.trackio``."""

    project: str
    name: str | None = None


class LoggingConfig(Section):
    """``tools.logging``: where metrics go besides the terminal and ``logs/``."""

    tensorboard: bool = True
    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None


class ToolsConfig(Section):
    """Looking at a run from the outside."""

    profile: ProfileConfig = ProfileConfig()
    memory_profile: MemoryProfileConfig = MemoryProfileConfig()
    logging: LoggingConfig = LoggingConfig()
