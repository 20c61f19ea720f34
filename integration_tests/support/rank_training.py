"""What the multi-rank tests run on every rank: a whole training through `mm_trainer.commands.train`, in-process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# At module level, so that the zygote has imported them before it forks a rank.
import torch.utils.tensorboard  # noqa: F401

from mm_parallel import ParallelMesh
from mm_trainer.commands.prepare import Prepared
from mm_trainer.commands.train import run_training
from mm_trainer.config import bind, load_config, resolve

RECIPE = "recipe:wan2_2/tiny_t2v"
# Heavy modules that the zygote imports once, for every rank forked from it.
PRELOAD = ("diffusers.models.autoencoders.autoencoder_kl_wan", "transformers.models.umt5.modeling_umt5")


def train_rank(
    rank: int, world_size: int, environ: dict[str, str], overrides: Sequence[str], recipe: str = RECIPE
) -> list[dict[str, Any]]:
    """Train and return the records of metrics.jsonl (rank 0's; other ranks return the same file's content)."""
    os.environ.update(environ)
    config = resolve(load_config(recipe, overrides), world_size)
    run_training(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    return read_metrics(Path(config.training.save))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "logs" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trace(records: list[dict[str, Any]], key: str = "loss") -> list[float]:
    return [record[key] for record in records if record["kind"] == "train"]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, with torch's own reader."""
    import warnings

    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state
