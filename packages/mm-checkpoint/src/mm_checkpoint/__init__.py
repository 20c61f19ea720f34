"""Read, convert, shard, save and resume model weights in Hugging Face, diffusers and DCP form.

Importing this package imports no torch; each name below is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_checkpoint.__about__ import __version__
    from mm_checkpoint._disk.manifest import read_manifest
    from mm_checkpoint._run.manager import CheckpointManager
    from mm_checkpoint._tools.inspect import inspect
    from mm_checkpoint._tools.verify import Verification, verify
    from mm_checkpoint._weights.convert import Conversion, convert
    from mm_checkpoint._weights.export import export
    from mm_checkpoint._weights.identity import source_digest
    from mm_checkpoint._weights.load import LoadReport, load_weights
    from mm_checkpoint._weights.sources import WeightSource, find_source, resolve_source, sniff_format
    from mm_checkpoint.config import WeightSourceConfig
    from mm_checkpoint.errors import BadInputError, CheckpointError
    from mm_checkpoint.key_map import Concat, KeyMap, Split, Transpose, get_key_map, list_key_maps, register_key_map

_HOME = {
    "BadInputError": "errors",
    "CheckpointError": "errors",
    "CheckpointManager": "_run.manager",
    "Concat": "key_map",
    "Conversion": "_weights.convert",
    "KeyMap": "key_map",
    "LoadReport": "_weights.load",
    "Split": "key_map",
    "Transpose": "key_map",
    "Verification": "_tools.verify",
    "WeightSource": "_weights.sources",
    "WeightSourceConfig": "config",
    "__version__": "__about__",
    "convert": "_weights.convert",
    "export": "_weights.export",
    "find_source": "_weights.sources",
    "get_key_map": "key_map",
    "inspect": "_tools.inspect",
    "list_key_maps": "key_map",
    "load_weights": "_weights.load",
    "read_manifest": "_disk.manifest",
    "register_key_map": "key_map",
    "resolve_source": "_weights.sources",
    "sniff_format": "_weights.sources",
    "source_digest": "_weights.identity",
    "verify": "_tools.verify",
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
    "register_key_map",
    "resolve_source",
    "sniff_format",
    "source_digest",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
