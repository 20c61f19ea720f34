"""The command line: ``mm-checkpoint inspect | convert | verify | export``.

Nothing here imports torch, or anything that does, before a command needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_checkpoint.errors import BadInputError, CheckpointError

if TYPE_CHECKING:
    from mm_checkpoint._tools.verify import Verification

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

AnyPath = Annotated[Path, typer.Argument(metavar="PATH", help="A run, an iteration, a model folder or a weight file.")]
Source = Annotated[Path, typer.Argument(metavar="SRC", help="A folder or file in any form.")]
FromRun = Annotated[Path, typer.Argument(metavar="RUN_OR_ITER", help="A run's folder, or one of its iterations.")]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="A new or an empty folder (convert --to safetensors: a new file).")
]
Dtype = Annotated[str | None, typer.Option(help="Element type for all floating tensors, such as bf16.")]
Workers = Annotated[int, typer.Option(min=1, help="Files written at the same time.")]
Plugin = Annotated[list[str] | None, typer.Option(metavar="MODULE", help="Import this first: it registers key maps.")]
ShardSize = Annotated[str, typer.Option(help="Tensor data per file, such as 5GB or 500MiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print one json object for scripts.")]


@app.callback()
def root() -> None:
    """Convert, inspect, verify and export model weights in hf, diffusers, DCP and safetensors form."""


@app.command()
def inspect(path: AnyPath, as_json: Json = False) -> None:
    """Show what is there: format, sizes, element types, names and shapes, the manifest."""
    from mm_checkpoint._tools.inspect import inspect as look

    found = look(path)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for line in _INSPECTORS[found["kind"]](found):
        typer.echo(line)


@app.command()
def convert(
    source: Source,
    destination: Destination,
    to: Annotated[str, typer.Option(help="hf | diffusers | dcp | safetensors")],
    key_map: Annotated[
        str | None, typer.Option(help="Rename by this map: to the source's names for diffusers, else to native ones.")
    ] = None,
    dtype: Dtype = None,
    prefix: Annotated[str, typer.Option(help="Take only the names that start with this, and strip it.")] = "",
    variant: Annotated[str | None, typer.Option(help="Which of several sets of files, such as fp16.")] = None,
    workers: Workers = 1,
    max_shard_size: ShardSize = "5GB",
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Convert weights to another form, as a stream."""
    from mm_checkpoint._weights.convert import convert as run_convert

    _import_plugins(plugin or [])

    with _progress("converting") as (on_start, on_bytes):
        done = run_convert(
            source,
            destination,
            to=to,
            key_map=key_map,
            dtype=dtype,
            prefix=prefix,
            variant=variant,
            workers=workers,
            max_shard_size=max_shard_size,
            on_start=on_start,
            on_bytes=on_bytes,
        )
    if as_json:
        typer.echo(json.dumps({"destination": str(done.destination), "tensors": done.tensors, "bytes": done.nbytes}))
    else:
        typer.echo(f"{done.destination}: {done.tensors} tensors, {_size(done.nbytes)}")


@app.command()
def verify(path: AnyPath, as_json: Json = False) -> None:
    """Check files against the sizes and checksums recorded when they were written; exits with 2 on damage."""
    from mm_checkpoint._tools.verify import verify as run_verify

    with _progress("verifying") as (_, on_bytes):
        result = run_verify(path, on_bytes=on_bytes)
    _report(result, as_json)
    if not result.ok:
        raise typer.Exit(2)


@app.command()
def export(
    run: FromRun,
    destination: Destination,
    to: Annotated[str, typer.Option(help="diffusers | hf | safetensors")] = "diffusers",
    dtype: Dtype = None,
    base: Annotated[Path | None, typer.Option(help="A pipeline folder to complete the result from.")] = None,
    link: Annotated[bool, typer.Option(help="Link to the base's files instead of copying them.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The running averages instead of the weights.")] = False,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = 1,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Write the trained part of a run as model folders, guided by its manifest."""
    from mm_checkpoint._weights.export import export as run_export

    _import_plugins(plugin or [])

    with _progress("exporting") as (on_start, on_bytes):
        written = run_export(
            run,
            destination,
            to=to,
            dtype=dtype,
            base=base,
            link=link,
            ema=ema,
            max_shard_size=max_shard_size,
            workers=workers,
            on_start=on_start,
            on_bytes=on_bytes,
        )
    paths = [str(path) for path in written]
    typer.echo(json.dumps({"written": paths}) if as_json else "\n".join(paths))


def _import_plugins(modules: list[str]) -> None:
    """Modules that register key maps; they may be in the current folder."""
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise BadInputError(f"--plugin {module}: {type(error).__name__}: {error}") from error


def main() -> None:
    """Entry point: 0 done, 2 bad input (one message), 1 a fault of ours or of the disk."""
    try:
        app()
    except CheckpointError as error:
        typer.echo(f"mm-checkpoint: {error}", err=True)
        sys.exit(2 if isinstance(error, BadInputError) else 1)
    except OSError as error:
        typer.echo(f"mm-checkpoint: {error.filename or 'the disk'}: {error.strerror or error}", err=True)
        sys.exit(1)


@contextmanager
def _progress(what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar, if stderr is a terminal: a function to call with the total, and one with every piece."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield (
            lambda total: progress.update(task, total=total),
            lambda count: progress.advance(task, count),
        )


def _report(result: Verification, as_json: bool) -> None:
    if as_json:
        lists = {"checked": [str(path) for path in result.checked], "problems": result.problems, "notes": result.notes}
        typer.echo(json.dumps({"ok": result.ok, **lists}, indent=2))
        return
    for note in result.notes:
        typer.echo(f"note: {note}")
    for problem in result.problems:
        typer.echo(f"DAMAGED {problem}")
    typer.echo(f"{len(result.checked)} checked, {'all well' if result.ok else f'{len(result.problems)} problem(s)'}")


def _inspect_run(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['path']}: a run, tracker {found['tracker'] or 'absent'}"
    for entry in found["iterations"]:
        state = "complete" if entry["complete"] else f"NOT COMPLETE: {entry['damage']}"
        yield f"  {entry['folder']}  {_size(entry['bytes'])}  {state}"


def _inspect_pipeline(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['path']}: a pipeline ({found['class']}) of {', '.join(found['components'])}"


def _inspect_weights(found: dict[str, Any]) -> Iterator[str]:
    from mm_checkpoint._tools.inspect import key_tree

    yield (
        f"{found['path']}: {found['format']}, {len(found['tensors'])} tensors, {found['parameters']:,} elements, "
        f"{_size(found['bytes'])}"
    )
    yield "element types: " + ", ".join(f"{dtype} {count:,}" for dtype, count in found["dtypes"].items())
    for name, size in found["files"].items():
        yield f"  {name}  {_size(size)}"
    if found["manifest"] is not None:
        values = {k: str(v) for k, v in found["manifest"].items() if isinstance(v, str | int)}
        yield "manifest: " + ", ".join(f"{name} {value}" for name, value in values.items() if "\n" not in value)
    yield from key_tree(found["tensors"])
    for name in found["values"]:
        yield f"{name}  (a value)"


_INSPECTORS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "run": _inspect_run,
    "pipeline": _inspect_pipeline,
    "weights": _inspect_weights,
}


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
