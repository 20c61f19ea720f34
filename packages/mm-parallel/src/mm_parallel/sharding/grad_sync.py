"""When gradients are reduced, and what a sub-model without gradients forgets; no-ops on unsharded modules."""

from __future__ import annotations

from typing import cast

from torch import nn

from mm_parallel.sharding.fsdp_state import fsdp_modules, fsdp_roots, has_run


def set_gradient_sync(module: nn.Module, *, is_last: bool, reduce_every_micro_step: bool = False) -> None:
    """Say, before a micro-batch's forward, whether its backward is the last of the optimizer step.

    By default gradients are reduced once per step, in the last backward, and kept unsharded until then. With
    ``reduce_every_micro_step`` every backward reduce-scatters (less memory, more communication), and only the
    all-reduce across HSDP's replicas waits for the last.

    [Note: Accumulation] A started accumulation must run to its last backward: gradients that were never reduced are
    seen by neither ``zero_grad`` nor :func:`reset_frozen`, and would be added to the next step's.

    Args:
        module: a sub-model, or what holds several of them.
        is_last: whether it is the last micro-batch to use this module before ``optimizer.step``.
        reduce_every_micro_step: see above.
    """
    set_is_last_backward(module, is_last)
    set_requires_gradient_sync(module, is_last or reduce_every_micro_step)
    if reduce_every_micro_step:
        set_requires_all_reduce(module, is_last)


def set_is_last_backward(module: nn.Module, is_last: bool) -> None:
    """Whether the next backward ends the step: FSDP2 then waits for its reductions and clears its prefetch order."""
    for unit in fsdp_modules(module):  # before the first forward, each unit still has a state of its own
        unit.set_is_last_backward(is_last)


def set_requires_gradient_sync(module: nn.Module, required: bool) -> None:
    """Whether the next backward reduces gradients, within shards and across replicas."""
    for root in fsdp_roots(module):  # a root passes it on to the units inside it
        root.set_requires_gradient_sync(required)


def set_requires_all_reduce(module: nn.Module, required: bool) -> None:
    """Whether the next backward all-reduces across replicas, where it reduce-scatters at all."""
    for root in fsdp_roots(module):
        root.set_requires_all_reduce(required)


def reset_frozen(module: nn.Module) -> None:
    """Let a sub-model without gradients forget its iteration, after its forward; a no-op before the first one.

    No backward ever does that for it: FSDP2's record of its forwards would grow with every step, and what is still
    gathered would stay.

    Raises:
        ValueError: it has trainable parameters; accumulated gradients would be lost.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if trainable:
        raise ValueError(f"reset_frozen: expected a frozen module, but {trainable[0]} is trainable")
    for root in fsdp_roots(module):
        if has_run(root):  # until its first forward, a root has no iteration to forget
            root.reset_iter_state()


def prefetch(module: nn.Module) -> None:
    """Start gathering what ``module``'s forward needs first: its root and its first inner unit.

    For a pipeline that calls one sub-model after another: the next one's gather overlaps the current one's compute.
    Idempotent; works before the first forward, and the forward that follows doesn't gather these units again. Issue it
    only if that forward comes before the next ``optimizer.step``: what is gathered before a step is silently stale
    after it.
    """
    for root in fsdp_roots(module):
        for unit in fsdp_modules(cast(nn.Module, root))[:2]:
            unit.unshard(async_op=True)  # unlike FSDP2's own prefetch, this works on a root that hasn't run yet
