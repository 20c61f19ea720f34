"""What this package reads of FSDP2's internal state: the only place that touches FSDP2's private names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Every FSDP2 unit inside ``module``, outer before inner, in the order of definition."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost FSDP2 units inside ``module`` (itself, if it is one)."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in fsdp_roots(child)]


def has_run(root: FSDPModule) -> bool:
    """Whether a forward has happened, which is when FSDP2 learns which unit is the root."""
    return root._get_fsdp_state()._is_root is not None


def offloaded_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Sharded parameters whose unit keeps them in host memory."""
    for unit in fsdp_modules(module):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            if isinstance(group.offload_policy, CPUOffloadPolicy):
                yield from (parameter.sharded_param for parameter in group.fsdp_params)
