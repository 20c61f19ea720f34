"""Clips from weights on disk, by diffusers' own pipelines, with the settings that Wan2.2 is sampled with.

A folder's scheduler states a shift for its smallest resolution (or one that its class ignores), and the pipelines'
defaults are 50 steps at guidance 5, so both are set here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_trainer.contracts import DTYPES, Options, Sampler, SampleRequest
from mm_trainer.errors import InputError


@dataclass(frozen=True)
class SamplingSettings:
    """What a released model is sampled with.

    ``guidance`` is the high-noise expert's, or the only model's; ``guidance_low`` the low-noise expert's.
    """

    shift: float
    steps: int
    guidance: float
    guidance_low: float | None
    fps: int


RELEASED_SETTINGS = {
    "T2V-A14B": SamplingSettings(shift=12.0, steps=40, guidance=4.0, guidance_low=3.0, fps=16),
    "I2V-A14B": SamplingSettings(shift=5.0, steps=40, guidance=3.5, guidance_low=3.5, fps=16),
    "TI2V-5B": SamplingSettings(shift=5.0, steps=50, guidance=5.0, guidance_low=None, fps=24),
}


class WanSamplerOptions(Options):
    """What `mm-trainer sample --option` may set beyond what every model knows."""

    guidance_low: float | None = None
    """Guidance of the low-noise expert, where there are two; default: the released model's."""


class WanSampler(Sampler[WanSamplerOptions]):
    """Samples a diffusers pipeline folder, with some transformers taken from elsewhere.

    Args:
        folder: the pipeline folder (``model_index.json``).
        transformer: instead of the folder's: a diffusers folder, such as an exported one.
        transformer_2: likewise, the low-noise expert.
        dtype: of transformers and text encoder; the VAE is float32.
        device: where to compute.
        options: see `WanSamplerOptions`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        transformer: str | Path | None = None,
        transformer_2: str | Path | None = None,
        dtype: str = "bf16",
        device: str | torch.device = "cpu",
        options: WanSamplerOptions = WanSamplerOptions(),  # noqa: B008 - frozen
    ) -> None:
        from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

        self.folder, self.device, self.options = Path(folder), torch.device(device), options
        if not (self.folder / "model_index.json").is_file():
            raise InputError(f"{self.folder}: no model_index.json, so this is no pipeline folder")
        parts: dict[str, Any] = {"vae": AutoencoderKLWan.from_pretrained(self.folder / "vae", dtype=torch.float32)}
        for name, place in (("transformer", transformer), ("transformer_2", transformer_2)):
            if place is not None:
                parts[name] = WanTransformer3DModel.from_pretrained(place, dtype=DTYPES[dtype])
        # The class in model_index.json may be the image-to-video one; both read the same components.
        self._text = WanPipeline.from_pretrained(self.folder, dtype=DTYPES[dtype], **parts).to(self.device)
        self._text.set_progress_bar_config(disable=True)
        self.settings = RELEASED_SETTINGS[self.kind]
        self._text.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=self.settings.shift
        )

    @property
    def fps(self) -> int:
        """Frames per second of the released model."""
        return self.settings.fps

    @property
    def kind(self) -> str:
        """The released model whose settings fit these weights."""
        if self._text.config.expand_timesteps:
            return "TI2V-5B"
        model = self._text.transformer or self._text.transformer_2
        return "T2V-A14B" if model.config.in_channels == model.config.out_channels else "I2V-A14B"

    def __call__(self, request: SampleRequest) -> Tensor:
        """Make one clip.

        Returns:
            (3, frames, height, width) float32 in [0, 1], on the CPU.

        Raises:
            InputError: an image is missing, or given to a model that takes none; a size that the model can't make.
        """
        self._check_images(request)
        self._check_sizes(request)
        settings = self.settings
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "height": request.height,
            "width": request.width,
            "num_frames": request.frames,
            "num_inference_steps": request.steps or settings.steps,
            "guidance_scale": settings.guidance if request.guidance is None else request.guidance,
            "generator": torch.Generator().manual_seed(request.seed),
            "max_sequence_length": 512,
            "output_type": "pt",
        }
        if self._text.config.boundary_ratio is not None:
            low = self.options.guidance_low
            arguments["guidance_scale_2"] = settings.guidance_low if low is None else low
        pipeline = self._text
        if request.image is not None:
            pipeline = self._image_pipeline()
            arguments["image"] = _read_image(request.image, request)
            if request.last_image is not None:
                arguments["last_image"] = _read_image(request.last_image, request)
        frames: Tensor = pipeline(**arguments).frames[0]
        return frames.float().cpu().transpose(0, 1)

    def _check_images(self, request: SampleRequest) -> None:
        if self.kind == "I2V-A14B" and request.image is None:
            raise InputError(f"{self.folder} is an image-to-video model: a request needs an image")
        if self.kind == "T2V-A14B" and request.image is not None:
            raise InputError(f"{self.folder} is a text-to-video model: a request can't have an image")
        if request.last_image is not None and self.kind != "I2V-A14B":
            raise InputError(f"{self.folder}: only image-to-video models take a last frame")

    def _check_sizes(self, request: SampleRequest) -> None:
        model = self._text.transformer or self._text.transformer_2
        unit = self._text.vae_scale_factor_spatial * model.config.patch_size[1]
        stride = self._text.vae_scale_factor_temporal
        for name, side in (("height", request.height), ("width", request.width)):
            if side % unit:
                raise InputError(
                    f"{name} {side}: {self.folder} makes multiples of {unit}, such as {-(-side // unit) * unit}"
                )
        if (request.frames - 1) % stride:
            near = (request.frames - 1) // stride * stride + 1
            raise InputError(f"frames {request.frames}: {self.folder} makes {stride}·k + 1, such as {near}")

    def _image_pipeline(self) -> Any:
        from diffusers import WanImageToVideoPipeline

        text = self._text
        pipeline = WanImageToVideoPipeline(
            **text.components, boundary_ratio=text.config.boundary_ratio, expand_timesteps=text.config.expand_timesteps
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def _read_image(path: Path, request: SampleRequest) -> Any:
    """The picture, scaled to cover the clip's size and cropped to its middle, as training crops clips."""
    from PIL import Image, ImageOps

    if not path.is_file():
        raise InputError(f"{path}: no such image")
    with Image.open(path) as image:
        return ImageOps.fit(image.convert("RGB"), (request.width, request.height), Image.Resampling.LANCZOS)
