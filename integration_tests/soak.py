"""2,000 steps of a tiny model with saves, validations and a profile window: does memory stay flat?

    python integration_tests/soak.py [--steps 2000] [--output outputs/soak]

Runs the toy plugin's recipe on two ranks through the command line and reads rank 0's resident memory from its log.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from rank_training import read_metrics

SETTLED = 200
"""Steps after which memory should have found its level."""
CONFIG = """
extends: recipe:toy/squares
data:
  val_dataset_param: {{dataset_type: toy_squares, samples: 8}}
  dataloader_param: {{num_workers: 1}}
training:
  train_iters: {steps}
  save: {run}
  save_interval: 100
  save_async: true
  val_interval: 100
  ema: {{enable: true}}
tools:
  profile: {{enable: true, start_step: 300, end_step: 302}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("outputs/soak"))
    arguments = parser.parse_args()
    run = arguments.output.absolute() / "run"
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.mkdir(parents=True)
    config = arguments.output / "soak.yaml"
    config.write_text(CONFIG.format(steps=arguments.steps, run=run), encoding="utf-8")
    started = time.monotonic()
    script = str(Path(sys.executable).parent / "mm-trainer")
    with (arguments.output / "log.txt").open("w") as log:
        subprocess.run([script, "train", str(config), "--nproc-per-node", "2"], check=True, stderr=log)
    records = [r for r in read_metrics(run) if r["kind"] == "train"]
    memory = {record["step"]: record["memory_gib"] * 1024 for record in records}
    settled = {step: mib for step, mib in memory.items() if step >= SETTLED}
    print(
        f"{len(records)} steps in {time.monotonic() - started:.0f} s, {len(list(run.glob('iter_*')))} checkpoints kept"
    )
    for step in sorted({SETTLED, *range(0, arguments.steps + 1, max(1, arguments.steps // 8))} & set(memory)):
        print(f"  step {step:5}: {memory[step]:8.1f} MiB")
    print(f"  from step {SETTLED} on: {max(settled.values()) - settled[SETTLED]:+.1f} MiB at most (aim: under 50)")


if __name__ == "__main__":
    main()
