"""What a conditions cache depends on, as far as it is this package's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mm_trainer.config import bind, load_config
from mm_trainer.data.cache.dataset import check_settings
from mm_trainer.data.cache.recipe import cache_settings
from mm_trainer.errors import DataError


def settings_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    monkeypatch.setenv("WAN", str(folder))
    monkeypatch.setenv("CLIPS", str(folder))
    bound = bind(load_config("recipe:wan2_2/tiny_t2v", ["data.val_dataset_param=null", *overrides]))
    settings: dict[str, Any] = json.loads(json.dumps(cache_settings(bound.datasets, bound)))
    return settings


def test_a_cache_is_for_what_its_conditions_depend_on(
    tiny_i2v: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options and the VAE's statistics change conditions; which expert is trained doesn't."""
    folder = tmp_path / "wan"
    shutil.copytree(tiny_i2v, folder)
    (folder / "metadata.csv").write_text("video,caption\na.mp4,a\n")
    i2v = "model.task=i2v"
    made = {"settings": settings_of(folder, monkeypatch, i2v)}

    def compare(*overrides: str) -> None:
        check_settings(tmp_path, made, settings_of(folder, monkeypatch, i2v, *overrides))

    compare("model.expert=high", "training.lr=1.0")
    with pytest.raises(DataError, match=r"container\.options\.last_frame: False there, True here$"):
        compare("model.last_frame=true")
    with pytest.raises(DataError, match=r"data\.0\.clean_text: None there, 'caption' here"):
        compare("data.dataset_param.clean_text=caption")
    with pytest.raises(DataError, match=r"data\.0\.buckets: \[.*\] there, None here; data\.0\.max_pixels: None there"):
        compare("data.dataset_param.buckets=null", "data.dataset_param.max_pixels=1024")
    with pytest.raises(DataError, match=r"encoders\.ae\.options\.do_sample: False there, True here"):
        compare("model.models.ae.do_sample=true")
    config = folder / "vae/config.json"
    values = json.loads(config.read_text())
    values["latents_std"] = [2 * value for value in values["latents_std"]]
    config.write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"stale.*: encoders\.ae\.weights: '\w+' there, '\w+' here$"):
        compare()


def test_encoder_weights_that_change_in_the_middle_make_a_cache_stale(
    tiny_i2v: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of the text encoder; size and modification time stay."""
    folder = tmp_path / "wan"
    shutil.copytree(tiny_i2v, folder)
    (folder / "metadata.csv").write_text("video,caption\na.mp4,a\n")
    made = {"settings": settings_of(folder, monkeypatch, "model.task=i2v")}
    file = next((folder / "text_encoder").glob("*.safetensors"))
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(stat.st_size // 2 + 1)
        byte = opened.read(1)
        opened.seek(stat.st_size // 2 + 1)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"stale.*: encoders\.text_encoder\.weights: '\w+' there, '\w+' here$"):
        check_settings(tmp_path, made, settings_of(folder, monkeypatch, "model.task=i2v"))
