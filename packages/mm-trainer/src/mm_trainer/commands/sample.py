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
from mm_trainer.errors import InputError, nearest

if TYPE_CHECKING:
    from mm_trainer.contracts.sampling import Sampler, SampleRequest
    from mm_trainer.contracts.spec import Options

INDEX = "model_index.json"


def sample(
    source: Path,
    requests: Sequence[SampleRequest],
    *,
    output: Path,
    base: Path | None = None,
    container: str | None = None,
    dtype: str = "bf16",
    options: Sequence[str] = (),
) -> list[Path]:
    """Make one clip per request.

    Args:
        source: a run's folder, one of its iterations, or a pipeline folder.
        requests: what to make.
        output: folder of the clips; each has its number in its name, so none overwrites another.
        base: the pipeline that a run's trained parts are put into; needed for a run.
        container: whose sampler to use; by default that of the run's configuration, or the only one installed.
        dtype: of the large models.
        options: ``key=value`` for the sampler's own options, the value in YAML.

    Raises:
        InputError: the source is neither, a base is missing, an option isn't the sampler's, or a request doesn't fit
            the model.
    """
    kind = sampler_of(source, container)
    settings = parse_options(kind, options)
    with _pipeline_folder(source, base) as folder:
        sampler = kind(folder, dtype=dtype, device=default_device_type(), options=settings)
        output.mkdir(parents=True, exist_ok=True)
        clips = []
        for number, request in enumerate(requests):
            path = output / f"{number:03d}_{_slug(request.prompt)}.mp4"
            write_clip(path, sampler(request), fps=sampler.fps)
            clips.append(path)
    return clips


def sampler_of(source: Path, container: str | None = None) -> type[Sampler[Any]]:
    """The sampler of a source's model.

    Raises:
        InputError: the source doesn't say which model it is, or its container has no sampler.
    """
    name = container or _container_of(source)
    kind = registry.load_container(name).sampler
    if kind is None:
        raise InputError(f"the container {name} has no sampler")
    return kind


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
def _pipeline_folder(source: Path, base: Path | None) -> Iterator[Path]:
    if (source / INDEX).is_file():
        yield source
        return
    if base is None:
        raise InputError(f"{source} has no {INDEX}; if it is a run, name the pipeline that it was trained from: --base")
    with tempfile.TemporaryDirectory(prefix="mm_trainer_sample_") as folder:
        pipeline = Path(folder) / "pipeline"
        export(source, pipeline, base=base, link=True)
        yield pipeline


def _container_of(source: Path) -> str:
    for folder in (source, source.parent):
        config = folder / "config.resolved.yaml"
        if config.is_file():
            return load_config(str(config)).model.model_id
    names = list(registry.installed(registry.CONTAINERS))
    if len(names) != 1:
        raise InputError(f"{source} doesn't say which model it is; name one with --container: {', '.join(names)}")
    return names[0]


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
