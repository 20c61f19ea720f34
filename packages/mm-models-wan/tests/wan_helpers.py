"""What several test modules need: specs, and pairs of our model and diffusers' with equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_checkpoint import resolve_source
from mm_checkpoint.config import WeightSourceConfig
from mm_models_wan.container import Wan22Container
from mm_models_wan.modules.predictor import PredictorOptions, WanPredictor
from mm_models_wan.modules.text_encoder import PromptTokenizer, TextEncoderOptions, UMT5TextEncoder
from mm_models_wan.modules.vae import VAEOptions, WanVideoVAE
from mm_models_wan.options import Wan22Options
from mm_models_wan.pipeline import WanPipeline
from mm_models_wan.tiny import TRANSFORMER, random_clips
from mm_models_wan.weights.architecture import WanArchitecture
from mm_models_wan.weights.key_map import WAN2_2
from mm_trainer.contracts import ModelSpec, Options

SEED = 11

OPTIONS: dict[str, type[Options]] = {
    "wan2_2_predictor": PredictorOptions,
    "wan_video_vae": VAEOptions,
    "UMT5": TextEncoderOptions,
}


def make_spec(name: str, model_id: str, folder: Path | None = None, **fields: Any) -> ModelSpec:
    """A spec with the options class of its model; ``fields`` may hold an ``options`` dict."""
    options = OPTIONS[model_id](**fields.pop("options", {}))
    source = WeightSourceConfig(from_pretrained=None if folder is None else str(folder))
    return ModelSpec(
        name=name, model_id=model_id, source=source, weights=resolve_source(source), options=options, **fields
    )


def scramble(model: nn.Module, seed: int) -> None:
    """Move the vectors off their defaults, so that every norm, bias and modulation matters in a comparison."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.2 * torch.randn(param.shape, generator=generator))


def model_pair(seed: int = 0, **changes: Any) -> tuple[Any, WanPredictor]:
    """(diffusers' model, ours) with equal weights, of the tiny shapes with ``changes``."""
    from diffusers import WanTransformer3DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = WanTransformer3DModel(**{**TRANSFORMER, **changes})
    scramble(reference, seed)
    ours = WanPredictor(WanArchitecture.parse(dict(reference.config)))
    state = reference.state_dict()
    names = WAN2_2.rename_all(state, to="native")
    ours.load_state_dict({names[key]: value for key, value in state.items()})
    return reference, ours


def model_inputs(
    batch: int,
    *,
    grid: tuple[int, int, int],
    channels: int = 16,
    per_token: bool = False,
    full_text: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Latents of ``grid`` tokens, timesteps, and text features that are zero past each row's own length.

    ``full_text``: no zeros, for comparing gradients. With hundreds of equal keys those of cross-attention are small
    differences of large sums, and any two ways to compute them in fp32 are 1e-3 apart (and from fp64).
    """
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    latents = torch.randn(batch, channels, frames, 2 * height, 2 * width, generator=generator)
    shape = (batch, frames * height * width) if per_token else (batch,)
    timestep = 1000 * torch.rand(shape, generator=generator)
    text = torch.randn(batch, 512, TRANSFORMER["text_dim"], generator=generator)
    if not full_text:
        for row, length in enumerate(range(7, 7 + 5 * batch, 5)):
            text[row, length:] = 0
    return latents, timestep, text


def build_container(
    folder: Path, options: Wan22Options, *, task: str = "t2v", predictor: str = "transformer_2"
) -> Wan22Container:
    """The components of a pipeline folder, real and loaded, with the pipeline of ``task``."""
    components = {
        "ae": WanVideoVAE.from_pretrained(make_spec("ae", "wan_video_vae", folder / "vae")),
        "text_encoder": UMT5TextEncoder.from_pretrained(make_spec("text_encoder", "UMT5", folder / "text_encoder")),
        "predictor": WanPredictor.from_pretrained(make_spec("predictor", "wan2_2_predictor", folder / predictor)),
    }
    if options.expert == "both":
        spec = make_spec("predictor_2", "wan2_2_predictor", folder / "transformer_2")
        components["predictor_2"] = WanPredictor.from_pretrained(spec)
    pipeline = WanPipeline.build(options=options, components=components, task=task, seed=SEED)
    return Wan22Container(components, pipeline)


def make_batch(folder: Path, size: int = 2, *, frames: int = 5) -> dict[str, Any]:
    """A batch as the loader hands it to the container."""
    video = random_clips(size, frames=frames, height=32, width=64, generator=torch.Generator().manual_seed(2))
    tokens = PromptTokenizer(str(folder / "tokenizer"))(["a cat", "two dogs & a bird", ""][:size])
    return {"video": video, "caption": ["a cat"] * size, "sample_key": torch.arange(40, 40 + size), **tokens}
