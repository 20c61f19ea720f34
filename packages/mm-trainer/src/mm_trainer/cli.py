"""The command ``mm-trainer``. Nothing heavy is imported before it is needed.

Exit codes: 0 done; 2 the input is at fault, said in one message; 1 a fault of ours, with a traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mm_trainer.errors import ConfigError, InputError

if TYPE_CHECKING:
    from types import TracebackType

    from mm_trainer.config import RankEnvironment

app = typer.Typer(
    name="mm-trainer",
    help="Train generative models made of heterogeneous sub-models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
recipes_app = typer.Typer(help="List the configurations that installed packages ship.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or recipe:NAME.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys to set, such as training.lr=1e-5.")
]


def main() -> None:
    """Entry point: run a command, and turn an error of the input into one message and exit code 2."""
    from mm_trainer.config.environment import RankEnvironment

    rank = RankEnvironment.read()
    try:
        app(standalone_mode=True)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - not all of torch's errors are an Exception; sorted by kind below
        _end(error, rank)


def _end(error: BaseException, rank: RankEnvironment | None) -> None:
    """Report ``error`` once for all ranks and leave with its exit code."""
    from mm_checkpoint.errors import BadInputError
    from mm_trainer.launch import BAD_INPUT, FAULT, record_failure

    error.__traceback__ = _below_typer(error.__traceback__)
    bad_input = isinstance(error, InputError | BadInputError)
    code = BAD_INPUT if bad_input else FAULT
    if rank is not None:
        record_failure(rank, error, code)
        if rank.supervised:  # the launcher prints the first error of all
            sys.exit(code)
    if not bad_input:
        raise error
    if rank is None or rank.rank == 0:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _below_typer(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the two dozen frames of the command-line library."""
    start, frame = trace, trace
    while frame is not None:
        if frame.tb_frame.f_globals["__name__"].startswith("typer"):
            start = frame.tb_next
        frame = frame.tb_next
    return start


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this node; left out, this process is the only one.")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes; run the same command on each.")] = 1,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: one of them, and a free port.")
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Name of the job, the same on all its nodes.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Start all ranks again this often after a failure; resumes with training.load=auto."),
    ] = 0,
    dry_run: Annotated[bool, typer.Option(help="One step, no checkpoint; shows the memory peak.")] = False,
) -> None:
    """Train as CONFIG says. Under torchrun this is one of its ranks."""
    from mm_trainer.config.environment import RankEnvironment

    arguments = overrides or []
    rank = RankEnvironment.read()
    if rank is not None:
        if not rank.supervised:  # our own launcher has checked
            _check_first(config, arguments, world_size=rank.world_size)
        _run_rank(config, arguments, dry_run=dry_run)
        return
    if nproc_per_node is None and nnodes == 1:
        _check_first(config, arguments, world_size=1)
        _run_rank(config, arguments, dry_run=dry_run)
        return
    if nnodes > 1 and rdzv_endpoint is None:
        raise InputError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the place where the nodes meet")
    from mm_trainer.launch import LaunchPlan, launch

    ranks = nproc_per_node or 1
    grace_time_s = _check_first(config, arguments, world_size=ranks * nnodes)
    plan = LaunchPlan(ranks, nnodes, rdzv_endpoint, rdzv_id, max_restarts, grace_time_s)
    command = ["-m", "mm_trainer", "train", config, *arguments, *(["--dry-run"] if dry_run else [])]
    raise typer.Exit(launch(plan, command))


def _check_first(config: str, overrides: list[str], *, world_size: int) -> float:
    """Refuse a configuration that can't start, before any rank does; returns its grace time in seconds."""
    from mm_trainer.check import check
    from mm_trainer.config import load_config

    return check(load_config(config, overrides), world_size, require_files=True).config.training.grace_time_s


def _run_rank(config: str, overrides: list[str], *, dry_run: bool) -> None:
    from mm_trainer.config import load_config, locate

    loaded = load_config(config, overrides)  # before torch, so that a wrong key is answered at once
    from mm_trainer.run import train as run_training

    try:
        code = run_training(loaded, dry_run=dry_run)
    except ConfigError as error:  # raised by a model or an optimizer, which know the key only
        raise locate(loaded, error) from error
    raise typer.Exit(code)


@app.command()
def check(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A YAML file, or recipe:NAME.")] = None,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks to check for; default: the fewest that its sizes fit.")
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="Missing files and variables are errors, as in train.")
    ] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Read every sample, too: what is usable, and a contact sheet of it.")
    ] = False,
    sheet: Annotated[Path, typer.Option(metavar="PNG", help="Where --data puts the contact sheet.")] = Path(
        "contact_sheet.png"
    ),
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configurations instead.")] = False,
) -> None:
    """Check CONFIG as far as possible without weights, data and ranks."""
    if schema:
        from mm_trainer.config import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    if config is None:
        raise InputError("CONFIG is missing: a YAML file, or recipe:NAME (`mm-trainer recipes` lists them)")
    from mm_trainer.config import load_config, resolve
    from mm_trainer.config.resolving import smallest_world_size

    loaded = load_config(config, overrides or [])
    ranks = world_size or smallest_world_size(loaded)
    resolve(loaded, ranks)  # what needs no plugin is answered before anything heavy is imported
    from rich.console import Console

    from mm_trainer.check import check as run_check
    from mm_trainer.check import print_report, scan_data

    checked = run_check(loaded, ranks, require_files=files or data)
    print_report(checked, Console())
    if data:
        scan_data(checked, sheet.absolute(), Console())


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List the configurations that installed packages ship."""
    if context.invoked_subcommand is not None:
        return
    from mm_trainer import registry

    for name, providers in registry.recipes().items():
        print(f"recipe:{name}  ({', '.join(provider.distribution for provider in providers)})")


@recipes_app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Print one recipe."""
    from mm_trainer import registry

    print(registry.read_recipe(name.removeprefix("recipe:")), end="")


@app.command()
def models() -> None:
    """List what is installed: models, containers, pipelines, data sets."""
    from mm_trainer import registry

    for group in registry.GROUPS:
        if group == registry.RECIPES:
            continue
        print(group)
        for name, providers in registry.installed(group).items():
            print(f"  {name:24} {', '.join(map(str, providers))}")


@app.command()
def env() -> None:
    """Show versions, devices, plugins and variables; every run stores the same with itself."""
    import yaml

    from mm_trainer.environment_report import environment_report

    print(yaml.safe_dump(environment_report(), sort_keys=False), end="")
