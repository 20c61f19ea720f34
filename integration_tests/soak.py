"""2,000 steps of a tiny model on cached latents, with saves, validations and a profile window: is memory flat?

    python integration_tests/soak.py [--steps 2000] [--output outputs/soak]

Encodes the toy plugin's data set once (`mm-trainer cache`), trains from those latents on two ranks through the command
line, and reads rank 0's resident memory from the run's log. Ends with 1 if memory grew by more than the aim.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from rank_training import read_metrics

SETTLED = 200
"""Steps after which memory should have found its level."""
AIM_MB = 50
CONFIG = """
extends: recipe:toy/squares
data:
  cache: {output}/latents
  val_dataset_param: {{dataset_type: toy_squares, samples: 8}}
  dataloader_param: {{num_workers: 1}}
training:
  train_iters: {steps}
  save: {output}/run
  save_interval: 100
  save_async: true
  val_interval: 100
  ema: {{enable: true}}
tools:
  profile: {{enable: true, start_step: 300, end_step: 302}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("outputs/soak"))
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    config = output / "soak.yaml"
    config.write_text(CONFIG.format(steps=arguments.steps, output=output), encoding="utf-8")
    script = str(Path(sys.executable).parent / "mm-trainer")
    with (output / "log.txt").open("w") as log:
        subprocess.run([script, "cache", str(config)], check=True, stderr=log)
        started = time.monotonic()
        subprocess.run([script, "train", str(config), "--nproc-per-node", "2"], check=True, stderr=log)
        seconds = time.monotonic() - started
    run = output / "run"
    records = read_metrics(run)
    trained = [record for record in records if record["kind"] == "train"]
    validations = len(records) - len(trained)
    memory = {record["step"]: record["memory_gib"] * 2**30 / 1e6 for record in trained}
    settled = [mb for step, mb in memory.items() if step >= SETTLED]
    if not settled:
        parser.error(f"--steps: memory is judged from step {SETTLED} on")
    growth = max(settled) - settled[0]
    step_time = statistics.median(record["step_time_s"] for record in trained)
    print(f"{len(trained)} steps in {seconds:.0f} s (start included), median {1e3 * step_time:.1f} ms a step")
    print(
        f"{arguments.steps // 100} saves ({len(list(run.glob('iter_*')))} kept), {validations} validations, one profile"
    )
    for step in sorted({SETTLED, *range(0, arguments.steps + 1, max(1, arguments.steps // 8))} & set(memory)):
        print(f"  step {step:5}: {memory[step]:8.1f} MB")
    print(f"  from step {SETTLED} on: {growth:+.1f} MB at most, {settled[-1] - settled[0]:+.1f} at the end")
    print(f"  aim: within {AIM_MB} MB: {'met' if growth <= AIM_MB else 'MISSED'}")
    return int(growth > AIM_MB)


if __name__ == "__main__":
    sys.exit(main())
