"""Both experts in one run: who is trained when, what is saved, and that a resume goes on with the same draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_training import PRELOAD, train_rank
from test_integration_training import read_tensors, settings
from workspace import Workspace

CONFIG = """
extends: recipe:wan2_2/tiny_t2v
model:
  expert: both
  models:
    predictor: {{from_pretrained: "{pipeline}/transformer"}}
    predictor_2: {{model_id: wan2_2_predictor, from_pretrained: "{pipeline}/transformer_2"}}
parallel:
  fsdp_plan:
    apply_modules: ["text_encoder", "predictor.blocks.{{*}}", "predictor_2.blocks.{{*}}"]
features:
  recompute_plan: {{apply_modules: ["predictor.blocks.{{*}}", "predictor_2.blocks.{{*}}"]}}
"""


@pytest.fixture(scope="module")
def config(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("both") / "both.yaml"
    path.write_text(CONFIG.format(pipeline=workspace.pipeline), encoding="utf-8")
    return str(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # read_tensors means to
def test_one_expert_per_step_resume_and_export(run_ranks, workspace: Workspace, config: str, tmp_path: Path) -> None:
    whole = settings(tmp_path / "whole", steps=12, micro=1, **{"training.save_interval": 6})
    records = run_ranks(train_rank, 2, workspace.environ, whole, config, preload=PRELOAD)[0]
    experts = ["predictor_2" if "loss_predictor_2" in record else "predictor" for record in records]
    assert set(experts) == {"predictor", "predictor_2"}
    assert all(("loss_predictor" in r) != ("loss_predictor_2" in r) for r in records), "one expert a step"
    for record, expert in zip(records, experts, strict=True):
        sigmas = [float(key.rsplit("_", 1)[1]) for key in record if key.startswith("loss_sigma")]
        assert max(sigmas) <= 0.8 and (expert == "predictor_2" or min(sigmas) == 0.8), "σ ≥ 0.875 lies in [0.8, 1)"

    load = {"training.load": tmp_path / "whole" / "iter_0000006"}
    rest = settings(tmp_path / "rest", steps=12, micro=1, **load)
    resumed = run_ranks(train_rank, 2, workspace.environ, rest, config, preload=PRELOAD)[0]
    assert [r["loss"] for r in resumed] == [r["loss"] for r in records[6:]]
    one, two = (read_tensors(tmp_path / name / "iter_0000012") for name in ("whole", "rest"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert np.array_equal(tensor, two[name]), name

    steps = {n: int(v) for n, v in one.items() if n.endswith("patch_embedding.bias.step")}
    assert steps == {
        f"optimizer.{expert}.patch_embedding.bias.step": experts.count(expert)
        for expert in ("predictor", "predictor_2")
    }

    from mm_checkpoint import export

    exported = export(tmp_path / "whole", tmp_path / "exported")
    assert sorted(path.name for path in exported) == ["transformer", "transformer_2"]


@pytest.mark.slow
def test_from_scratch_and_with_an_average_it_exports_what_diffusers_loads(
    run_ranks, workspace: Workspace, tmp_path: Path
) -> None:
    """The shapes come from `architecture` alone; the pipeline's folder is named after the expert."""
    import json

    import torch
    from diffusers import WanTransformer3DModel

    shapes = json.loads((workspace.pipeline / "transformer_2" / "config.json").read_text(encoding="utf-8"))
    inline = {key: value for key, value in shapes.items() if not key.startswith("_")}
    path = tmp_path / "scratch.yaml"
    path.write_text(
        json.dumps(
            {
                "extends": "recipe:wan2_2/tiny_t2v",
                "model": {
                    "boundary": 0.875,
                    "models": {"predictor": {"from_pretrained": None, "architecture": inline}},
                },
                "training": {"ema": {"enable": True, "decay": 0.5}},
            }
        ),
        encoding="utf-8",
    )
    overrides = settings(tmp_path / "run", steps=2, micro=2)
    run_ranks(train_rank, 1, workspace.environ, overrides, str(path), preload=PRELOAD)

    from mm_checkpoint import export

    weights, average = (
        export(tmp_path / "run", tmp_path / f"exported-{ema}", ema=ema, base=workspace.pipeline)
        for ema in (False, True)
    )
    assert [folder.name for folder in weights] == ["transformer_2"]
    state, averaged = (dict(WanTransformer3DModel.from_pretrained(f[0]).state_dict()) for f in (weights, average))
    assert not any(torch.isnan(tensor).any() for tensor in averaged.values())
    assert any(not torch.equal(state[name], averaged[name]) for name in state)
