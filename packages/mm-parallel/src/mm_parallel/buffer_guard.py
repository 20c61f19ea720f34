"""Replicas of a trained sub-model must stay identical, and FSDP2 synchronises parameters only."""

from __future__ import annotations

from typing import Any

from torch import nn


def forbid_changing_buffers(module: nn.Module, name: str) -> None:
    """Raise from ``module``'s forward if it changes one of its buffers: the replicas would drift apart.

    Args:
        module: a sub-model whose parameters are replicated and trained.
        name: for the message.
    """
    before: dict[str, tuple[int, int]] = {}

    def remember(module: nn.Module, _args: Any) -> None:
        before.update(_versions(module))

    def compare(module: nn.Module, _args: Any, _output: Any) -> None:
        changed = [key for key, version in _versions(module).items() if before.get(key) != version]
        if changed:
            raise RuntimeError(
                f"sub-model {name!r}: its forward changed the buffers {', '.join(changed)}; under HSDP every replica "
                "would have values of its own. Freeze the layer's statistics (eval mode), or keep them elsewhere"
            )

    module.register_forward_pre_hook(remember)
    module.register_forward_hook(compare)


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
