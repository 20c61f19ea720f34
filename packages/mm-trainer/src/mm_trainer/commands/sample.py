"""``mm-trainer sample``: clips from a run's checkpoint, or from a pipeline folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mm_checkpoint import export
from mm_parallel import default_device_type
from mm_trainer import registry
from mm_trainer.config import load_config
from mm_trainer.errors import InputError

if TYPE_CHECKING:
    from mm_trainer.contracts.sampling import SampleRequest

INDEX = "model_index.json"


def sample(
    source: Path,
    requests: Sequence[SampleRequest],
    *,
    output: Path,
    base: Path | None = None,
    container: str | None = None,
    dtype: str = "bf16",
) -> list[Path]:
    """Make one clip per request.

    Args:
        source: a run's folder, one of its iterations, or a pipeline folder.
        requests: what to make.
        output: folder of the clips; each has its number in its name, so none overwrites another.
        base: the pipeline that a run's trained parts are put into; needed for a run.
        container: whose sampler to use; by default that of the run's configuration, or the only one installed.
        dtype: of the large models.

    Raises:
        InputError: the source is neither, a base is missing, or a request doesn't fit the model.
    """
    model = registry.load_container(container or _container_of(source))
    with _pipeline_folder(source, base) as folder:
        sampler = model.open_sampler(folder, dtype=dtype, device=default_device_type())
        output.mkdir(parents=True, exist_ok=True)
        clips = []
        for number, request in enumerate(requests):
            path = output / f"{number:03d}_{_slug(request.prompt)}.mp4"
            write_clip(path, sampler(request), fps=sampler.fps)
            clips.append(path)
    return clips


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
