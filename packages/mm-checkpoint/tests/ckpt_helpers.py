"""What several test files build: a small sharded model, its source files, and the state of a training run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mm_checkpoint import KeyMap

KEY_MAP = KeyMap(
    "ckpt_toy",
    exact={"norm_out.weight": "norm.weight", "scale": "scale"},
    rules=[("layers.{n}.proj_{s}.{p}", "blocks.{n}.{s}.{p}"), ("embed.{p}", "token.{p}"), ("out.{p}", "head.{p}")],
)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Toy(nn.Module):
    """Uneven sizes on purpose: 5 and 13 divide by no number of ranks."""

    def __init__(self, dim: int = 10, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(13, dim, padding_idx=0)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 13, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def make_toy(seed: int = 0, **options: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**options)


def shard(model: Toy, mesh: Any) -> Toy:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_mesh(world_size: int, replicate: int = 1) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if replicate == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))


def full(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    tokens = torch.arange(13).reshape(1, 13)
    for _ in range(steps):
        model(tokens).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor."""
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def fill_optimizer(optimizer: torch.optim.Optimizer, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """AdamW's state without a step (whose first one on DTensors takes seconds)."""
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {}
            for field in ("exp_avg", "exp_avg_sq"):
                value = make(local(p))
                if isinstance(p, DTensor):
                    value = DTensor.from_local(
                        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                    )
                moments[field] = value
            optimizer.state[p] = {"step": torch.tensor(2.0), **moments}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **values: Any) -> dict[str, Any]:
    """A run's state as a trainer hands it in."""
    state: dict[str, Any] = {"model": {f"net.{name}": tensor for name, tensor in model.state_dict().items()}}
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state["optimizer"] = {
            f"{names[id(parameter)]}.{field}": tensor
            for parameter, entry in optimizer.state.items()
            for field, tensor in entry.items()
        }
    if values:
        state["train"] = values
    return state


def write_source(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, config: Any = None) -> Path:
    """A diffusers folder, written with the safetensors package."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"_class_name": "Toy"}))
    stem, names = "diffusion_pytorch_model", list(tensors)
    if shards == 1:
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_source(model: Toy) -> dict[str, torch.Tensor]:
    """The toy's tensors under the source's names."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    return {KEY_MAP.to_source(name): tensor for name, tensor in tensors.items()}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, through the safetensors package."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, element types and bits."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name
