"""The YAML sections ``parallel`` and ``features`` as frozen dataclasses; imports no torch.

Checks that need only one section happen here, in ``__post_init__``; those that need the number of ranks are in
:mod:`mm_parallel.sizes`, those that need the model in :func:`mm_parallel.parallelize`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mm_parallel.errors import FieldError, PlanError
from mm_parallel.patterns import compile_pattern, nearest

DTYPES = ("bf16", "fp16", "fp32")
ATTENTION_KERNELS = ("auto", "flash", "npu", "cpu_flash", "math")
RECOMPUTE_POLICIES = ("full", "every_n", "ops")

_FORBID_UNKNOWN_KEYS = {"extra": "forbid"}  # read by pydantic, where a config is composed of these classes


@dataclass(frozen=True)
class SubPlan:
    """How one sub-model departs from the plan above it; None takes the plan's own value.

    Args:
        enabled: False keeps the sub-model whole on every rank, as plain tensors (frozen sub-models only).
        shard_size: ranks that share one copy of the parameters; the copies are replicas of each other.
        reshard_after_forward: free the gathered parameters after the forward; an int keeps them sharded
            over that many ranks.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        trainable: must be True if a sub-model with its own shard size is trained (HSDP: gradients are
            reduce-scattered among shards and all-reduced across replicas).
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    enabled: bool = True
    shard_size: int | None = None
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool | None = None
    trainable: bool = False

    def __post_init__(self) -> None:
        if self.shard_size is not None:
            _require_at_least("sub_plans.<sub-model>", "shard_size", self.shard_size, 1)
        _check_reshard("sub_plans.<sub-model>", self.reshard_after_forward)
        if not self.enabled and (self.trainable or self.shard_size not in (None, 1)):
            raise FieldError(
                "sub_plans.<sub-model>",
                "enabled: false leaves the sub-model unsharded and its gradients "
                "unreduced, so it can't be combined with `trainable: true` or a shard_size; to train it whole "
                "on every rank use shard_size: 1",
                path=("enabled",),
            )


@dataclass(frozen=True)
class FSDPPlan:
    """Which modules become FSDP2 units, and under which policies.

    Args:
        apply_modules: patterns over ``named_modules()`` names, one unit per match (see ``match_modules``).
        ignored_modules: patterns of modules that stay plain: not sharded, not cast.
        param_dtype: dtype of all-gather and compute; None keeps each parameter's own. ``bf16 | fp16 | fp32``.
        reduce_dtype: dtype of gradient reduction; None is ``param_dtype``.
        output_dtype: dtype of the outputs of each sub-model's root; None leaves them as they are.
        reshard_after_forward: True | False | int (reshard to that many ranks).
        num_to_forward_prefetch: units gathered ahead in the forward, inside one sub-model.
        num_to_backward_prefetch: the same in the backward; 0 leaves FSDP2's own rule (the next one).
        cross_submodel_prefetch: the pipeline may start the next sub-model's gather early.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        reduce_every_micro_step: reduce gradients after each micro-batch: more communication, less memory.
        sub_plans: departures by sub-model name.
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    apply_modules: tuple[str, ...] = ()
    ignored_modules: tuple[str, ...] = ()
    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = "fp32"
    output_dtype: str | None = None
    reshard_after_forward: bool | int = True
    num_to_forward_prefetch: int = 1
    num_to_backward_prefetch: int = 1
    cross_submodel_prefetch: bool = False
    cpu_offload: bool = False
    reduce_every_micro_step: bool = False
    sub_plans: dict[str, SubPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _require_one_of("fsdp_plan", name, getattr(self, name), (*DTYPES, None))
        for name in ("num_to_forward_prefetch", "num_to_backward_prefetch"):
            _require_at_least("fsdp_plan", name, getattr(self, name), 0)
        if self.reshard_after_forward is None:
            raise _field_error(
                "fsdp_plan", "reshard_after_forward", "expected true, false or a number of ranks, got null"
            )
        _check_reshard("fsdp_plan", self.reshard_after_forward)
        _check_patterns("fsdp_plan", "apply_modules", self.apply_modules)
        _check_patterns("fsdp_plan", "ignored_modules", self.ignored_modules)

    def check_sub_plans(self, trained: Mapping[str, bool]) -> None:
        """Refuse sub-plans that contradict the model; needs nothing built, only what is trained.

        Args:
            trained: name of every sub-model → whether any parameter of it is trained.

        Raises:
            PlanError: every contradiction found.
        """
        faults = [
            fault for name, plan in self.sub_plans.items() for fault in self._sub_plan_faults(name, plan, trained)
        ]
        if faults:
            first, *others = faults
            raise PlanError(first.where, first.message, path=first.path, also=others)

    def _sub_plan_faults(self, name: str, plan: SubPlan, trained: Mapping[str, bool]) -> Iterator[PlanError]:
        def fault(message: str, *field: str) -> PlanError:
            return PlanError(f"fsdp_plan.sub_plans.{name}", message, path=("sub_plans", name, *field))

        if name not in trained:
            near = nearest(name, trained, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield fault(f"there is no such sub-model{hint} (there are: {', '.join(trained) or 'none'})")
            return
        what = "fsdp_plan.ignored_modules"
        if any(compile_pattern(pattern, what=what).fullmatch(name) for pattern in self.ignored_modules):
            yield fault(f"{what} names {name} as well; keep one of the two (enabled: false leaves it whole, too)")
        if plan.trainable and not trained[name]:
            yield fault("trainable: true, but every parameter of it is frozen", "trainable")
        if trained[name] and plan.shard_size is not None and not plan.trainable:
            yield fault(
                f"it is trained under a shard size of its own ({plan.shard_size}), which makes replicas that reduce "
                "their gradients across each other (HSDP); say so with trainable: true",
                "shard_size",
            )
        if trained[name] and not plan.enabled:
            yield fault(
                "it is trained, so its gradients must be reduced; freeze it, or keep it whole on every rank with "
                "shard_size: 1 and trainable: true",
                "enabled",
            )

    def reshard_for(self, sub_model: str) -> bool | int:
        """``reshard_after_forward`` of a sub-model's units."""
        own = self.sub_plans.get(sub_model, SubPlan()).reshard_after_forward
        return self.reshard_after_forward if own is None else own

    def offload_for(self, sub_model: str) -> bool:
        """``cpu_offload`` of a sub-model's units."""
        own = self.sub_plans.get(sub_model, SubPlan()).cpu_offload
        return self.cpu_offload if own is None else own


