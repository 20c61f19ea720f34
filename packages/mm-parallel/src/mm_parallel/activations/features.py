"""What trades compute or bandwidth for memory or time: recompute, activation offload, compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mm_parallel.activations.activation_offload import ActivationOffload
from mm_parallel.activations.buffer_replay import Contexts, replaying_buffers
from mm_parallel.activations.forward_layers import Forward, Layer, add_layer
from mm_parallel.config import ActivationOffloadPlan, CompilePlan, FeaturesConfig, RecomputePlan
from mm_parallel.errors import FieldError, below
from mm_parallel.patterns import match_callable_modules

# Matrix products and attention: expensive to compute, and small compared with what surrounds them.
DEFAULT_KEEP_OPS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)


def apply_features(model: nn.Module, features: FeaturesConfig) -> dict[str, dict[str, list[str]]]:
    """Replace the forwards of the modules that ``features`` names; call before ``parallelize``.

    Args:
        model: patterns are matched against its ``named_modules()``; see [Note: Forward layers] for the order.
        features: what is switched off or names no modules has no effect, but its patterns are checked all the same.

    Returns:
        For each of ``compile``, ``recompute`` and ``offload`` that is on: pattern → names of the modules.

    Raises:
        PatternError: a pattern that matches nothing, or a list of modules.
        FieldError: one feature for two nested modules; an unknown operator name; features applied twice.
    """
    matches = check_features(model, features)
    modules = {feature: list(_unique_modules(model, found).values()) for feature, found in matches.items()}
    for module in modules.get("compile", ()):
        plan = features.compile_plan
        add_layer(module, Layer.COMPILE, partial(torch.compile, backend=plan.backend, dynamic=plan.dynamic))
    for module in _chosen(modules.get("recompute", []), features.recompute_plan):
        keep, buffers = _kept_ops(features.recompute_plan), replaying_buffers(module)
        add_layer(module, Layer.RECOMPUTE, partial(_recomputed, keep=keep, buffers=buffers))
    if "offload" in modules:
        offload = ActivationOffload(features.activation_offload_plan)
        for module in modules["offload"]:
            add_layer(module, Layer.OFFLOAD, offload.around)
    return matches


def check_features(model: nn.Module, features: FeaturesConfig) -> dict[str, dict[str, list[str]]]:
    """What :func:`apply_features` would do, and its errors, without doing it; works on a model built on meta."""
    plans: dict[str, tuple[bool, CompilePlan | RecomputePlan | ActivationOffloadPlan]] = {
        "compile": (bool(features.compile_plan.apply_modules), features.compile_plan),
        "recompute": (features.recomputes, features.recompute_plan),
        "offload": (features.offloads, features.activation_offload_plan),
    }
    matches = {}
    for feature, (is_on, plan) in plans.items():
        what = f"features.{_SECTIONS[feature]}.apply_modules"
        with below(_SECTIONS[feature], "apply_modules"):
            found = match_callable_modules(model, plan.apply_modules, what=what)
            _refuse_nested(list(_unique_modules(model, found)), what=what)
        if is_on:
            matches[feature] = found
    _kept_ops(features.recompute_plan)  # for its errors
    return matches


_SECTIONS = {"compile": "compile_plan", "recompute": "recompute_plan", "offload": "activation_offload_plan"}


def _unique_modules(model: nn.Module, matches: dict[str, list[str]]) -> dict[str, nn.Module]:
    """Matched modules in the order of definition, each once, under the first of its names."""
    wanted = {model.get_submodule(name) for names in matches.values() for name in names}
    return {name: module for name, module in model.named_modules() if module in wanted}


def _refuse_nested(modules: Sequence[str], *, what: str) -> None:
    for outer in modules:
        for inner in modules:
            if inner.startswith(f"{outer}."):
                raise FieldError(what, f"names both {outer!r} and {inner!r} inside it; name one of them")


def _chosen(modules: list[nn.Module], plan: RecomputePlan) -> list[nn.Module]:
    return modules[:: plan.n if plan.policy == "every_n" else 1]


def _recomputed(forward: Forward, *, keep: set[Any] | None, buffers: Callable[[], Contexts] | None) -> Forward:
    """``forward``, run again in the backward instead of keeping what it saved.

    Never the reentrant form: if no input of a module requires a gradient, it drops those of the parameters.
    """
    selective = None if keep is None else partial(create_selective_checkpoint_contexts, partial(_policy, keep))
    if buffers is None and selective is None:
        return partial(checkpoint, forward, use_reentrant=False)

    def contexts() -> Contexts:
        pairs = [make() for make in (buffers, selective) if make is not None]
        return _all_of([pair[0] for pair in pairs]), _all_of([pair[1] for pair in pairs])

    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(keep: set[Any], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _kept_ops(plan: RecomputePlan) -> set[Any] | None:
    """The operators whose outputs are kept; None if the policy keeps nothing."""
    if plan.policy != "ops":
        return None
    ops: set[Any] = set()
    for name in plan.keep_ops or DEFAULT_KEEP_OPS:
        namespace, _, op = name.removeprefix("torch.ops.").partition(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), op)
        except (AttributeError, RuntimeError) as error:
            raise FieldError(
                "features.recompute_plan.keep_ops",
                f"torch.ops has no {name!r}; write namespace.op, such as aten.mm",
                path=("recompute_plan", "keep_ops"),
            ) from error
        ops.update(getattr(packet, overload) for overload in packet.overloads())
    return ops
