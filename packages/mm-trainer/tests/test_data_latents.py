"""Latents and text embeddings made elsewhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.latents import LatentsDataset
from mm_trainer.data.loader import BatchLoader
from mm_trainer.errors import BadSample, DataError


def write_pair(
    folder: Path, stem: str, latents: tuple[int, ...] = (16, 2, 6, 8), text: tuple[int, ...] = (5, 32)
) -> None:
    for kind, shape in (("latents", latents), ("text", text)):
        path = folder / kind / f"{stem}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({kind: torch.rand(shape)}, path)


def open_set(folder: Path, **options: object) -> LatentsDataset:
    config = {"data_path": folder / "latents", "text_folder": folder / "text", **options}
    return LatentsDataset(config, DatasetContext(InputSpec(), None, 0))


def test_pairs_become_conditions(tmp_path: Path) -> None:
    for stem in ("a", "sub/b", "c.d"):
        write_pair(tmp_path, stem)
    write_pair(tmp_path, "tall", latents=(16, 2, 8, 6))
    data = open_set(tmp_path, patch=(1, 2, 2))
    assert data.tokens(0) == 24
    batches = list(islice(BatchLoader(data, micro_batch_size=3), 2))
    shapes = {tuple(batch["conditions"]["latents"].shape) for batch in batches}
    assert shapes == {(3, 16, 2, 6, 8), (3, 16, 2, 8, 6)}
    assert batches[0]["conditions"]["context"].shape == (3, 5, 32)
    assert batches[0]["sample_key"].shape == (3,)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder not found: /"):
        open_set(tmp_path)
    write_pair(tmp_path, "a")
    with pytest.raises(DataError, match="no tensor 'x'; it holds latents"):
        open_set(tmp_path, latents_key="x")
    write_pair(tmp_path, "b", latents=(16, 2, 6))
    with pytest.raises(DataError, match=r"b\.safetensors: \(16, 2, 6\) is no latents"):
        open_set(tmp_path)
    (tmp_path / "text/b.safetensors").unlink()
    with pytest.raises(DataError, match="lacks the partners of 1 files: b"):
        open_set(tmp_path)
    (tmp_path / "text/b.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"b\.safetensors: not a safetensors file"):
        open_set(tmp_path)


def test_a_file_that_broke_later_is_a_bad_sample(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    data = open_set(tmp_path)
    write_pair(tmp_path, "a", latents=(16, 2, 6, 9))
    with pytest.raises(BadSample, match="its shape changed"):
        data.load(0, 0)
