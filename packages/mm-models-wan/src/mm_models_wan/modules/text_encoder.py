"""`UMT5TextEncoder`: the frozen multilingual T5 encoder, and the tokenise step that feeds it."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from mm_checkpoint import LoadReport, WeightSource, load_weights
from mm_models_wan.weights.architecture import TEXT_LENGTH, TINY_TEXT_DIM
from mm_models_wan.weights.original import UMT5_ARCHITECTURES, UMT5_ORIGINAL, original_architecture
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec, Options, Tokenizer
from mm_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_TIED = "encoder.embed_tokens.weight"


class TextEncoderOptions(Options):
    """Keys of ``model.models.text_encoder`` that only this model knows."""

    text_length: int = Field(default=TEXT_LENGTH, gt=0)
    """Positions that prompts are padded or cut to. Released Wan models were trained with 512."""


class UMT5TextEncoder(BaseModel[TextEncoderOptions]):
    """Wraps ``transformers.UMT5EncoderModel``; features are zero past each prompt's own end.

    Args:
        config: the encoder's ``config.json``.
        text_length: see `TextEncoderOptions`.
        attn_implementation: of transformers (``sdpa``, ``eager``); None leaves the choice to it.
    """

    architectures: ClassVar[Any] = UMT5_ARCHITECTURES

    def __init__(
        self, config: dict[str, Any], *, text_length: int = TEXT_LENGTH, attn_implementation: str | None = None
    ) -> None:
        super().__init__()
        from transformers import UMT5Config, UMT5EncoderModel

        settings = UMT5Config.from_dict(config)
        settings._attn_implementation = attn_implementation
        self.text_length = text_length
        self.model = UMT5EncoderModel(settings).eval()
        self.tie()

    @classmethod
    def read_architecture(cls, spec: ModelSpec) -> dict[str, Any]:
        named = original_architecture(spec)
        return super().read_architecture(spec) if named is None else dict(cls.architectures[named])

    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        from transformers import UMT5Config

        # The last two stand in files of some versions of transformers only.
        return {*UMT5Config().to_dict(), "torch_dtype", "attn_implementation"}

    @classmethod
    def tiny_architecture(cls, architecture: Mapping[str, Any]) -> dict[str, Any]:
        """Two narrow layers over the same vocabulary."""
        narrow = {"num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "d_model": TINY_TEXT_DIM}
        return {**architecture, **narrow}

    @classmethod
    def from_config(cls, spec: ModelSpec[TextEncoderOptions]) -> Self:
        config = cls.read_architecture(spec)
        key = f"model.models.{spec.name}"
        if config.get("model_type", "umt5") != "umt5":
            raise ConfigError(
                f"the weights are a {config['model_type']} model, {cls.__name__} needs a umt5",
                key=f"{key}.from_pretrained",
            )
        if spec.attn_implementation not in (None, "sdpa", "eager"):
            raise ConfigError(
                f"attn_implementation of a UMT5 is sdpa or eager, got {spec.attn_implementation!r}",
                key=f"{key}.attn_implementation",
            )
        return cls(config, text_length=spec.options.text_length, attn_implementation=spec.attn_implementation)

    def weight_root(self) -> nn.Module:
        return self.model

    def tie(self) -> None:
        """Make the encoder's token table the shared one, if materialising or assigning has separated them."""
        if self.model.encoder.embed_tokens.weight is not self.model.shared.weight:
            self.model.encoder.embed_tokens.weight = self.model.shared.weight

    def setup_weights(self, source: WeightSource, *, allow_missing: Sequence[str] = ()) -> LoadReport:
        """Reads transformers' names and those of the original release; either may hold the token table only once."""
        self.tie()  # before loading: FSDP2 and materialisation may have separated the two names
        missing = (*allow_missing, _TIED)
        report = load_weights(self.model, source, key_map=UMT5_ORIGINAL, allow_missing=missing)
        self.post_load()
        return report

    def post_load(self) -> None:
        self.tie()

    @torch.no_grad()
    def forward(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """Encode prompts.

        Args:
            prompt_ids, prompt_mask: (B, text_length) int64, padded on the right.

        Returns:
            (B, text_length, D) in the parameters' dtype, exactly zero where the mask is 0.
        """
        if prompt_ids.shape[1] != self.text_length:
            raise ValueError(
                f"prompts come with {prompt_ids.shape[1]} positions, the encoder is set to {self.text_length}"
            )
        hidden: Tensor = self.model(input_ids=prompt_ids, attention_mask=prompt_mask).last_hidden_state
        # The transformer attends to padding too, and was trained with zeros there.
        return hidden.masked_fill(prompt_mask.unsqueeze(-1) == 0, 0)

    def input_spec(self) -> InputSpec:
        return InputSpec(text_length=self.text_length)

    @classmethod
    def build_tokenizer(cls, path: str, spec: ModelSpec[TextEncoderOptions]) -> Tokenizer:
        return PromptTokenizer(path, spec.options.text_length)


def clean_prompt(text: str) -> str:
    """Prepare a prompt as the reference pipelines do: repair mojibake, unescape HTML twice, collapse white space."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class PromptTokenizer:
    """Prompts → padded ids and mask; picklable, the tokenizer itself is opened where it is first used.

    Args:
        path: folder of the tokenizer.
        text_length: positions to pad or cut to.
    """

    def __init__(self, path: str, text_length: int = TEXT_LENGTH) -> None:
        self.path, self.text_length = path, text_length
        self.truncated = 0
        """Prompts cut so far, in this process."""
        self._tokenizer: Any = None

    def __call__(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """``{"prompt_ids": (B, text_length) int64, "prompt_mask": (B, text_length) int64}``."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.path)
        cleaned = [clean_prompt(prompt) for prompt in prompts]
        whole = self._tokenizer(cleaned, add_special_tokens=True)["input_ids"]
        self._count_truncated(sum(len(row) > self.text_length for row in whole))
        encoded = self._tokenizer(
            cleaned,
            padding="max_length",
            max_length=self.text_length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {"prompt_ids": encoded["input_ids"], "prompt_mask": encoded["attention_mask"]}

    def _count_truncated(self, count: int) -> None:
        """Warn about the first cut prompt, then each time their number gains a digit."""
        if not count:
            return
        before, self.truncated = self.truncated, self.truncated + count
        if len(str(before)) < len(str(self.truncated)) or not before:
            logger.warning("%d prompts so far are longer than %d tokens and were cut", self.truncated, self.text_length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}
