"""Element types by torch's own names, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_checkpoint.errors import BadInputError, nearest

if TYPE_CHECKING:
    import torch

# torch name -> (code in a safetensors header or None, bytes per element)
_TABLE: dict[str, tuple[str | None, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex128": (None, 16),
}
_BY_CODE = {code: name for name, (code, _) in _TABLE.items() if code}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_ALIASES |= {"fp64": "float64", "double": "float64"}


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return _TABLE[dtype][1]


def safetensors_code(dtype: str) -> str:
    """The code for a safetensors header.

    Raises:
        BadInputError: the format has no code for this type.
    """
    code = _TABLE[dtype][0]
    if code is None:
        raise BadInputError(f"safetensors has no element type for {dtype}")
    return code


def from_safetensors_code(code: str) -> str | None:
    """The torch name for a code in a safetensors header; None for an unknown code."""
    return _BY_CODE.get(code)


def is_known(dtype: str) -> bool:
    """Whether ``dtype`` is a torch name of this table."""
    return dtype in _TABLE


def parse_dtype(name: str) -> str:
    """A torch name from what people type (``bf16``, ``torch.float32``).

    Raises:
        BadInputError: no such floating type.
    """
    plain = name.lower().removeprefix("torch.")
    dtype = _ALIASES.get(plain, plain)
    if dtype not in _TABLE or not is_floating(dtype):
        floating = [known for known in (*_TABLE, *_ALIASES) if is_floating(_ALIASES.get(known, known))]
        hint = nearest(plain, floating) or ["float32", "bfloat16", "float16"]
        raise BadInputError(f"dtype: {name!r} is no floating type; did you mean {', '.join(hint)}?")
    return dtype


def is_floating(dtype: str) -> bool:
    """Real floating types: the ones a cast on request applies to."""
    return dtype.startswith(("float", "bfloat"))


def kind(dtype: str) -> str:
    """``floating``, ``complex``, ``bool`` or ``integer``: a cast never crosses kinds."""
    if is_floating(dtype):
        return "floating"
    if dtype.startswith("complex"):
        return "complex"
    return "bool" if dtype == "bool" else "integer"


def to_torch(dtype: str) -> torch.dtype:
    """The torch object of that name."""
    import torch

    return getattr(torch, dtype)


def from_torch(dtype: torch.dtype) -> str:
    """The name of a torch dtype.

    Raises:
        BadInputError: a type that neither safetensors nor this package stores (quantised, sub-byte).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _TABLE:
        raise BadInputError(f"tensors of type {dtype} can't be stored")
    return name
