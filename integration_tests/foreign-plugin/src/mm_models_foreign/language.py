"""GPT-2 of transformers, as somebody would bring it who has it already."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec


class WrappedGPT2(BaseModel):
    """Dropout at its released rate; the head is tied to the embedding; weight files have the names of ``net``."""

    architectures = {
        "gpt2-tiny": {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
    }

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.net = GPT2LMHeadModel(config)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(GPT2Config(**cls.read_architecture(spec)))

    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        """Those of transformers."""
        return GPT2Config().to_dict().keys()

    @classmethod
    def export_config(cls, spec: ModelSpec) -> dict[str, Any]:
        """As transformers writes it, with its type."""
        config: dict[str, Any] = GPT2Config(**cls.read_architecture(spec)).to_dict()
        return config

    def weight_root(self) -> nn.Module:
        return self.net

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                init.normal_(parameter, prefix + name, std=0.02)
            elif name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.ones_(parameter)

    def forward(self, ids: Tensor, **rest: Any) -> Any:
        """(B, L) int64 → transformers' output, whose loss is next-token cross-entropy."""
        return self.net(input_ids=ids, labels=ids, use_cache=False)
