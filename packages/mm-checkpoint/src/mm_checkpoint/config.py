"""Where the weights of one model come from: plain values, torch-free, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mm_checkpoint.errors import FieldError

# What people write for the four forms elsewhere; the left-hand sides are lower-cased before the look-up.
LOAD_FORMATS: dict[str, str] = {
    "auto": "auto",
    "hf": "hf",
    "huggingface": "hf",
    "transformers": "hf",
    "safetensors": "hf",
    "native": "hf",
    "diffusers": "diffusers",
    "dcp": "dcp",
    "torch_dcp": "dcp",
    "distributed": "dcp",
}


@dataclass(frozen=True)
class WeightSourceConfig:
    """Names a weight source.

    Attributes:
        from_pretrained: folder or file with the weights to start from.
        checkpoint_path: the same, but it takes precedence. With ``load_format: dcp`` and no conversion folder named,
            it is the conversion cache and ``from_pretrained`` the source.
        load_format: ``auto`` (sniff DCP, then diffusers, then hf), ``hf``, ``diffusers`` or ``dcp``.
        checkpoint_conversion_dir, dcp_cache_dir, dcp_conversion_dir: where ``load_format: dcp`` keeps the converted
            weights of a source that is not DCP; the first one given counts.
        allow_missing: names (or ``*`` patterns) of parameters and buffers that the source need not hold.
        broadcast_from_rank0: rank 0 alone reads, and sends every piece to the others (for slow shared disks).

    Raises:
        FieldError: an unknown ``load_format``.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    from_pretrained: str | None = None
    checkpoint_path: str | None = None
    load_format: str = "auto"
    checkpoint_conversion_dir: str | None = None
    dcp_cache_dir: str | None = None
    dcp_conversion_dir: str | None = None
    allow_missing: tuple[str, ...] = ()
    broadcast_from_rank0: bool = False

    def __post_init__(self) -> None:
        normalize_format(self.load_format)

    @property
    def format(self) -> str:
        """``load_format`` without aliases."""
        return normalize_format(self.load_format)

    @property
    def conversion_dir(self) -> str | None:
        """The first conversion folder that is named."""
        return self.checkpoint_conversion_dir or self.dcp_cache_dir or self.dcp_conversion_dir


def normalize_format(name: str) -> str:
    """The canonical format name behind ``name``.

    Raises:
        FieldError: ``name`` is neither a format nor an alias of one.
    """
    try:
        return LOAD_FORMATS[name.lower()]
    except KeyError:
        allowed = "auto, hf, diffusers, dcp"
        raise FieldError(("load_format",), f"{name!r} is not one of {allowed} (or an alias of one)") from None
