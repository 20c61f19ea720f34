"""Loading: files, recipes, `extends`, overrides, the environment, and what is said about a wrong key or value."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cfg_helpers import CONTAINER, SINGLE, environment, line_of, write

from mm_checkpoint.config import WeightSourceConfig
from mm_trainer.config import SubModelConfig, dump_resolved, json_schema, load_config, resolve
from mm_trainer.config.schema import section_keys
from mm_trainer.config.yaml.foreign import FOREIGN_KEYS
from mm_trainer.errors import ConfigError


def load(folder: Path, text: str, *overrides: str, **variables: str) -> Any:
    return load_config(write(folder, text), overrides, environment=environment(folder, **variables))


def fails(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError, match=".") as caught:
        load(folder, text, *overrides)
    return caught.value


# --- numbers and other scalars ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "value"), [("1e-4", 1e-4), ("1", 1.0), ("1E-4", 1e-4), ("0.1", 0.1)])
def test_a_number_in_any_spelling_is_a_float(tmp_path: Path, written: str, value: float) -> None:
    """B092: `1e-4` is the number, and a whole number stands for a float."""
    config = load(tmp_path, SINGLE, f"training.lr={written}")
    assert config.training.lr == value
    assert isinstance(config.training.lr, float)


@pytest.mark.parametrize(
    ("key", "written", "said"),
    [
        ("training.lr", "on", "expected a number, got 'on' (text)"),
        ("training.lr", "true", "expected a number, got 'true' (true/false)"),
        ("training.lr", "'1e-4'", "expected a number, got '1e-4' (text); remove the quotes"),
        ("training.lr", "1:30", "expected a number, got '1:30' (text)"),
        ("training.lr", ".nan", "a number"),
        ("training.train_iters", "1e3", "expected a whole number, got '1e3' (a number); write 1000"),
        (
            "training.train_iters",
            "012",
            "expected a whole number, got '012' (text); write 12, without the leading zero",
        ),
        ("training.train_iters", "1.5", "expected a whole number, got '1.5' (a number)"),
        ("training.train_iters", "NO", "expected a whole number, got 'NO' (text)"),
        ("training.deterministic", "on", "expected true or false, got 'on' (text); write true"),
        ("training.deterministic", "NO", "expected true or false, got 'NO' (text); write false"),
        ("training.deterministic", "1", "expected true or false, got '1' (a whole number)"),
        ("training.nan_policy", "no", "expected stop, skip, got 'no' (text)"),
        ("training.nan_policy", "stpo", "did you mean stop?"),
        ("training.plugin", "mine", "expected a list, got 'mine' (text)"),
        ("training.ema", "true", "expected a section of keys, got 'true' (true/false)"),
        ("training.train_iters", "null", "how long to train is missing"),
        ("training.seed", "{a: 1}", "expected a whole number, got a section with the keys a"),
        ("parallel.fully_shard_parallel_size", "0", "expected a whole number of at least 1 or auto"),
        ("parallel.fsdp_plan.reduce_dtype", "bf15", "did you mean 'bf16'?"),
        ("training.gradient_accumulation_steps", "0", "expected at least 1 or auto, got '0' (a whole number)"),
    ],
)
def test_a_wrong_value_is_named_with_key_value_and_type(tmp_path: Path, key: str, written: str, said: str) -> None:
    """B092: otherwise an error with key path, value and type — in the file, and on the command line."""
    error = fails(tmp_path, SINGLE, f"{key}={written}")
    assert error.key == key
    assert said in error.message
    assert str(error).startswith(f"command line: {key}: ")


def test_a_wrong_value_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    text = SINGLE.replace("lr: 1e-3", "lr: fast")
    error = fails(tmp_path, text)
    assert (error.file, error.line) == (str(tmp_path / "config.yaml"), line_of(text, "lr: fast"))
    assert str(error) == f"{tmp_path}/config.yaml:{error.line}: training.lr: expected a number, got 'fast' (text)"


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    error = fails(tmp_path, SINGLE, "training.lr=fast", "training.seeds=3", "data.cash=x")
    assert error.key == "data.cash"
    assert "training.lr: expected a number" in error.message
    assert "training.seeds: unknown key; did you mean seed?" in error.message


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("training.lerning_rate", "for learning_rate write training.lr"),
        ("training.lr_decay_stile", "did you mean lr_decay_style?"),
        ("parallel.fsdp_plan.reduce_dtpye", "did you mean reduce_dtype?"),
        ("parallel.fsdp_plan.sub_plans.predictor.shard_sise", "did you mean shard_size?"),
        ("features.recompute_plan.polcy", "did you mean policy?"),
        ("tools.profile.enabled", "did you mean enable?"),
        ("data.dataloader_param.num_worker", "did you mean num_workers?"),
        ("trainig", "did you mean training?"),
        ("data.seed", "it belongs in section training: training.seed"),
        ("training.recompute", "it belongs in section features: features.recompute"),
        ("training.num_workers", "here it is called data.dataloader_param.num_workers"),
        ("training.learning_rate", "here it is called training.lr"),
        ("training.gradient_clipping", "here it is called training.clip_grad"),
        ("training.max_steps", "here it is called training.train_iters"),
        ("training.xyzzy", "unknown key (allowed here: micro_batch_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path, key: str, said: str) -> None:
    """B093: a typo is refused, at any depth; a key in the wrong section is told where it belongs."""
    error = fails(tmp_path, CONTAINER, f"{key}=1")
    assert error.key == key
    assert said in error.message


def test_foreign_keys_name_keys_that_exist() -> None:
    known = set(section_keys())
    for foreign, ours in FOREIGN_KEYS.items():
        assert foreign not in known
        for name in ours.removesuffix(" of a sub-model").replace(" and ", " or ").split(" or "):
            name = name.replace("<name>", "*")
            assert name in known or f"model.models.*.{name}" in known, (foreign, name)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    error = fails(tmp_path, SINGLE + "  lr: 2e-3\n")
    assert "given twice, first in line 9" in error.message


def test_other_names_of_load_format(tmp_path: Path) -> None:
    config = load(tmp_path, SINGLE, "model.hub_backend=dcp")
    assert config.model.load_format == "dcp"
    error = fails(tmp_path, SINGLE, "model.hub_backend=dcp", "model.load_format=hf")
    assert "hub_backend and load_format are two names of the same key" in error.message


def test_a_sub_model_has_the_keys_of_a_weight_source() -> None:
    declared = SubModelConfig.model_fields
    for field in dataclasses.fields(WeightSourceConfig):
        assert declared[field.name].default == field.default


def test_keys_of_a_sub_model_don_t_belong_to_the_container(tmp_path: Path) -> None:
    error = fails(tmp_path, CONTAINER, "model.freeze=true")
    assert error.key == "model.freeze"
    assert "under model.models.<name>" in error.message


@pytest.mark.parametrize("section", ["model", "data", "training"])
def test_a_missing_section_is_named(tmp_path: Path, section: str) -> None:
    sections = SINGLE.split("\n")
    start = sections.index(f"{section}:")
    end = next((i for i in range(start + 1, len(sections)) if sections[i][:1].isalpha()), len(sections))
    error = fails(tmp_path, "\n".join(sections[:start] + sections[end:]))
    assert error.key == section
    assert "is required and missing" in error.message


def test_an_empty_optional_section_counts_as_absent(tmp_path: Path) -> None:
    assert load(tmp_path, SINGLE + "tools:\nfeatures:\n").tools.logging.tensorboard


# --- conflicts inside a section -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["training.train_epochs=2"], "training.train_epochs", "keep one of the two"),
        (["training.lr_warmup_ratio=0.1", "training.lr_warmup_iters=3"], "training.lr_warmup_iters", "keep one"),
        (["training.lr_min=1"], "training.lr_min", "at most lr = 0.001"),
        (["training.keep_last=0"], "training.keep_last", "-1 (keep all) or at least 1"),
        (["training.gradient_accumulation_steps=auto"], "training.gradient_accumulation_steps", "global_batch_size"),
        (["training.load=y", "training.init_from=x"], "training.init_from", "can't be combined with a resume"),
        (["training.no_load_optim=true"], "training.no_load_optim", "nothing is loaded"),
        (["training.val_quantiles=[0.5, 0.5]"], "training.val_quantiles", "given twice"),
        (["tools.profile.start_step=20"], "tools.profile.end_step", "at least start_step = 20"),
        (["model.pipeline=flow_match"], "model.pipeline", "a single model has none"),
        (["model.load_format=ckpt"], "model.load_format", "'ckpt' is not one of"),
        (["parallel.tensor_parallel_size=2"], "parallel.tensor_parallel_size", "only 1 is supported"),
        (["parallel.ep_plan={}"], "parallel.ep_plan", "no expert-parallel layers"),
        (["features.recompute=true"], "features.recompute", "apply_modules is empty"),
        (["data.dataset_param={}"], "data.dataset_param.dataset_type", "is required and missing"),
        (
            ["data.dataset_param={dataset_type: a, datasets: [{weight: 1}, {repeats: 2}]}"],
            "data.dataset_param.datasets.1",
            "weight is missing",
        ),
        (["data.dataset_param={datasets: [{}]}"], "data.dataset_param.datasets.0.dataset_type", "is required"),
    ],
)
def test_conflicts_inside_a_section(tmp_path: Path, overrides: list[str], key: str, said: str) -> None:
    error = fails(tmp_path, SINGLE, *overrides)
    assert error.key == key
    assert said in error.message


@pytest.mark.parametrize("key", ["training.save", "training.load", "data.cache"])
def test_remote_locations_are_refused(tmp_path: Path, key: str) -> None:
    error = fails(tmp_path, SINGLE, f"{key}=s3://bucket/run")
    assert error.key == key
    assert "remote locations can't be used for now" in error.message


# --- overrides ----------------------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_reach_lists(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        CONTAINER,
        "training.val_quantiles=[0.25, 0.75]",
        "training.val_quantiles.1=0.8",
        "parallel.fsdp_plan.apply_modules.0=predictor",
        "tools.logging.tensorboard=false",
        "training.load=",
        "model.models.predictor.width=16",
    )
    assert config.training.val_quantiles == (0.25, 0.8)
    assert config.parallel.fsdp_plan.apply_modules == ("predictor", "predictor.blocks.{*}")
    assert config.tools.logging.tensorboard is False
    assert config.training.load is None
    assert config.model.models["predictor"].extras == {"width": 16}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr", "expected key=value such as training.lr=1e-5"),
        ("=3", "expected key=value"),
        ("training..lr=3", "expected key=value"),
        ("training.lr=[1", "not valid YAML"),
        ("training.lr=a: b: c", "not valid YAML"),
        ("training.lr.x=3", "training.lr is the value '1e-3', which has no key 'x'"),
        ("parallel.fsdp_plan.apply_modules.7=x", "a list of 2; expected a position from 0 to 1, got '7'"),
        ("parallel.fsdp_plan.apply_modules.first=x", "expected a position from 0 to 1, got 'first'"),
        ("extends=recipe:x", "can't be set here"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, said: str) -> None:
    error = fails(tmp_path, CONTAINER, override)
    assert error.file == "command line"
    assert said in error.message


# --- files, extends, recipes --------------------------------------------------------------------------------------


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, CONTAINER, "base.yaml")
    middle = "extends: base.yaml\ntraining: {lr: 5e-4, seed: 7}\n"
    (tmp_path / "sub").mkdir()
    write(tmp_path, middle, "middle.yaml")
    top = "extends: ../middle.yaml\ntraining:\n  seed: 8\nparallel: {fsdp_plan: {apply_modules: [encoder]}}\n"
    path = write(tmp_path / "sub", top)
    config = load_config(path, environment=environment(Path("/")))
    assert (config.training.lr, config.training.seed, config.training.train_iters) == (5e-4, 8, 3)
    assert config.parallel.fsdp_plan.apply_modules == ("encoder",)
    assert config.parallel.fsdp_plan.param_dtype == "fp32"


def test_an_error_names_the_file_that_wrote_the_value(tmp_path: Path) -> None:
    base = SINGLE.replace("lr: 1e-3", "lr: fast")
    write(tmp_path, base, "base.yaml")
    error = fails(tmp_path, "extends: base.yaml\ntraining: {seed: 1}\n")
    assert (error.file, error.line) == (str(tmp_path / "base.yaml"), line_of(base, "lr: fast"))


def test_extends_a_recipe(tmp_path: Path) -> None:
    from mm_trainer.config.yaml.document import read_document

    text = "extends: recipe:mine\ntraining: {lr: 5e-4}\n"
    document = read_document(write(tmp_path, text), [], environment(tmp_path), {"mine": SINGLE}.__getitem__)
    assert document.plain()["training"]["lr"] == 5e-4
    assert document.at(("training", "train_iters"))[1].file == "recipe:mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: nowhere.yaml\n", "can't read the configuration {folder}/nowhere.yaml: No such file"),
        ("extends: recipe:nothing\n", "no 'nothing' in the group mm_trainer.recipes"),
        ("extends: [a, b]\n", "expected one file or recipe:NAME"),
        ("extends: config.yaml\n", "a circle of files"),
    ],
)
def test_a_wrong_extends_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    error = fails(tmp_path, "\n" + text)
    assert (error.key, error.line) == ("extends", 2)
    assert said.format(folder=tmp_path) in error.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n- b\n", "a list at the top level"),
        (b"just text", "a str at the top level"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_config(str(tmp_path / "config.yaml"))


def test_a_missing_file_is_named_by_its_absolute_path(tmp_path: Path) -> None:
    """B095: the error shows the absolute path that was tried."""
    with pytest.raises(ConfigError, match=f"can't read the configuration {tmp_path}/nowhere.yaml: No such file"):
        load_config("nowhere.yaml", environment=environment(tmp_path))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbf" + SINGLE.encode())
    assert load_config(str(tmp_path / "config.yaml")).training.train_iters == 3


# --- paths and variables ------------------------------------------------------------------------------------------

PATHS = """\
model:
  model_id: m
  from_pretrained: weights
  checkpoint_path: ${BASE}/ckpt
