"""`BaseModel`: what a sub-model must offer to be built, loaded, sharded and trained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mm_checkpoint import LoadReport, WeightSource, get_key_map, load_weights
from mm_parallel import ContextParallel, KeyedInitializer
from mm_trainer.contracts.options import TakesOptions
from mm_trainer.contracts.sampling import Sampler
from mm_trainer.contracts.spec import InputSpec, ModelSpec, OptionsT
from mm_trainer.errors import ConfigError, nearest

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tokenizer = Callable[[Sequence[str]], dict[str, Tensor]]
"""Picklable (it travels to data workers): prompts → ``{"prompt_ids": (B, L) int64, "prompt_mask": (B, L) int64}``."""


class BaseModel(nn.Module, TakesOptions[OptionsT]):
    """Base class of every sub-model; registered under the entry-point group ``mm_trainer.models``.

    The framework calls, in this order (see [Note: build order] in `mm_trainer.engine.build`):

    1. :meth:`from_config` with parameters on meta, or :meth:`from_pretrained` where ``meta_init: false``;
    2. freezing, recompute and offload, FSDP2, materialisation (nothing the model does itself);
    3. :meth:`setup_weights` with the resolved source, or :meth:`init_weights` if no source is named;
    4. :meth:`post_load`.

    A module casts its floating inputs to ``weight.dtype`` in its own forward, since FSDP2 is told not to
    (``cast_forward_inputs=False``: it would round timesteps and rotary tables as well). Its caller can't do that: any
    module may be a unit, whose weights have the compute dtype only while its own forward runs.

    A model that is trained without a container computes its loss itself, from ``**batch`` (see `Batch`); all randomness
    of a sample is keyed by ``spec.seed`` and ``batch["sample_key"]`` (`mm_trainer.randomness`). It may offer conditions
    to cache, see `PreparesConditions`.

    A model with keys of its own derives from ``BaseModel[MyOptions]``; its ``spec.options`` is then a ``MyOptions``.
    """

    key_map: ClassVar[str | None] = None
    """Name of the registered key map between weight files and this model's own names; None: the names are equal."""
    architectures: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named shapes for ``architecture: NAME``, each written like the ``config.json`` of a weight folder."""

    splits_sequence: ClassVar[bool] = False
    """True: its forward splits the sequence by :attr:`context_parallel`. A trained model that doesn't is refused under
    context parallelism, where the ranks of a group would all compute the same."""

    clip_entries: ClassVar[tuple[str, ...]] = ()
    """A single model: which entries of clip processors (`ClipProcessor.entries`) its forward reads."""

    sampler: ClassVar[type[Sampler[Any]] | None] = None
    """A single model: makes clips for `mm-trainer sample`; optional."""

    context_parallel: ContextParallel

    def __init__(self) -> None:
        super().__init__()
        self.context_parallel = ContextParallel.single()

    # --- building -----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def from_config(cls, spec: ModelSpec[OptionsT]) -> Self:
        """Build the structure only; called with parameters going to meta. Shapes: :meth:`read_architecture`."""
        raise NotImplementedError(f"{cls.__qualname__} doesn't implement from_config")

    @classmethod
    def from_pretrained(cls, spec: ModelSpec) -> Self:
        """Build with real memory and load the weights (``meta_init: false``); opens the weight folder once."""
        model = cls.from_config(spec).to(DTYPES[spec.dtype])
        if spec.weights is None:
            raise ConfigError(
                f"{cls.__name__} is built with meta_init: false, which loads weights, but no source is named",
                key=f"{spec.key}.from_pretrained",
            )
        model.setup_weights(spec.weights, allow_missing=spec.source.allow_missing)
        return model

    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        """Keys that shapes may have: by default all that a named architecture has. A class that hands them on to one
        that exists already states that one's. Empty: not known, so that nothing can be refused."""
        return {key for shapes in cls.architectures.values() for key in shapes}

    @classmethod
    def read_architecture(cls, spec: ModelSpec) -> dict[str, Any]:
        """The model's shapes as written in a ``config.json``: from the weight folder, else from ``architecture``.

        Keys of ``architecture`` that the folder doesn't state are added to what it states.

        Raises:
            ConfigError: neither is there, the name is unknown, a key is unknown, or both are there and disagree.
        """
        where = f"{spec.key}.architecture"
        named = cls._named_architecture(spec.architecture, where)
        on_disk = spec.weights.config if spec.weights is not None else None
        if isinstance(spec.architecture, Mapping):
            cls._refuse_unknown(spec.architecture, on_disk or {}, where)
        if spec.weights is None or on_disk is None:
            if named is None:
                raise ConfigError(
                    f"no shapes for {spec.name}: no readable folder has a config.json, and there is no architecture",
                    key=where,
                )
            return named
        both = {k: (v, on_disk[k]) for k, v in (named or {}).items() if k in on_disk}
        differing = {k: (ours, theirs) for k, (ours, theirs) in both.items() if _as_json(ours) != _as_json(theirs)}
        if differing:
            listed = ", ".join(f"{k}: {ours!r} here, {theirs!r} there" for k, (ours, theirs) in differing.items())
            raise ConfigError(f"architecture disagrees with the weight folder {spec.weights.path}: {listed}", key=where)
        # A name only says what is expected: its keys may be those of another form of the same file.
        return {**on_disk, **named} if named is not None and isinstance(spec.architecture, Mapping) else on_disk

    @classmethod
    def _named_architecture(cls, architecture: str | Mapping[str, Any] | None, where: str) -> dict[str, Any] | None:
        if not isinstance(architecture, str):
            return None if architecture is None else dict(architecture)
        if architecture not in cls.architectures:
            known = ", ".join(sorted(cls.architectures)) or "none"
            raise ConfigError(f"unknown architecture {architecture!r}; {cls.__name__} knows: {known}", key=where)
        return dict(cls.architectures[architecture])

    @classmethod
    def _refuse_unknown(cls, given: Mapping[str, Any], on_disk: Mapping[str, Any], where: str) -> None:
        known = {*cls.architecture_fields(), *on_disk}
        unknown = [key for key in given if known and key not in known and not key.startswith("_")]
        if unknown:
            close = nearest(unknown[0], known)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"{cls.__name__} has no such shape; {hint}", key=f"{where}.{unknown[0]}")

    @classmethod
    def tiny_architecture(cls, architecture: Mapping[str, Any]) -> dict[str, Any] | None:
        """Shapes like ``architecture`` and small enough for a step on a CPU, for ``mm-trainer check --forward``.

        What the sub-models of one container hand each other must go on fitting, so all of them are cut down or none.

        Returns:
            None: this model can't be cut down.
        """
        return None

    @classmethod
    def export_config(cls, spec: ModelSpec) -> dict[str, Any] | None:
        """The ``config.json`` of an exported folder; None if this model has none. By default that of the source."""
        if spec.architecture is None and (spec.weights is None or spec.weights.config is None):
            return None
        return cls.read_architecture(spec)

    @classmethod
    def export_folder(cls, spec: ModelSpec) -> str:
        """Folder of this model in an exported pipeline: by default the one it came from, if that stands in a pipeline
        (next to a ``model_index.json``), else the model's name in the configuration, ``model`` for a single one."""
        if spec.weights is not None and (spec.weights.path.parent / "model_index.json").is_file():
            return spec.weights.path.name
        return spec.name

    # --- weights ------------------------------------------------------------------------------------------------

    def weight_root(self) -> nn.Module:
        """The module whose parameter names (through the key map) are those of the weight file; a wrapper returns the
        wrapped model."""
        return self

    def setup_weights(self, source: WeightSource, *, allow_missing: Sequence[str] = ()) -> LoadReport:
        """Stream ``source`` into the (possibly sharded) parameters, then :meth:`post_load`.

        Every persistent parameter and buffer comes from the source, except ``allow_missing`` and ties; anything else
        missing raises `mm_checkpoint.CheckpointError`.
        """
        key_map = get_key_map(self.key_map) if self.key_map is not None else None
        report = load_weights(self.weight_root(), source, key_map=key_map, allow_missing=tuple(allow_missing))
        self.post_load()
        return report

    def post_load(self) -> None:
        """Hook after weights were loaded or initialised (re-tie parameters, rebuild tables).

        It is called again when a run resumes, so it must give the same a second time.
        """

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        """Initialise for training from scratch, every parameter by ``init`` with key ``prefix + name``.

        The values depend on (seed, key) alone, never on the sharding. The default refuses: a model without an
        initialisation rule can't be trained from scratch.
        """
        raise ConfigError(f"{type(self).__name__} has no rule for training from scratch: name a weight source")

    def train(self, mode: bool = True) -> Self:
        """Switch what has something to train; a module whose parameters are all frozen stays in eval, with all that is
        inside it (its dropout is off, its statistics stand still)."""
        super().train(mode)
        if mode:
            _settle_frozen(self)
        return self

    # --- what data, metrics and the parallel layer ask ------------------------------------------------------------

    def input_spec(self) -> InputSpec:
        """This model's part of the rules for its input; by default it has none (any clip, no text length)."""
        return InputSpec()

    def flops(self, shape: Sequence[int]) -> int:
        """Floating-point operations of one forward of one sample, multiply and add counted as two; 0: not counted.

        Args:
            shape: the sample's shape as this model's input has it, without the batch dim (a diffusion transformer:
                ``(C, F, H, W)`` of the latents).
        """
        return 0

    def set_context_parallel(self, context_parallel: ContextParallel) -> None:
        """Take the object that splits, gathers and attends over a sequence. Models that hold no sequence ignore it."""
        self.context_parallel = context_parallel

    @classmethod
    def build_tokenizer(cls, path: str, spec: ModelSpec[OptionsT]) -> Tokenizer | None:
        """The tokenise step of a text encoder, reference cleaning included; None for every other model.

        Args:
            path: the tokenizer's folder.
            spec: this model's part of the configuration (its options state the text length).
        """
        return None


def _as_json(value: Any) -> Any:
    """As a ``config.json`` would have it: a tuple is a list there."""
    return [_as_json(entry) for entry in value] if isinstance(value, list | tuple) else value


def _settle_frozen(module: nn.Module) -> bool | None:
    """Put the outermost frozen modules below ``module`` into eval; whether it has something to train, None: it holds no
    parameters and goes with what is around it."""
    below = [_settle_frozen(child) for child in module.children()]
    own = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
    known = [trained for trained in (*below, *own) if trained is not None]
    if not known:
        return None
    if not any(known):
        module.eval()
    return any(known)
