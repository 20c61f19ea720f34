"""``.pth`` / ``.pt`` / ``.bin`` files, always through ``torch.load(weights_only=True)``."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import from_torch
from mm_checkpoint._tensors.source import TensorInfo
from mm_checkpoint.errors import CorruptFileError, SourceError, sample

if TYPE_CHECKING:
    import torch

# The keys under which releases put the weights when the file isn't simply a flat table of tensors.
_WRAPPERS = ("state_dict", "model", "module", "model_state_dict")


class TorchFileSource:
    """One or more pickled state dicts as one set of tensors; zip-format files are mapped, not read.

    Raises:
        CorruptFileError: it is unreadable, or holds more than ``weights_only`` admits.
        SourceError: there is no flat table of tensors in it, a name is in two files, or the index disagrees.
    """

    def __init__(self, path: Path, files: Sequence[Path], weight_map: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.bytes_read = 0
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, torch.Tensor] = {}
        for file in files:
            for name, value in _load(file).items():
                if name in self._values:
                    raise SourceError(f"{path}: {name} is in both {self.tensors[name].file} and {file.name}")
                storage = (f"{file.name}@{value.untyped_storage().data_ptr()}", value.storage_offset())
                info = TensorInfo(tuple(value.shape), from_torch(value.dtype), file.name, storage)
                self.tensors[name], self._values[name] = info, value
        if weight_map is not None and weight_map.keys() != self.tensors.keys():
            wrong = weight_map.keys() ^ self.tensors.keys()
            raise SourceError(f"{path}: index and files differ in {len(wrong)} name(s): {sample(wrong)}")

    def read_into(self, key: str, box: Box, out: torch.Tensor) -> None:
        out.copy_(self._values[key][box.slices])
        self.bytes_read += out.nbytes

    def close(self) -> None:
        self._values.clear()


def _load(file: Path) -> dict[str, Any]:
    import torch

    try:
        content = torch.load(file, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises half a dozen types here
        raise CorruptFileError(f"{file}: not readable with weights_only=True: {error}") from error
    while isinstance(content, Mapping) and not _is_table(content):
        inner = [key for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(inner) != 1:
            break
        content = content[inner[0]]
    if not isinstance(content, Mapping) or not _is_table(content):
        raise SourceError(f"{file}: holds no flat table of tensors")
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def _is_table(content: Mapping[Any, Any]) -> bool:
    import torch

    return bool(content) and any(isinstance(v, torch.Tensor) for v in content.values())