@dataclass(frozen=True)
class ParallelConfig:
    """The ``parallel`` section.

    Args:
        fully_shard_parallel_size: ranks that share one copy of the parameters; ``auto`` is all of them.
        data_parallel_size: derived (world / (ulysses × ring)); if given, it must agree.
        tensor_parallel_size: 1 for now.
        timeout_s: of the process group, in seconds.
        ulysses_parallel_size: ranks that exchange heads for tokens around attention; must divide the heads.
        ring_attention_size: ranks around which keys and values rotate.
        attention_kernel: local kernel of context-parallel attention: ``auto | flash | npu | cpu_flash |
            math``.
        ep_plan: refused; there are no expert-parallel layers yet.
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    fully_shard_parallel_size: int | Literal["auto"] = "auto"
    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    timeout_s: float = 1800.0
    ulysses_parallel_size: int = 1
    ring_attention_size: int = 1
    attention_kernel: str = "auto"
    ep_plan: Any = None
    fsdp_plan: FSDPPlan = field(default_factory=FSDPPlan)

    def __post_init__(self) -> None:
        if self.fully_shard_parallel_size != "auto":
            _require_at_least("parallel", "fully_shard_parallel_size", self.fully_shard_parallel_size, 1, "or auto")
        if self.data_parallel_size is not None:
            _require_at_least("parallel", "data_parallel_size", self.data_parallel_size, 1)
        for name in ("ulysses_parallel_size", "ring_attention_size", "tensor_parallel_size"):
            _require_at_least("parallel", name, getattr(self, name), 1)
        if self.tensor_parallel_size != 1:
            raise _field_error(
                "parallel",
                "tensor_parallel_size",
                f"only 1 is supported, got {self.tensor_parallel_size}; "
                "to split long sequences use ulysses_parallel_size or ring_attention_size",
            )
        if self.timeout_s <= 0:
            raise _field_error("parallel", "timeout_s", f"expected a number of seconds above 0, got {self.timeout_s}")
        _require_one_of("parallel", "attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
        if self.ep_plan is not None:
            raise _field_error("parallel", "ep_plan", "there are no expert-parallel layers yet; remove the key")


@dataclass(frozen=True)
class RecomputePlan:
    """Which modules recompute their activations in the backward instead of keeping them.

    Args:
        apply_modules: patterns over ``named_modules()`` names.
        policy: ``full`` recomputes every matched module, ``every_n`` the first of every ``n`` in the order of
            definition, ``ops`` every matched module but for the outputs of ``keep_ops``, which are kept.
        n: for ``every_n``.
        keep_ops: for ``ops``: operator names such as ``aten.mm``; empty means matrix products and attention.
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    apply_modules: tuple[str, ...] = ()
    policy: str = "full"
    n: int = 2
    keep_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_patterns("recompute_plan", "apply_modules", self.apply_modules)
        _require_one_of("recompute_plan", "policy", self.policy, RECOMPUTE_POLICIES)
        _require_at_least("recompute_plan", "n", self.n, 1)
        if self.keep_ops and self.policy != "ops":
            raise _field_error(
                "recompute_plan", "keep_ops", f"only read under policy: ops, but the policy is {self.policy}"
            )


