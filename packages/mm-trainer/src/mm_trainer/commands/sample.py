"""``mm-trainer sample``: clips from a run's checkpoint, or from a pipeline folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError
from torch import Tensor

from mm_checkpoint import export
from mm_parallel import default_device_type
from mm_trainer import registry
from mm_trainer.config import load_config
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.model import BaseModel
from mm_trainer.errors import InputError, nearest

if TYPE_CHECKING:
    from mm_trainer.contracts.sampling import Sampler, SampleRequest
    from mm_trainer.contracts.spec import Options

INDEX = "model_index.json"
Owner = BaseModel | ModelContainer


def sample(
    source: Path,
    requests: Sequence[SampleRequest],
    *,
    output: Path,
    base: Path | None = None,
    model: str | None = None,
    dtype: str = "bf16",
    options: Sequence[str] = (),
) -> list[Path]:
    """Make one clip per request.

    Args:
        source: a run's folder, one of its iterations, or a pipeline folder; of a model without a container also that
            model's folder.
        requests: what to make.
        output: folder of the clips; each has its number in its name, so none overwrites another.
        base: the pipeline that a run's trained parts are put into; needed for a run of a container.
        model: the container, or the model without one, whose sampler to use; by default that of the run's
            configuration, or the only container installed.
        dtype: of the large models.
        options: ``key=value`` for the sampler's own options, the value in YAML.

    Raises:
        InputError: the source is neither, a base is missing, an option isn't the sampler's, or a request doesn't fit
            the model.
    """
    owner = _owner(source, model)
    kind = _sampler(owner, source, model)
    settings = parse_options(kind, options)
    with _pipeline_folder(source, base, alone=issubclass(owner, BaseModel)) as folder:
        sampler = kind(folder, dtype=dtype, device=default_device_type(), options=settings)
        output.mkdir(parents=True, exist_ok=True)
        clips = []
        for number, request in enumerate(requests):
            path = output / f"{number:03d}_{_slug(request.prompt)}.mp4"
            write_clip(path, sampler(request), fps=sampler.fps)
            clips.append(path)
    return clips


def sampler_of(source: Path, model: str | None = None) -> type[Sampler[Any]]:
    """The sampler of a source's model.

    Raises:
        InputError: the source doesn't say which model it is, or that one has no sampler.
    """
    return _sampler(_owner(source, model), source, model)


def describe_options(kind: type[Sampler[Any]]) -> list[str]:
    """A line for each option that only this sampler has."""
    fields = kind.Options.model_fields
    lines = [f"--option {name}=VALUE  {field.description or ''}".rstrip() for name, field in fields.items()]
    return lines or ["this model has no options of its own"]


def parse_options(kind: type[Sampler[Any]], pairs: Sequence[str]) -> Options:
    """``key=value`` pairs as the sampler's options.

    Raises:
        InputError: a pair without ``=``, an unknown key (with the nearest), a value of another type.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"--option {pair}: expected KEY=VALUE")
        if key not in kind.Options.model_fields:
            close = nearest(key, kind.Options.model_fields)
            known = ", ".join(kind.Options.model_fields) or "none"
            hint = f"; did you mean {close}?" if close else ""
            raise InputError(f"--option {key}: this model has no such option{hint} (it has: {known})")
        values[key] = yaml.safe_load(text)
    try:
        return kind.Options.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"--option {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@contextmanager
def _pipeline_folder(source: Path, base: Path | None, *, alone: bool) -> Iterator[Path]:
    """The folder to sample from; ``alone``: the model needs no pipeline around it."""
    if (source / INDEX).is_file() or (alone and (source / "config.json").is_file()):
        yield source
        return
    if base is None and not alone:
        raise InputError(f"{source} has no {INDEX}; if it is a run, name the pipeline that it was trained from: --base")
    with tempfile.TemporaryDirectory(prefix="mm_trainer_sample_") as folder:
        pipeline = Path(folder) / "pipeline"
        exported = export(source, pipeline, base=base, link=True)
        yield pipeline if base is not None else exported[0]


def _sampler(owner: type[Owner], source: Path, name: str | None) -> type[Sampler[Any]]:
    if owner.sampler is None:
        what = "model" if issubclass(owner, BaseModel) else "container"
        raise InputError(f"{source}: the {what} {name or owner.__name__} has no sampler")
    return owner.sampler


def _owner(source: Path, name: str | None) -> type[Owner]:
    """The class that names the sampler: of the name given, of a run's configuration, or the only container."""
    for folder in (source, source.parent):
        config = folder / "config.resolved.yaml"
        if config.is_file():
            loaded = load_config(str(config))
            for module in loaded.training.plugin:
                registry.import_plugin(module)
            if name is None:
                load = registry.load_model if loaded.model.models is None else registry.load_container
                return load(loaded.model.model_id)
            break
    containers = registry.installed(registry.CONTAINERS)
    if name is None:
        if len(containers) != 1:
            raise InputError(f"{source} doesn't say which model it is; name one with --model: {', '.join(containers)}")
        (name,) = containers
    single = name not in containers and name in registry.installed(registry.MODELS)
    return registry.load_model(name) if single else registry.load_container(name)


def write_clip(path: Path, clip: Tensor, *, fps: int) -> None:
    """Write (3, F, H, W) in [0, 1] as an H.264 mp4; odd sides lose a row or column, which the format can't hold."""
    import av

    pixels = (clip.clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).contiguous().numpy()
    height, width = (side // 2 * 2 for side in pixels.shape[1:3])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "16"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in pixels[:, :height, :width]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _slug(text: str) -> str:
    """The beginning of a prompt as part of a file name."""
    return re.sub(r"[^\w-]+", "_", text).strip("_")[:40] or "clip"
