"""Models of every foreign kind (`foreign-plugin`): 1 and 2 ranks, a resume, an export that its own library reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numbers_close import FP32_TRACE
from rank_training import read_checkpoint, trace, train_rank

from mm_checkpoint import export

PRELOAD = ("mm_models_foreign.language", "mm_models_foreign.images", "mm_models_foreign.captions")
STEPS = 6
LAST = f"run/iter_{STEPS:07d}"


@dataclass(frozen=True)
class Kind:
    """How one model is trained.

    Args:
        model: section ``model``.
        units: FSDP units.
        data: data set.
        layouts: overrides for two ranks.
        validated: quantiles of its noise levels mean something.
        counts: it counts micro-batches, so a step has one on any number of ranks.
    """

    model: Mapping[str, Any]
    units: Sequence[str]
    data: str = "foreign_tokens"
    layouts: Sequence[Sequence[str]] = ((),)
    validated: bool = False
    counts: bool = False


SPLIT = ((), ("parallel.ulysses_parallel_size=2",), ("parallel.ring_attention_size=2",))
KINDS = {
    "gpt2": Kind({"model_id": "foreign_gpt2", "architecture": "gpt2-tiny"}, ["net.transformer.h.{*}"]),
    "unet": Kind(
        {"model_id": "foreign_unet", "architecture": "unet-tiny"},
        ["net.down_blocks.{*}", "net.up_blocks.{*}"],
        data="foreign_images",
        validated=True,
    ),
    "plain": Kind({"model_id": "foreign_plain"}, ["blocks.{*}"], layouts=SPLIT),
    "counting": Kind({"model_id": "foreign_counting"}, ["blocks.{*}"], layouts=SPLIT, counts=True),
    "captioned": Kind(
        {
            "model_id": "foreign_captioned",
            "models": {
                "encoder": {"model_id": "foreign_t5", "from_pretrained": "T5", "freeze": True},
                "painter": {"model_id": "foreign_painter", "architecture": "painter-tiny"},
            },
        },
        ["painter.blocks.{*}"],
        data="foreign_images",
        validated=True,
    ),
    "pair": Kind(
        {
            "model_id": "foreign_pair",
            "models": {"squeeze": {"model_id": "foreign_squeeze"}, "expand": {"model_id": "foreign_expand"}},
        },
        ["squeeze.layers.0", "expand.layers"],
        data="foreign_images",
    ),
}
RUNS = [(name, layout) for name, kind in KINDS.items() for layout in kind.layouts]


def write_t5(folder: Path) -> Path:
    """A text encoder as transformers writes it: one table, under one of its two names."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(5)
    config = T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    return folder