@dataclass(frozen=True)
class ActivationOffloadPlan:
    """Which modules keep the tensors that their backward needs in host memory.

    Args:
        apply_modules: patterns over ``named_modules()`` names.
        window: modules whose copies may be in flight at once, in each direction (accelerators only).
        min_bytes: smaller tensors stay where they are.
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    apply_modules: tuple[str, ...] = ()
    window: int = 2
    min_bytes: int = 4096

    def __post_init__(self) -> None:
        _check_patterns("activation_offload_plan", "apply_modules", self.apply_modules)
        _require_at_least("activation_offload_plan", "window", self.window, 1)
        _require_at_least("activation_offload_plan", "min_bytes", self.min_bytes, 0)


@dataclass(frozen=True)
class CompilePlan:
    """Which modules run a compiled forward (``torch.compile``, one graph per module).

    Args:
        apply_modules: patterns over ``named_modules()`` names; empty compiles nothing.
        backend: a ``torch.compile`` backend.
        dynamic: shapes are symbolic from the start (True), never (False), or once they change (None).
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    apply_modules: tuple[str, ...] = ()
    backend: str = "inductor"
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        _check_patterns("compile_plan", "apply_modules", self.apply_modules)


@dataclass(frozen=True)
class FeaturesConfig:
    """The ``features`` section: what trades compute or bandwidth for memory.

    Args:
        recompute: switches ``recompute_plan``; None: on as soon as it names modules.
        enable_activation_offload: the same for ``activation_offload_plan``.
        compile_plan: on as soon as it names modules.
    """

    __pydantic_config__ = _FORBID_UNKNOWN_KEYS

    recompute: bool | None = None
    recompute_plan: RecomputePlan = field(default_factory=RecomputePlan)
    enable_activation_offload: bool | None = None
    activation_offload_plan: ActivationOffloadPlan = field(default_factory=ActivationOffloadPlan)
    compile_plan: CompilePlan = field(default_factory=CompilePlan)

    def __post_init__(self) -> None:
        for switch, plan in (
            ("recompute", "recompute_plan"),
            ("enable_activation_offload", "activation_offload_plan"),
        ):
            if getattr(self, switch) and not getattr(self, plan).apply_modules:
                raise _field_error(
                    "features", switch, f"true, but features.{plan}.apply_modules is empty; name the modules"
                )

    @property
    def recomputes(self) -> bool:
        """Whether ``recompute_plan`` is on."""
        return bool(self.recompute_plan.apply_modules) and self.recompute is not False

    @property
    def offloads(self) -> bool:
        """Whether ``activation_offload_plan`` is on."""
        return bool(self.activation_offload_plan.apply_modules) and self.enable_activation_offload is not False


def _field_error(owner: str, name: str, message: str, *below: int) -> FieldError:
    return FieldError(f"{owner}.{name}", message, path=(name, *below))


def _require_one_of(owner: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value in allowed:
        return
    near = nearest(str(value), [str(a) for a in allowed], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = ", ".join("null" if a is None else str(a) for a in allowed)
    raise _field_error(owner, name, f"expected one of {shown}, got {value!r}{hint}")


def _require_at_least(owner: str, name: str, value: object, least: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        suffix = f" {also}" if also else ""
        raise _field_error(owner, name, f"expected a whole number of at least {least}{suffix}, got {value!r}")


def _check_reshard(owner: str, value: bool | int | None) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 2:
        expected = "expected true, false or the number of ranks (2 or more) to reshard to"
        raise _field_error(owner, "reshard_after_forward", f"{expected}, got {value!r}")


def _check_patterns(owner: str, name: str, patterns: tuple[str, ...]) -> None:
    if isinstance(patterns, str):
        raise _field_error(owner, name, f"expected a list of patterns, got the text {patterns!r}")
    for position, pattern in enumerate(patterns):
        if not isinstance(pattern, str) or not pattern:
            raise _field_error(owner, name, f"expected module names or patterns, got {pattern!r}", position)
    twice = sorted({pattern for pattern in patterns if list(patterns).count(pattern) > 1})
    if twice:
        raise _field_error(owner, name, f"{', '.join(twice)} is listed twice", patterns.index(twice[0]))
