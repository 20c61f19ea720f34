"""The tiny pipeline folder: complete, reproducible, readable by diffusers."""

from __future__ import annotations

import json
from pathlib import Path

from mm_models_wan import write_tiny_pipeline


def test_the_folder_has_the_layout_of_a_released_one(tiny_wan: Path) -> None:
    index = json.loads((tiny_wan / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["boundary_ratio"] == 0.875
    parts = {"transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler"}
    assert {path.name for path in tiny_wan.iterdir() if path.is_dir()} == parts <= index.keys()
    assert sum(file.stat().st_size for file in tiny_wan.rglob("*") if file.is_file()) < 4_000_000


def test_diffusers_loads_it_and_samples(tiny_wan: Path) -> None:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(tiny_wan)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a cat", height=32, width=32, num_frames=5, num_inference_steps=2, output_type="np").frames
    assert frames.shape == (1, 5, 32, 32, 3)


def test_equal_seeds_write_equal_files(tiny_wan: Path, tmp_path: Path) -> None:
    again = write_tiny_pipeline(tmp_path / "again")
    other = write_tiny_pipeline(tmp_path / "other", seed=1)
    for file in tiny_wan.rglob("*"):
        if file.is_file():
            assert (again / file.relative_to(tiny_wan)).read_bytes() == file.read_bytes(), file
    weights = Path("transformer") / "diffusion_pytorch_model.safetensors"
    assert (other / weights).read_bytes() != (tiny_wan / weights).read_bytes()
