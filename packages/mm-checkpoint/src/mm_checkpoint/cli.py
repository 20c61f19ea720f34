"""The command line: ``mm-checkpoint inspect | convert | verify | export``. Imports torch only once work begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mm_checkpoint.errors import BadInputError, CheckpointError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

FromRun = Annotated[Path, typer.Argument(metavar="RUN_OR_ITER", help="A run's folder, or one of its iterations.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="A new or an empty folder.")]


@app.callback()
def root() -> None:
    """Convert, inspect, verify and export model weights."""


@app.command()
def export(
    run: FromRun,
    destination: Destination,
    to: Annotated[str, typer.Option(help="diffusers | hf | safetensors")] = "diffusers",
    dtype: Annotated[str | None, typer.Option(help="Element type for all floating tensors, such as bf16.")] = None,
    base: Annotated[Path | None, typer.Option(help="A pipeline folder to complete the result from.")] = None,
    link: Annotated[bool, typer.Option(help="Link to the base's files instead of copying them.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Tensor data per file.")] = "5GB",
    workers: Annotated[int, typer.Option(min=1, help="Files written at the same time.")] = 1,
) -> None:
    """Write the trained part of a run as model folders."""
    from mm_checkpoint._export import export as run_export

    written = run_export(
        run, destination, to=to, dtype=dtype, base=base, link=link, max_shard_size=max_shard_size, workers=workers
    )
    for path in written:
        typer.echo(path)


def main() -> None:
    """Entry point: 0 done, 2 bad input (one message), 1 a fault of ours."""
    try:
        app()
    except BadInputError as error:
        typer.echo(f"mm-checkpoint: {error}", err=True)
        sys.exit(2)
    except CheckpointError as error:
        typer.echo(f"mm-checkpoint: {error}", err=True)
        sys.exit(1)
