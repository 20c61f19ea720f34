"""A parameter or buffer that nothing fills ends the start by its name; it never trains on what memory held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_training import read_checkpoint, train_rank
from safetensors.torch import save_file
from test_trainer_single_model import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("single_forgetful", "head.bias"),
        ("single_half_filled", "table.weight"),
        ("single_lost_buffer", "scale"),
        ("single_lost_table", "table_norm"),
    ],
)
def test_what_init_weights_forgets_is_named(run_ranks, config: str, ranks: int, model: str, names: str) -> None:
    with pytest.raises(AssertionError, match=rf"1 tensor\(s\) of the model were never filled, .*: {names}\n") as info:
        run_ranks(train_rank, ranks, {}, [f"model.model_id={model}"], config)
    assert str(info.value).count("never filled") >= ranks, "every rank says it"


def write_weights(folder: Path, *, without: str) -> dict[str, torch.Tensor]:
    from trainer_plugin_models import Regressor

    torch.manual_seed(2)
    tensors = {n: torch.randn(p.shape) for n, p in Regressor().named_parameters() if not n.startswith(without)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return tensors


@pytest.mark.parametrize("model", ["single_regressor", "single_table"])
def test_what_weights_may_lack_is_initialised_and_the_rest_is_theirs(
    run_ranks, config: str, tmp_path: Path, model: str
) -> None:
    """A table that `post_load` writes again is none of `init_weights`'s doing."""
    tensors = write_weights(tmp_path / "weights", without="head.")
    still = [f"model.model_id={model}", "training.train_iters=1", "training.lr=0", "training.weight_decay=0"]
    source = [f"model.from_pretrained={tmp_path / 'weights'}", "model.allow_missing=[head.weight, head.bias]"]
    run_ranks(train_rank, 2, {}, [*still, *source], config)
    run_ranks(train_rank, 1, {}, [*still, f"training.save={tmp_path / 'random'}"], config)
    found, random = (read_checkpoint(tmp_path / name / "iter_0000001") for name in ("run", "random"))
    for name in ("head.weight", "head.bias"):
        assert torch.equal(found[f"model.{name}"], random[f"model.{name}"]), "as from scratch"
    for name, tensor in tensors.items():
        assert torch.equal(found[f"model.{name}"], tensor)


def test_an_initialisation_that_would_write_over_loaded_weights_is_refused(
    run_ranks, config: str, tmp_path: Path
) -> None:
    write_weights(tmp_path / "weights", without="head.")
    source = [f"model.from_pretrained={tmp_path / 'weights'}", "model.allow_missing=[head.weight, head.bias]"]
    with pytest.raises(AssertionError, match=r"init_weights writes table.weight by other means than its initializer"):
        run_ranks(train_rank, 2, {}, [*source, "model.model_id=single_own_init"], config)
