"""The command ``mm-trainer``. Nothing heavy is imported before it is needed.

Exit codes: 0 done; 2 the input is at fault, said in one message; 1 a fault of ours, with a traceback.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mm_trainer.errors import InputError

if TYPE_CHECKING:
    from mm_trainer.config import TrainerConfig

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


NprocPerNode = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this node; left out, this process is the only one.")
]
Nnodes = Annotated[int, typer.Option(min=1, help="Nodes; run the same command on each.")]
RdzvEndpoint = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: one of them, and a free port.")
]
RdzvId = Annotated[str | None, typer.Option(help="Name of the job, the same on all its nodes.")]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Start all ranks again this often after a failure.")]


def main() -> None:
    """Entry point: run a command, and turn an error of the input into one message and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table isn't worth a failure under a locale that lacks its signs
    try:
        app(standalone_mode=True)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - not all of torch's errors are an Exception; sorted by kind there
        from mm_trainer.commands.job import end_with

        end_with(error)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = 1,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="One step, no checkpoint; shows the memory peak.")] = False,
) -> None:
    """Train as CONFIG says. Under torchrun this is one of its ranks.

    With training.load=auto, ranks that are started again go on from the newest complete checkpoint.
    """
    from mm_trainer.commands.job import Job, run_job
    from mm_trainer.launch.plan import launch_plan

    def check_restarts(loaded: TrainerConfig) -> None:
        if max_restarts and loaded.training.load != "auto":
            raise InputError("--max-restarts: ranks that start again can only go on with training.load=auto")

    job = Job("train", "mm_trainer.commands.train:train", config, overrides or [], {"dry_run": dry_run}, check_restarts)
    raise typer.Exit(run_job(job, launch_plan(nproc_per_node, nnodes, rdzv_endpoint, rdzv_id, max_restarts)))


@app.command()
def cache(
    config: Config,
    overrides: Overrides = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = 1,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = 0,
    variants: Annotated[int, typer.Option(min=1, help="Crops and captions per sample of the training set.")] = 1,
) -> None:
    """Run the frozen encoders, or a single model's prepare_conditions, over the data sets once; their output is kept
    in data.cache."""
    from mm_trainer.commands.job import Job, run_job
    from mm_trainer.launch.plan import launch_plan

    options = {"variants": variants}
    job = Job("cache", "mm_trainer.commands.cache:cache", config, overrides or [], options, _make_cache_folder)
    raise typer.Exit(run_job(job, launch_plan(nproc_per_node, nnodes, rdzv_endpoint, rdzv_id, max_restarts)))


def _make_cache_folder(config: TrainerConfig) -> None:
    """The folder needn't exist before the command that fills it; an undefined variable in it is refused later."""
    from mm_trainer.errors import ConfigError

    if config.data.cache is not None and config.data.cache.is_absolute():
        try:
            config.data.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{config.data.cache}: no folder can be made there: {error}", key="data.cache") from error


@app.command()
def sample(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run, one of its iterations, or a pipeline or model folder.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="What to show; may be given several times.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the clips.")] = Path("samples"),
    base: Annotated[
        Path | None,
        typer.Option(help="For a run: the pipeline folder that it was trained from; a single model may do without."),
    ] = None,
    height: Annotated[int, typer.Option(min=1)] = 480,
    width: Annotated[int, typer.Option(min=1)] = 832,
    frames: Annotated[int, typer.Option(min=1)] = 81,
    negative_prompt: Annotated[str, typer.Option()] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Default: the model's own.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Default: the model's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first clip; the next ones count on.")] = 0,
    image: Annotated[Path | None, typer.Option(help="First frame, for models that take one.")] = None,
    last_image: Annotated[Path | None, typer.Option(help="Last frame, for models that take one.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--container", help="The container, or the single model; a run says it itself."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of this model alone, see --options.")
    ] = None,
    options: Annotated[bool, typer.Option("--options", help="List the options of SOURCE's model instead.")] = False,
) -> None:
    """Make clips from a run's newest checkpoint, or from a folder of weights."""
    from mm_trainer.commands.sample import describe_options, sampler_of
    from mm_trainer.commands.sample import sample as run_sampling
    from mm_trainer.contracts.sampling import SampleRequest
    from mm_trainer.launch.process import set_up_logging

    if options:
        print("\n".join(describe_options(sampler_of(source, model))))
        return
    if not prompt:
        raise InputError("--prompt is missing: what the clip is to show")

    first = SampleRequest(
        prompt="",
        height=height,
        width=width,
        frames=frames,
        negative_prompt=negative_prompt,
        steps=steps,
        guidance=guidance,
        image=image,
        last_image=last_image,
    )
    set_up_logging(rank=0)
    requests = [replace(first, prompt=text, seed=seed + number) for number, text in enumerate(prompt)]
    for clip in run_sampling(
        source, requests, output=output, base=base, model=model, dtype=dtype, options=option or []
    ):
        print(clip)


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
    forward: Annotated[
        bool, typer.Option("--forward", help="Also run one tiny step on the CPU, on --world-size ranks.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configurations instead.")] = False,
) -> None:
    """Check CONFIG as far as possible without weights, data and ranks."""
    if schema:
        from mm_trainer.config import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    if config is None:
        raise InputError("CONFIG is missing: a YAML file, or recipe:NAME (`mm-trainer recipes` lists them)")
    if forward:
        from mm_trainer.commands.check import check_step

        if code := check_step(config, overrides or [], world_size):
            raise typer.Exit(code)
        if not data:
            return
    from mm_trainer.commands.prepare import prepare
    from mm_trainer.config import load_config
    from mm_trainer.config.resolving import smallest_world_size

    loaded = load_config(config, overrides or [])
    prepared = prepare(loaded, world_size or smallest_world_size(loaded), require_files=files or data)
    from rich.console import Console

    from mm_trainer.commands.check import print_report, scan_data

    print_report(prepared, Console())
    if data:
        scan_data(prepared, sheet.absolute(), Console())


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

    from mm_trainer.commands.env import environment_report

    print(yaml.safe_dump(environment_report(), sort_keys=False), end="")