def write_config(folder: Path, name: str, data_ranks: int) -> str:
    kind = KINDS[name]
    model = json.loads(json.dumps(kind.model).replace('"T5"', json.dumps(str(folder / "t5"))))
    if "t5" in json.dumps(model):
        write_t5(folder / "t5")
    data = {"dataset_type": kind.data}
    config = {
        "parallel": {"fsdp_plan": {"apply_modules": list(kind.units), "param_dtype": "fp32"}},
        "model": model,
        "data": {"dataset_param": data, "dataloader_param": {"num_workers": 0}},
        "training": {
            "micro_batch_size": 4 // data_ranks if kind.counts else 2,
            "global_batch_size": 4,
            "gradient_accumulation_steps": "auto",
            "train_iters": STEPS,
            "lr": 0.003,
            "save": str(folder / "run"),
            "save_async": False,
        },
    }
    if kind.validated:
        config["data"]["val_dataset_param"] = {**data, "samples": 4}
        config["training"] |= {"val_interval": 3, "val_quantiles": [0.1, 0.9]}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def run(
    run_ranks: Any, folder: Path, name: str, ranks: int, layout: Sequence[str] = (), *overrides: str
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    config = write_config(folder, name, data_ranks=1 if layout else ranks)
    return run_ranks(train_rank, ranks, {}, [*layout, *overrides], config, preload=PRELOAD)[0]


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_two_ranks_train_as_one_does_and_a_resume_as_the_unbroken_run(
    run_ranks, tmp_path: Path, name: str, layout: Sequence[str]
) -> None:
    one = run(run_ranks, tmp_path / "one", name, 1)
    two = run(run_ranks, tmp_path / "two", name, 2, layout)
    assert len(trace(one)) == STEPS
    assert trace(one)[-1] != trace(one)[0]
    np.testing.assert_allclose(trace(two), trace(one), rtol=FP32_TRACE)
    assert validations(two).keys() == validations(one).keys()
    for figure, values in validations(one).items():
        np.testing.assert_allclose(validations(two)[figure], values, rtol=FP32_TRACE)

    run(run_ranks, tmp_path / "again", name, 2, layout, "training.train_iters=3")
    resumed = run(run_ranks, tmp_path / "again", name, 2, layout, "training.load=auto")
    assert trace(resumed)[-3:] == trace(two)[-3:]
    expected, found = (read_checkpoint(tmp_path / which / LAST) for which in ("two", "again"))
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def validations(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Figure → its values in order."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["kind"] == "validation":
            for figure in record.keys() & {"loss", "loss_q0.1", "loss_q0.9"}:
                found.setdefault(figure, []).append(record[figure])
    return found


def exported(run_ranks: Any, folder: Path, name: str) -> tuple[dict[str, Path], dict[str, torch.Tensor]]:
    """Folder name → exported folder, and the checkpoint's tensors as torch reads them."""
    run(run_ranks, folder, name, 2, (), "training.train_iters=1")
    paths = export(folder / "run", folder / "exported")
    return {path.name: path for path in paths}, read_checkpoint(folder / "run" / "iter_0000001")


def test_wrapped_gpt2_is_read_by_transformers(run_ranks, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folders, state = exported(run_ranks, tmp_path, "gpt2")
    (folder,) = folders.values()
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.transformer.wte.weight
    for key, value in model.named_parameters():
        assert torch.equal(value, state[f"model.net.{key}"]), key


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_of_a_tied_table_is_exported_once_for_both_its_names(run_ranks, tmp_path: Path, ranks: int) -> None:
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    run(run_ranks, tmp_path, "gpt2", ranks, (), "training.train_iters=3", "training.ema.decay=0.5")
    state = read_checkpoint(tmp_path / "run" / "iter_0000003")
    (folder,) = export(tmp_path / "run", tmp_path / "exported", ema=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert model.lm_head.weight is model.transformer.wte.weight
    for key, value in model.named_parameters():
        assert torch.equal(value, state[f"ema.net.{key}"]), key
        assert not torch.equal(value, state[f"model.net.{key}"]), key


def test_wrapped_unet_is_read_by_diffusers(run_ranks, tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    folders, state = exported(run_ranks, tmp_path, "unet")
    (folder,) = folders.values()
    model, info = UNet2DModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[f"model.net.{key}"]), key


def test_a_trained_unet_takes_its_place_in_a_pipeline_of_diffusers(run_ranks, tmp_path: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from mm_models_foreign.images import WrappedUNet

    before = UNet2DModel.from_config(WrappedUNet.architectures["unet-tiny"])
    DDPMPipeline(before, DDPMScheduler()).save_pretrained(tmp_path / "base")
    _, state = exported(run_ranks, tmp_path / "work", "unet")
    export(tmp_path / "work" / "run", tmp_path / "whole", base=tmp_path / "base")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "whole")
    for key, value in pipeline.unet.state_dict().items():
        assert torch.equal(value, state[f"model.net.{key}"]), key


def test_a_run_begins_with_the_weights_of_another_run_whatever_wraps_them(run_ranks, tmp_path: Path) -> None:
    """A checkpoint as a weight source, read under the names of the wrapped model."""
    for name in ("gpt2", "unet"):
        _, state = exported(run_ranks, tmp_path / name, name)
        source = f"model.from_pretrained={tmp_path / name / 'run'}"
        still = ["training.train_iters=1", "training.lr=0", f"training.save={tmp_path / name / 'next'}"]
        run(run_ranks, tmp_path / name, name, 2, (), source, *still)
        after = read_checkpoint(tmp_path / name / "next" / "iter_0000001")
        assert [key for key in state if key.startswith("model.") and not torch.equal(state[key], after[key])] == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("plain", {"": None}),
        ("counting", {"": None}),
        ("captioned", {"painter": "painter"}),
        ("pair", {"squeeze": "squeeze", "expand": "expand"}),
    ],
)
def test_every_trained_part_is_exported_under_its_own_names(
    run_ranks, tmp_path: Path, name: str, parts: Mapping[str, str | None]
) -> None:
    from safetensors.torch import load_file

    folders, state = exported(run_ranks, tmp_path, name)
    assert len(folders) == len(parts)
    for part, folder_name in parts.items():
        folder = folders[folder_name] if folder_name else next(iter(folders.values()))
        (file,) = folder.glob("*.safetensors")
        prefix = f"model.{part}." if part else "model."
        expected = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        found = load_file(file)
        assert found.keys() == expected.keys()
        assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def check_rank(rank: int, world_size: int, config: str) -> list[str]:
    from mm_trainer.testing import check_plugin

    return check_plugin(config)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_passes_its_check(run_ranks, tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path, name, data_ranks=1)
    findings = run_ranks(check_rank, 1, config, preload=PRELOAD, init_process_group=False)[0]
    assert [line.split(":")[0] for line in findings] == [
        "forward and backward",
        "export",
        "param_dtype",
        "recompute on",
    ]
    assert ("bf16 would fail" in findings[2]) == (name in ("captioned", "pair")), "whose convolutions don't cast"
    assert not (tmp_path / "run").exists()
