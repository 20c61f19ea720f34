"""Every block of the README's page on writing a model is a program that runs."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from rank_training import read_metrics, trace, train_rank

README = Path(__file__).resolve().parents[1] / "README.md"
PAGE = README.read_text(encoding="utf-8").split("## Writing a model\n")[1].split("\n## ")[0]
UNET = "model: {model_id: my_unet, architecture: tiny}\ndata: {dataset_param: {dataset_type: my_images}}\n"
IMAGES = """

@register_dataset("my_images")
class MyImages(MyRows):
    def load(self, index, sample_key):
        return {"image": torch.randn(3, 8, 8, generator=keyed_generator(self.seed, "row", index))}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def write_plugin(folder: Path) -> list[Path]:
    """The page's modules as the one file that it tells to save, and its configurations."""
    *modules, _ = blocks("python")
    (folder / "my_models.py").write_text("\n".join([*modules, IMAGES]), encoding="utf-8")
    single, pair = map(yaml.safe_load, blocks("yaml"))
    unet = {**single, **yaml.safe_load(UNET), "parallel": {"fsdp_plan": {"param_dtype": "bf16"}}}
    unet["training"] = {key: value for key, value in single["training"].items() if key != "val_interval"}
    files = []
    for name, config in (("run", single), ("pair", pair), ("unet", unet)):
        config["training"]["save"] = str(folder / name)
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(config), encoding="utf-8")
    return files


def train_here(rank: int, world_size: int, folder: str, config: str) -> list[dict[str, Any]]:
    sys.path.insert(0, folder)
    return train_rank(rank, world_size, {}, [], config)


def run_its_test(rank: int, world_size: int, folder: str, code: str) -> None:
    sys.path.insert(0, folder)
    space: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), space)
    with contextlib.chdir(folder):
        space["test_my_model"]()


def test_its_models_train(run_ranks, tmp_path: Path) -> None:
    for file in write_plugin(tmp_path):
        losses = trace(run_ranks(train_here, 2, str(tmp_path), str(file))[0])
        assert len(losses) == 20, file
        assert sum(losses[-5:]) < sum(losses[:5]), file
    validated = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "validation"]
    assert "loss_q0.9" in validated[0]


def test_its_test_passes(run_ranks, tmp_path: Path) -> None:
    write_plugin(tmp_path)
    *_, code = blocks("python")
    run_ranks(run_its_test, 1, str(tmp_path), code, init_process_group=False)