data:
  dataset_param: {dataset_type: d, tokenizer: ~/tok}
  cache: $BASE/cache
training:
  train_iters: 1
  save: ../run
  init_from: /abs/run
tools:
  profile: {save_path: traces}
"""


def test_relative_paths_count_from_the_start_directory(tmp_path: Path) -> None:
    """B095: one base for all of them, wherever the file is; `~` and variables work."""
    path = write(tmp_path, PATHS)
    for cwd in (tmp_path, Path("/some/where")):
        config = load_config(path, environment=environment(cwd, BASE="/base"))
        assert config.model.from_pretrained == f"{cwd}/weights"
        assert config.model.checkpoint_path == "/base/ckpt"
        assert str(config.data.dataset_param.tokenizer) == "/home/someone/tok"
        assert str(config.data.cache) == "/base/cache"
        assert config.training.save == cwd.parent / "run"
        assert str(config.training.init_from) == "/abs/run"
        assert config.tools.profile.save_path == cwd / "traces"
        assert config.tools.memory_profile.save_path == cwd.parent / "run" / "memory"


def test_a_hub_id_stays_one_where_no_such_folder_is(tmp_path: Path) -> None:
    assert load(tmp_path, SINGLE, "model.from_pretrained=org/name").model.from_pretrained == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load(tmp_path, SINGLE, "model.from_pretrained=org/name").model.from_pretrained == f"{tmp_path}/org/name"


def test_an_undefined_variable_stays_and_is_remembered(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, PATHS), environment=environment(tmp_path))
    assert config.model.checkpoint_path == "${BASE}/ckpt"
    assert [(u.key, u.names) for u in config.document.undefined] == [
        ("model.checkpoint_path", ("BASE",)),
        ("data.cache", ("BASE",)),
    ]


def test_a_double_dollar_is_a_dollar(tmp_path: Path) -> None:
    config = load(tmp_path, SINGLE, "training.save=/a$$b")
    assert str(config.training.save) == "/a$b"
    again = load(tmp_path, dump_resolved(config))
    assert str(again.training.save) == "/a$b"


# --- the resolved configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SINGLE, CONTAINER])
def test_a_dumped_configuration_is_accepted_and_equal(tmp_path: Path, text: str) -> None:
    overrides = ("tools.logging.wandb={project: '012', name: on}", "parallel.timeout_s=60")
    resolved = resolve(load(tmp_path, text, *overrides), 4)
    elsewhere = environment(Path("/elsewhere"))
    path = write(tmp_path, dump_resolved(resolved), "config.resolved.yaml")
    again = load_config(path, environment=elsewhere)
    assert resolve(again, 4) == resolved
    assert dump_resolved(resolve(again, 4)) == dump_resolved(resolved)


def test_nothing_can_be_assigned(tmp_path: Path) -> None:
    config = resolve(load(tmp_path, SINGLE), 1)
    for section in [config, config.training, config.data.dataset_param, config.parallel, config.features]:
        name = "seed" if hasattr(section, "seed") else next(iter(vars(section)))
        with pytest.raises((dataclasses.FrozenInstanceError, ValueError), match=r"(?i)frozen|cannot assign"):
            setattr(section, name, None)


def test_the_schema_describes_every_section() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {"extends", "parallel", "model", "data", "training", "tools", "features"}
    training = schema["$defs"]["TrainingConfig"]["properties"]
    assert training["lr"]["description"] == "Learning rate after warm-up."
    assert schema["$defs"]["SubModelConfig"]["additionalProperties"] is True


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    """Errors of the core sections answer before torch or a plugin is imported."""
    path = write(tmp_path, SINGLE)
    code = (
        "import sys; from mm_trainer.config import load_config, resolve, dump_resolved\n"
        f"dump_resolved(resolve(load_config({path!r}), 2))\n"
        "print([m for m in ('torch', 'numpy', 'diffusers', 'rich', 'cfg_plugin') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_key_that_went_is_dropped_or_explained(tmp_path: Path) -> None:
    """Resolved configurations of earlier versions state it with its only value."""
    text = SINGLE + "  save_format: dcp\n"
    assert "save_format" not in dump_resolved(resolve(load(tmp_path, text), 1))
    error = fails(tmp_path, text.replace("dcp", "hf"))
    assert (error.key, error.line) == ("training.save_format", line_of(text, "save_format"))
    assert "checkpoints are always DCP; other forms come from `mm-checkpoint export`" in error.message


@pytest.mark.parametrize("place", ["  model_id: cfg_model\n", "      freeze: true\n"])
def test_a_sub_model_stays_nowhere_but_where_its_inputs_are(tmp_path: Path, place: str) -> None:
    """`skip_to_device` left a module on meta, or its inputs elsewhere."""
    indent = " " * (len(place) - len(place.lstrip()))
    text = (SINGLE if "model_id" in place else CONTAINER).replace(place, f"{place}{indent}skip_to_device: false\n", 1)
    assert "skip_to_device" not in dump_resolved(resolve(load(tmp_path, text), 1))
    error = fails(tmp_path, text.replace("skip_to_device: false", "skip_to_device: true"))
    assert error.line == line_of(text, "skip_to_device")
    assert "`cpu_offload` of its sub-plan keeps its weights on the host" in error.message
