"""`LatentsDataset`: pairs of precomputed latents and text embeddings made elsewhere.

Two folders of safetensors files; ``a/b.safetensors`` of one belongs to ``a/b.safetensors`` of the other. Only shapes
are checked: what made the files is not known. (The cache that `mm-trainer cache` makes is another thing: it knows.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from mm_checkpoint import BadInputError, find_source
from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import Options as BaseOptions
from mm_trainer.errors import BadSample, DataError

Shape = tuple[int, ...]


class LatentsOptions(BaseOptions):
    """``data.dataset_param`` with ``dataset_type: latents``."""

    data_path: Path
    """Folder of the latents, (C, F, H, W) each."""
    text_folder: Path
    """Folder of the text embeddings, (L, D) each."""
    latents_key: str | None = None
    """Name of the tensor in a latents file; null: its only one."""
    text_key: str | None = None
    """Name of the tensor in a text file; null: its only one."""
    patch: tuple[int, int, int] = Field(default=(1, 1, 1))
    """Latent (frames, rows, columns) per token of the model; only balances the load."""


class LatentsDataset:
    """Samples ``{"conditions": {"latents": (C, F, H, W), "context": (L, D)}}``, as the files hold them.

    Args:
        config: the ``dataset_param`` section, without ``dataset_type``.
        context: what the run asks for; ``channels`` of its input spec, if stated, must be the latents'.

    Raises:
        DataError: a folder is missing or empty, a partner is missing, or a shape doesn't fit.
    """

    Options = LatentsOptions

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        try:
            self.options = LatentsOptions.model_validate(dict(config))
        except ValidationError as error:
            raise DataError(f"dataset_param: {error}") from error
        self.stems = _pair_stems(self.options.data_path, self.options.text_folder)
        latents = [self._shape(self.options.data_path, stem, self.options.latents_key) for stem in self.stems]
        texts = [self._shape(self.options.text_folder, stem, self.options.text_key) for stem in self.stems]
        self._check(latents, dims=4, what="latents (C, F, H, W)", folder=self.options.data_path)
        self._check(texts, dims=2, what="text embedding (L, D)", folder=self.options.text_folder)
        self._buckets = [(latent, text) for latent, text in zip(latents, texts, strict=True)]

    def __len__(self) -> int:
        return len(self.stems)

    def bucket(self, index: int) -> tuple[Shape, Shape]:
        return self._buckets[index]

    def tokens(self, index: int) -> int:
        sides = zip(self._buckets[index][0][1:], self.options.patch, strict=True)
        frames, rows, columns = (max(1, side // patch) for side, patch in sides)
        return frames * rows * columns

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        """Read one pair.

        Raises:
            BadSample: a file changed or broke since the set was opened.
        """
        stem, (latents_shape, text_shape) = self.stems[index], self._buckets[index]
        latents = self._read(self.options.data_path, stem, self.options.latents_key, latents_shape)
        context = self._read(self.options.text_folder, stem, self.options.text_key, text_shape)
        return {"conditions": {"latents": latents, "context": context}}

    def _read(self, folder: Path, stem: str, key: str | None, shape: Shape) -> Any:
        from safetensors import SafetensorError, safe_open

        path = folder / f"{stem}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(key or next(iter(file.keys())))
        except (OSError, SafetensorError) as error:
            raise BadSample(str(path), str(error)) from error
        if tuple(tensor.shape) != shape:
            raise BadSample(str(path), f"its shape changed from {shape} to {tuple(tensor.shape)}")
        return tensor

    def _shape(self, folder: Path, stem: str, key: str | None) -> Shape:
        path = folder / f"{stem}.safetensors"
        shapes = _read_shapes(path)
        if key is None and len(shapes) != 1:
            raise DataError(f"{path}: holds {', '.join(sorted(shapes)) or 'nothing'}; name the tensor to use")
        if key is not None and key not in shapes:
            raise DataError(f"{path}: no tensor {key!r}; it holds {', '.join(sorted(shapes)) or 'nothing'}")
        return shapes[key if key is not None else next(iter(shapes))]

    def _check(self, shapes: list[Shape], *, dims: int, what: str, folder: Path) -> None:
        """All of the right rank, and equal in the leading (latents) or trailing (text) dim that the model fixes."""
        usual = Counter(shape[0 if dims == 4 else -1] if shape else 0 for shape in shapes).most_common(1)[0][0]
        for stem, shape in zip(self.stems, shapes, strict=True):
            if len(shape) != dims or shape[0 if dims == 4 else -1] != usual:
                raise DataError(f"{folder / stem}.safetensors: {shape} is no {what} like the others ({usual})")


def _pair_stems(latents: Path, texts: Path) -> list[str]:
    for folder in (latents, texts):
        if not folder.is_dir():
            raise DataError(f"folder not found: {folder.absolute()}")
    left, right = ({str(p.relative_to(f).with_suffix("")) for p in f.rglob("*.safetensors")} for f in (latents, texts))
    if not left:
        raise DataError(f"{latents.absolute()}: no safetensors file")
    for lonely, folder in ((left - right, texts), (right - left, latents)):
        if lonely:
            shown = ", ".join(sorted(lonely)[:3])
            raise DataError(f"{folder.absolute()}: lacks the partners of {len(lonely)} files: {shown}")
    return sorted(left)


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Shapes of the tensors in a safetensors file, from its header alone.

    Raises:
        DataError: it is none.
    """
    try:
        tensors = find_source(path).open()
    except BadInputError as error:
        raise DataError(str(error)) from error
    try:
        return {name: info.shape for name, info in tensors.tensors.items()}
    finally:
        tensors.close()
