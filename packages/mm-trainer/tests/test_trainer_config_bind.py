"""Binding to plugins: their own keys, files and variables, and the meta build that `check` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cfg_helpers import CONTAINER, SINGLE, environment, line_of, write

from mm_trainer.commands.prepare import Prepared, prepare
from mm_trainer.config import bind, dump_resolved, load_config
from mm_trainer.errors import ConfigError


def run_check(folder: Path, text: str, *overrides: str, ranks: int = 2, files: bool = True, **env: str) -> Prepared:
    config = load_config(write(folder, text), overrides, environment=environment(folder, **env))
    return prepare(config, ranks, require_files=files)


def fails(folder: Path, text: str, *overrides: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=".") as caught:
        run_check(folder, text, *overrides, **options)
    return caught.value


def test_a_container_is_bound(tmp_path: Path) -> None:
    checked = run_check(tmp_path, CONTAINER, "model.task=t2v", "training.init_model_with_meta_device=false")
    bound = checked.bound
    assert bound.container_class.__name__ == "CfgContainer"
    assert bound.container_options.mode == "plain"
    assert {name: cls.__name__ for name, cls in bound.model_classes.items()} == {
        "encoder": "CfgModel",
        "predictor": "CfgModel",
    }
    predictor = bound.specs["predictor"]
    assert (predictor.options.width, predictor.task, predictor.meta_init) == (8, "t2v", False)
    assert predictor.dtype == "fp32"
    assert bound.specs["encoder"].freeze is True
    (data,) = bound.datasets
    assert data.params == {"dataset_type": "cfg_numbers", "tokenizer": None, "samples": 8, "width": 8}
    assert checked.structure is not None
    assert next(checked.structure.model.parameters()).is_meta


def test_a_single_model_is_bound(tmp_path: Path) -> None:
    bound = run_check(tmp_path, SINGLE, "model.width=6").bound
    assert bound.container_class is None
    assert bound.pipeline_class is None
    assert bound.specs["model"].options.width == 6


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("model.models.predictor.frezze=true", "model.models.predictor.frezze", "did you mean freeze?"),
        ("model.models.predictor.widht=3", "model.models.predictor.widht", "did you mean width?"),
        ("model.models.predictor.width=wide", "model.models.predictor.width", "expected a whole number, got 'wide'"),
        ("model.models.predictor.width=0", "model.models.predictor.width", "expected at least 1"),
        ("model.moed=x", "model.moed", "did you mean mode?"),
        ("model.modle=x", "model.modle", "did you mean mode? (allowed here: model_id, task, pipeline, models, mode)"),
        ("model.mode=3", "model.mode", "expected text, got '3' (a whole number)"),
        ("model.models.predictor.model_id=cfg_modle", "model.models.predictor.model_id", "did you mean 'cfg_model'?"),
        ("model.model_id=cfg_contaner", "model.model_id", "did you mean 'cfg_container'?"),
        ("model.model_id=cfg_model", "model.model_id", "cfg_model is a single model: it has no model.models"),
        ("model.pipeline=flow_mtach", "model.pipeline", "did you mean 'flow_match'?"),
        ("data.dataset_param.dataset_type=vidoe", "data.dataset_param.dataset_type", "did you mean 'video'?"),
        ("data.dataset_param.sampels=3", "data.dataset_param.sampels", "did you mean samples?"),
        ("data.dataset_param.samples=many", "data.dataset_param.samples", "expected a whole number, got 'many'"),
        ("data.dataset_param.tokeniser=x", "data.dataset_param.tokeniser", "did you mean tokenizer?"),
        ("training.plugin=[cfg_plugin, no_such_module]", "training.plugin.1", "ModuleNotFoundError"),
        ("parallel.fsdp_plan.apply_modules.1=predictor.blokcs.{*}", "parallel.fsdp_plan.apply_modules.1", "no module"),
        ("parallel.fsdp_plan.ignored_modules=[decoder]", "parallel.fsdp_plan.ignored_modules.0", "matches no module"),
        ("features.recompute_plan.apply_modules=[predictor.x]", "features.recompute_plan.apply_modules.0", "no module"),
        ("model.models.predictor.freeze=[block]", "model.models.predictor.freeze.0", "matches no parameter"),
        ("training.no_decay_params=[nrom]", "training.no_decay_params.0", "matches no parameter"),
        (
            "training.lr_scaling_plan=[{apply_modules: [haed], scale: 2}]",
            "training.lr_scaling_plan.0.apply_modules.0",
            "matches no parameter",
        ),
        ("parallel.ulysses_parallel_size=4", "parallel.ulysses_parallel_size", "doesn't divide the 6 attention heads"),
        (
            "parallel.fsdp_plan.cross_submodel_prefetch=true",
            "parallel.fsdp_plan.cross_submodel_prefetch",
            "this model has none",
        ),
        ("data.dataset_param.width=7", "data.dataset_param", "width 7 is no multiple of 4"),
        ("model.models.encoder.freeze=false", "model.models.encoder.freeze", "neither frozen nor part of a checkpoint"),
    ],
)
def test_what_only_plugins_know_is_refused_with_its_place(tmp_path: Path, override: str, key: str, said: str) -> None:
    """B093, in the keys of plugins; patterns that match nothing."""
    error = fails(tmp_path, CONTAINER, override, ranks=4)
    assert error.key == key
    assert error.file in ("command line", f"{tmp_path}/config.yaml")
    assert said in error.message


@pytest.mark.parametrize("size", ["ulysses_parallel_size", "ring_attention_size"])
def test_a_trained_model_that_does_not_split_its_sequence_is_refused(tmp_path: Path, size: str) -> None:
    """The ranks of a group would all compute the same. Frozen encoders may: what they make is small."""
    whole = CONTAINER.replace("cfg_model\n      width", "cfg_whole\n      width")
    error = fails(tmp_path, whole, f"parallel.{size}=2", ranks=2)
    assert error.key == f"parallel.{size}"
    assert "(cfg_plugin:WholeModel) doesn't split its sequence" in error.message
    frozen = CONTAINER.replace("cfg_model\n      freeze", "cfg_whole\n      freeze")
    assert run_check(tmp_path, frozen, f"parallel.{size}=2", ranks=2).structure is not None


def test_a_dead_pattern_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    text = CONTAINER.replace('["encoder", "predictor.blocks.{*}"]', '\n      - encoder\n      - "predictor.blok.{*}"')
    error = fails(tmp_path, text)
    assert error.line == line_of(text, "blok")
    assert "did you mean predictor.blocks.{*}" in error.message


def test_a_container_without_sub_models_is_explained(tmp_path: Path) -> None:
    error = fails(tmp_path, SINGLE, "model.model_id=cfg_container")
    assert "its sub-models go under model.models" in error.message


def test_a_sub_model_that_the_container_needs(tmp_path: Path) -> None:
    text = CONTAINER.replace("predictor:", "predicter:").replace("predictor.blocks", "predicter.blocks")
    error = fails(tmp_path, text)
    assert (error.key, error.line) == ("model.models", line_of(text, "  models:"))
    assert "needs a sub-model predictor; did you mean that by predicter? (given: encoder, predicter)" in error.message


def test_a_mix_takes_what_stands_beside_its_list(tmp_path: Path) -> None:
    mix = (
        "{dataset_type: cfg_numbers, width: 8, datasets: [{samples: 2, weight: 1}, {width: 4, weight: 3, repeats: 2}]}"
    )
    checked = run_check(tmp_path, CONTAINER, f"data.dataset_param={mix}")
    first, second = checked.bound.datasets
    assert (first.params["samples"], first.params["width"], first.weight, first.repeats) == (2, 8, 1.0, 1)
    assert (second.params["samples"], second.params["width"], second.weight, second.repeats) == (8, 4, 3.0, 2)
    again = load_config(write(tmp_path, dump_resolved(checked.config)), environment=environment(tmp_path))
    assert [binding.params for binding in bind(again).datasets] == [first.params, second.params]
    assert bind(bind(again).config).config == bind(again).config
    error = fails(tmp_path, CONTAINER, f"data.dataset_param={mix}", "data.dataset_param.datasets.1.widht=3")
    assert error.key == "data.dataset_param.datasets.1.widht"
    error = fails(tmp_path, CONTAINER, f"data.dataset_param={mix}", "data.dataset_param.widht=3")
    assert error.key == "data.dataset_param.datasets.0.widht"


# --- files and variables ------------------------------------------------------------------------------------------


def test_missing_weights_are_a_note_or_an_error(tmp_path: Path) -> None:
    """`check` on a laptop notes what `train` refuses."""
    text = CONTAINER.replace("width: 8\ndata", "from_pretrained: weights/here\ndata")
    error = fails(tmp_path, text)
    assert (error.key, error.line) == ("model.models.predictor.from_pretrained", line_of(text, "weights/here"))
    assert f"{tmp_path}/weights/here" in error.message or "weights/here" in error.message
    checked = run_check(tmp_path, text, files=False)
    assert checked.bound.specs["predictor"].source.from_pretrained is None
    assert checked.bound.without_source == {"predictor"}
    (note,) = checked.notes
    assert f"config.yaml:{error.line}: model.models.predictor.from_pretrained: " in note


@pytest.mark.parametrize("text", [SINGLE, CONTAINER])
def test_shapes_that_aren_t_here_are_a_note_or_come_from_architecture(tmp_path: Path, text: str) -> None:
    name = "model" if text is SINGLE else "predictor"
    key = "model" if text is SINGLE else "model.models.predictor"
    overrides = [f"{key}.model_id=cfg_shaped", f"{key}.from_pretrained=not/here/yet"]
    checked = run_check(tmp_path, text, *overrides, files=False)
    assert checked.structure is None
    assert f"the shapes of {name} are not known" in checked.notes[-1]
    named = run_check(tmp_path, text, *overrides, f"{key}.architecture=small", files=False)
    assert named.structure is not None
    error = fails(tmp_path, text, *overrides, f"{key}.architecture=smal", files=False)
    assert error.key == f"{key}.architecture"
    error = fails(tmp_path, text, overrides[0], files=False)  # no weights are named, so nothing can be missing here
    assert error.key == f"{key}.architecture"


def test_an_undefined_variable_is_a_note_or_an_error(tmp_path: Path) -> None:
    text = SINGLE.replace("model_id: cfg_model", "model_id: cfg_model\n  from_pretrained: ${WEIGHTS}/model")
    error = fails(tmp_path, text)
    assert (error.key, error.line) == ("model.from_pretrained", 3)
    assert "the environment variable WEIGHTS is not defined" in error.message
    (note,) = run_check(tmp_path, text, files=False).notes
    assert "WEIGHTS is not defined" in note


@pytest.mark.parametrize("key", ["training.load", "training.init_from", "data.cache"])
def test_a_missing_folder_shows_the_absolute_path(tmp_path: Path, key: str) -> None:
    """B095: the message shows the absolute path that was tried."""
    error = fails(tmp_path, SINGLE, f"{key}=not/there")
    assert error.key == key
    assert error.message == f"{tmp_path}/not/there doesn't exist"
    (note,) = run_check(tmp_path, SINGLE, f"{key}=not/there", files=False).notes
    assert note == f"command line: {key}: {error.message}"


def test_paths_among_a_plugin_s_keys_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    param = "{dataset_type: video, data_path: clips, num_frames: 5, buckets: [[16, 16]]}"
    checked = run_check(tmp_path, SINGLE, f"data.dataset_param={param}")
    assert checked.bound.datasets[0].params["data_path"] == f"{tmp_path}/clips"
    assert f"data_path: {tmp_path}/clips" in dump_resolved(checked.config)
    error = fails(tmp_path, SINGLE, f"data.dataset_param={param}", "data.dataset_param.data_path=nowhere")
    assert (error.key, error.message) == ("data.dataset_param.data_path", f"{tmp_path}/nowhere doesn't exist")
