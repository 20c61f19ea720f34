"""Hundreds of broken configurations: each is refused with the key and the line, before any process group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from cfg_helpers import CONTAINER, environment, run_cli, write

from mm_trainer.commands.prepare import prepare
from mm_trainer.config import dump_resolved, load_config, resolve
from mm_trainer.errors import InputError

NAMES = {"encoder", "predictor"}
"""Keys that the user chooses; another spelling is another sub-model."""


@dataclass(frozen=True)
class Mutation:
    """A broken text, and what the message must contain: ``line: key`` unless the text isn't YAML."""

    what: str
    text: str
    line: int
    key: str | None


@dataclass(frozen=True)
class KeyLine:
    """A line ``key: value`` of the intact text."""

    index: int
    indent: str
    path: tuple[str, ...]
    value: str

    @property
    def is_scalar(self) -> bool:
        return bool(self.value) and self.value not in ("[]", "{}")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration with every key on a line of its own."""
    folder = tmp_path_factory.mktemp("intact")
    overrides = [
        "parallel.fsdp_plan.sub_plans={encoder: {shard_size: 2}}",
        "training.lr_scaling_plan=[{apply_modules: [predictor.blocks.0], scale: 2}]",
        "tools.logging.wandb={project: p}",
        "training.ema.decay=0.99",
        "features.enable_activation_offload=false",
    ]
    config = resolve(load_config(write(folder, CONTAINER), overrides, environment=environment(folder)), 2)
    text = dump_resolved(config)
    prepare(load_config(write(folder, text)), 2, require_files=True)
    return text


def key_lines(text: str) -> list[KeyLine]:
    found: list[KeyLine] = []
    open_keys: list[tuple[int, str]] = []
    for index, line in enumerate(text.splitlines()):
        match = re.fullmatch(r"( *)(\w+):(?: (.*))?", line)
        if match is None:
            continue  # an item of a list
        depth = len(match[1])
        open_keys = [(d, k) for d, k in open_keys if d < depth] + [(depth, match[2])]
        found.append(KeyLine(index, match[1], tuple(k for _, k in open_keys), match[3] or ""))
    return found


def dotted(line: KeyLine) -> str:
    return ".".join(line.path).replace("lr_scaling_plan.", "lr_scaling_plan.0.")


def with_line(text: str, index: int, line: str) -> str:
    lines = text.splitlines()
    lines[index] = line
    return "\n".join(lines) + "\n"


def insert_line(text: str, index: int, line: str) -> str:
    lines = text.splitlines()
    lines.insert(index, line)
    return "\n".join(lines) + "\n"


# --- the kinds of mutation ----------------------------------------------------------------------------------------


def typos(text: str) -> Iterator[Mutation]:
    for line in key_lines(text):
        *parents, key = line.path
        if key in NAMES:
            continue
        middle = len(key) // 2
        wrong = key[:middle] + "x" + key[middle:]
        broken = with_line(text, line.index, f"{line.indent}{wrong}: {line.value}")
        named = dotted(replace(line, path=(*parents, wrong)))
        yield Mutation(f"typo {wrong}", broken, line.index + 1, named)


def wrong_types(text: str) -> Iterator[Mutation]:
    for line in key_lines(text):
        key = dotted(line)
        if line.is_scalar:
            values = ["{surprise: 1}", "[[1]]"]
            if re.fullmatch(r"-?[\d.]+(e-?\d+)?", line.value):
                values.append("lots")
            elif line.value in ("true", "false"):
                values += ["7.5", "'true'"]
        elif line.value == "[]":
            values = ["nothing", "3"]
        else:
            continue
        for value in values:
            broken = with_line(text, line.index, f"{line.indent}{line.path[-1]}: {value}")
            yield Mutation(f"{key}: {value}", broken, line.index + 1, key)


def wrong_sections(text: str) -> Iterator[Mutation]:
    lines = key_lines(text)
    (data,) = [line for line in lines if line.path == ("data",)]
    for line in lines:
        if line.path[0] == "training" and len(line.path) == 2 and line.value:
            broken = insert_line(text, data.index + 1, f"  {line.path[1]}: {line.value}")
            yield Mutation(f"data.{line.path[1]}", broken, data.index + 2, f"data.{line.path[1]}")


VALUES = [
    ("parallel.fully_shard_parallel_size", "0"),
    ("parallel.fully_shard_parallel_size", "3"),
    ("parallel.fully_shard_parallel_size", "every"),
    ("parallel.data_parallel_size", "5"),
    ("parallel.tensor_parallel_size", "2"),
    ("parallel.timeout_s", "0"),
    ("parallel.ulysses_parallel_size", "0"),
    ("parallel.ulysses_parallel_size", "3"),
    ("parallel.ring_attention_size", "5"),
    ("parallel.attention_kernel", "fast"),
    ("parallel.fsdp_plan.param_dtype", "int8"),
    ("parallel.fsdp_plan.reshard_after_forward", "1"),
    ("parallel.fsdp_plan.reshard_after_forward", "null"),
    ("parallel.fsdp_plan.num_to_forward_prefetch", "-1"),
    ("parallel.fsdp_plan.sub_plans.encoder.shard_size", "0"),
    ("parallel.fsdp_plan.sub_plans.encoder.shard_size", "3"),
    ("parallel.fsdp_plan.sub_plans.encoder.trainable", "true"),
    ("parallel.fsdp_plan.sub_plans.encoder.enabled", "false"),
    ("model.model_id", "cfg_contianer"),
    ("model.model_id", "cfg_model"),
    ("model.models.predictor.model_id", "nobody"),
    ("model.models.predictor.load_format", "ckpt"),
    ("model.models.predictor.width", "0"),
    ("model.models.encoder.freeze", "[]"),
    ("model.models.encoder.freeze", "false"),
    ("data.dataset_param.dataset_type", "film"),
    ("data.dataset_param.width", "wide"),
    ("data.on_bad_sample", "ignore"),
    ("data.max_bad_fraction", "1.5"),
    ("data.dataloader_param.num_workers", "-1"),
    ("data.dataloader_param.pin_memory", "maybe"),
    ("training.micro_batch_size", "0"),
    ("training.gradient_accumulation_steps", "many"),
    ("training.gradient_accumulation_steps", "3"),
    ("training.global_batch_size", "7"),
    ("training.train_iters", "0"),
    ("training.train_iters", "1e3"),
    ("training.train_iters", "012"),
    ("training.optimizer", "adam"),
    ("training.lr", "-1"),
    ("training.lr", ".nan"),
    ("training.lr", "on"),
    ("training.lr", "1:30"),
    ("training.lr_min", "5"),
    ("training.lr_decay_style", "square"),
    ("training.lr_warmup_ratio", "2"),
    ("training.beta1", "1"),
    ("training.adam_eps", "0"),
    ("training.clip_grad", "-1"),
    ("training.condition_mbs", "0"),
    ("training.save", "s3://bucket/run"),
    ("training.save_interval", "-5"),
    ("training.keep_last", "0"),
    ("training.keep_last", "-2"),
    ("training.no_load_optim", "true"),
    ("training.nan_policy", "hope"),
    ("training.grace_time_s", "0"),
    ("training.gc_interval", "0"),
    ("training.log_interval", "0"),
    ("training.val_interval", "10"),
    ("training.seed", "-1"),
    ("training.ema.decay", "1"),
    ("tools.profile.start_step", "13"),
    ("tools.profile.start_step", "0"),
    ("features.recompute_plan.policy", "some"),
    ("features.recompute_plan.n", "0"),
    ("features.enable_activation_offload", "true"),
    ("features.activation_offload_plan.window", "0"),
]
"""Values out of range, and values that contradict another section."""

BLAMED = {
    "parallel.ring_attention_size: 5": "parallel.ulysses_parallel_size",
    "model.models.encoder.freeze: false": "parallel.fsdp_plan.sub_plans.encoder.shard_size",
    "training.gradient_accumulation_steps: 3": "training.global_batch_size",
    "tools.profile.start_step: 13": "tools.profile.end_step",
}
"""Where two keys contradict each other, the other one is named."""


def wrong_values(text: str) -> Iterator[Mutation]:
    by_key = {dotted(line): line for line in key_lines(text)}
    for key, value in VALUES:
        line = by_key[key]
        broken = with_line(text, line.index, f"{line.indent}{line.path[-1]}: {value}")
        blamed = BLAMED.get(f"{key}: {value}", key)
        yield Mutation(f"{key}: {value}", broken, by_key[blamed].index + 1, blamed)


def dead_patterns(text: str) -> Iterator[Mutation]:
    for index, line in enumerate(text.splitlines()):
        if match := re.fullmatch(r"( *- )((?:encoder|predictor|blocks).*)", line):
            yield Mutation(f"pattern {match[2]}", with_line(text, index, f"{match[1]}x{match[2]}"), index + 1, None)


def broken_yaml(text: str) -> Iterator[Mutation]:
    lines = key_lines(text)
    scalars = [line for line in lines if line.is_scalar]
    edits: list[tuple[str, Callable[[KeyLine], str]]] = [
        ("tab", lambda line: f"\t{line.path[-1]}: {line.value}"),
        ("open list", lambda line: f"{line.indent}{line.path[-1]}: [1, 2"),
        ("open quote", lambda line: f'{line.indent}{line.path[-1]}: "open'),
        ("two colons", lambda line: f"{line.indent}{line.path[-1]}: a: b"),
        ("tag", lambda line: f"{line.indent}{line.path[-1]}: !!python/name:os.system x"),
        ("unknown alias", lambda line: f"{line.indent}{line.path[-1]}: *nowhere"),
        ("no colon", lambda line: f"{line.indent}{line.path[-1]} {line.value}"),
    ]
    for number, (what, edit) in enumerate(edits):
        for line in scalars[5 + number :: 37]:
            yield Mutation(f"{what} at {line.path[-1]}", with_line(text, line.index, edit(line)), line.index + 1, None)
    for line in scalars[::20]:
        twice = insert_line(text, line.index, f"{line.indent}{line.path[-1]}: {line.value}")
        yield Mutation(f"{line.path[-1]} twice", twice, line.index + 2, None)


KINDS = [typos, wrong_types, wrong_sections, wrong_values, dead_patterns, broken_yaml]


def test_there_are_more_than_300(intact: str) -> None:
    assert sum(1 for kind in KINDS for _ in kind(intact)) > 300


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_mutation_is_refused_with_key_and_line(
    kind: Callable[[str], Iterator[Mutation]], intact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B092, B093, B097: typos, wrong types, wrong sections, values out of range, conflicts, YAML errors."""

    def no_process_group(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", no_process_group)
    misses = []
    for mutation in kind(intact):
        try:
            prepare(load_config(write(tmp_path, mutation.text)), 2, require_files=True)
        except InputError as error:
            if not says(mutation, str(error)):
                misses.append(f"{mutation.what}: expected {mutation.line}: {mutation.key}, got {error}")
        else:
            misses.append(f"{mutation.what} was accepted")
    assert not misses, "\n".join(misses)


def says(mutation: Mutation, message: str) -> bool:
    """Whether the message names the line and the key; a YAML error may be noticed up to a few lines later."""
    if mutation.key is not None:
        return re.search(rf"config\.yaml:{mutation.line}: {re.escape(mutation.key)}(?:\.\w+)*: ", message) is not None
    lines = range(mutation.line, mutation.line + 4)
    return any(f"config.yaml:{line}: " in message for line in lines)


def test_mutations_through_the_command_line(intact: str, tmp_path: Path) -> None:
    """Code 2, one message with key and line, no traceback."""
    counts = {typos: 3, wrong_types: 3, wrong_sections: 3, wrong_values: 3, dead_patterns: 1, broken_yaml: 2}
    made = {kind: list(kind(intact)) for kind in counts}
    chosen = [made[kind][i * len(made[kind]) // count] for kind, count in counts.items() for i in range(count)]

    def run(number: int) -> str | None:
        mutation = chosen[number]
        path = write(tmp_path, mutation.text, f"{number}.config.yaml")
        done = run_cli(["train", path, "--nproc-per-node", "2"], tmp_path)
        fine = done.code == 2 and says(mutation, done.err) and done.err.startswith("error: ") and not done.out
        return None if fine and "Traceback" not in done.err else f"{mutation}: {done}"

    with ThreadPoolExecutor(2) as pool:
        misses = [miss for miss in pool.map(run, range(len(chosen))) if miss]
    assert not misses, "\n".join(misses)
