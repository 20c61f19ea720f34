"""Read, convert, shard, save and resume model weights in Hugging Face, diffusers and DCP form.

Importing this package imports no torch; each name below is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_checkpoint.__about__ import __version__
    from mm_checkpoint._convert import Conversion, convert
    from mm_checkpoint._export import export
    from mm_checkpoint._inspect import inspect
    from mm_checkpoint._load import LoadReport, load_weights
    from mm_checkpoint._manager import CheckpointManager
    from mm_checkpoint._manifest import read_manifest
    from mm_checkpoint._verify import Verification, verify
    from mm_checkpoint.config import WeightSourceConfig
    from mm_checkpoint.errors import BadInputError, CheckpointError
    from mm_checkpoint.key_map import Concat, KeyMap, Split, Transpose, get_key_map, list_key_maps
    from mm_checkpoint.sources import WeightSource, find_source, resolve_source, sniff_format

_HOME = {
    "BadInputError": "errors",
    "CheckpointError": "errors",
    "CheckpointManager": "_manager",
    "Concat": "key_map",
    "Conversion": "_convert",
    "KeyMap": "key_map",
    "LoadReport": "_load",
    "Split": "key_map",
    "Transpose": "key_map",
    "Verification": "_verify",
    "WeightSource": "sources",
    "WeightSourceConfig": "config",
    "__version__": "__about__",
    "convert": "_convert",
    "export": "_export",
    "find_source": "sources",
    "get_key_map": "key_map",
    "inspect": "_inspect",
    "list_key_maps": "key_map",
    "load_weights": "_load",
    "read_manifest": "_manifest",
    "resolve_source": "sources",
    "sniff_format": "sources",
    "verify": "_verify",
}

__all__ = [
    "BadInputError",
    "CheckpointError",
    "CheckpointManager",
    "Concat",
    "Conversion",
    "KeyMap",
    "LoadReport",
    "Split",
    "Transpose",
    "Verification",
    "WeightSource",
    "WeightSourceConfig",
    "__version__",
    "convert",
    "export",
    "find_source",
    "get_key_map",
    "inspect",
    "list_key_maps",
    "load_weights",
    "read_manifest",
    "resolve_source",
    "sniff_format",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
