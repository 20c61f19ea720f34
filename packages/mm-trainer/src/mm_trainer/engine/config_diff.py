"""What differs between the configuration of a checkpoint and the one that resumes it, and what that means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

# First match counts. Whatever isn't listed changes what is computed.
_EFFECTS = (
    ("tools.", "none"),
    ("data.dataloader_param.shuffle", "changes the run"),
    ("data.dataloader_param.", "none"),
    ("training.save", "none"),
    ("training.load", "none"),
    ("training.keep_", "none"),
    ("training.log_interval", "none"),
    ("training.val_", "none"),
    ("data.val_dataset_param", "none"),
    ("training.grace_time_s", "none"),
    ("training.step_timeout_s", "none"),
    ("training.gc_interval", "none"),
    ("training.micro_batch_size", "rounding"),
    ("training.gradient_accumulation_steps", "rounding"),
    ("training.condition_mbs", "rounding"),
    ("parallel.fsdp_plan.param_dtype", "changes the run"),
    ("parallel.fsdp_plan.reduce_dtype", "changes the run"),
    ("parallel.", "rounding"),
    ("features.", "rounding"),
)


@dataclass(frozen=True)
class Difference:
    """One field that differs.

    Args:
        key: dotted.
        before, now: the values; None where there is none.
        effect: ``none`` on what is computed, ``rounding`` (equal up to floating-point rounding), ``changes the run``.
    """

    key: str
    before: Any
    now: Any
    effect: str


def compare_configs(before: str, now: str) -> list[Difference]:
    """Differences between two resolved configurations, as YAML text."""
    old, new = (dict(_flatten(yaml.safe_load(text))) for text in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [Difference(key, old.get(key), new.get(key), _effect(key)) for key in keys]


def _effect(key: str) -> str:
    return next((effect for prefix, effect in _EFFECTS if key.startswith(prefix)), "changes the run")


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
