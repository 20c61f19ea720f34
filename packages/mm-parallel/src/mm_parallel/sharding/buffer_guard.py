"""Replicas of a trained sub-model must stay identical, and FSDP2 synchronises parameters only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def forbid_changing_buffers(module: nn.Module, name: str) -> None:
    """Raise from ``module``'s forward if it changes one of its buffers: the replicas would drift apart.

    Versions are compared after every forward. After the first one in train mode values are compared too: some
    kernels, batch norm's among them, write to buffers without counting it as a version.

    Args:
        module: a sub-model whose parameters are replicated and trained.
        name: for the message.
    """
    guard = _Guard(name)
    module.register_forward_pre_hook(guard.remember)
    module.register_forward_hook(guard.compare)


class _Guard:
    def __init__(self, name: str) -> None:
        self._name = name
        self._versions: dict[str, tuple[int, int]] = {}
        self._values: dict[str, torch.Tensor] | None = None
        self._compared_values = False

    def remember(self, module: nn.Module, _args: Any) -> None:
        self._versions = _versions(module)
        if module.training and not self._compared_values:  # once: a copy of all buffers per step would be expensive
            self._values = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def compare(self, module: nn.Module, _args: Any, _output: Any) -> None:
        versions = _versions(module)
        changed = {name for name in versions if self._versions.get(name) != versions[name]}
        if self._values is not None:
            values, self._values, self._compared_values = self._values, None, True
            changed |= {name for name, b in module.named_buffers() if name in values and not b.equal(values[name])}
        if changed:
            raise RuntimeError(
                f"sub-model {self._name!r}: its forward changed the buffers {', '.join(sorted(changed))}; under HSDP "
                "every replica would have values of its own. Freeze the layer's statistics (eval mode), or keep them "
                "elsewhere"
            )


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    # The identity as well: a forward may put another tensor in the buffer's place, whose version starts anew.
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
