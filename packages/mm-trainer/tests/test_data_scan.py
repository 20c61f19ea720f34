"""Looking through a data set before a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from data_clips import WordTokenizer, context, write_clip
from data_fakes import NumberDataset
from PIL import Image
from rich.console import Console

from mm_trainer.data.loader import BatchLoader, WorkerOptions
from mm_trainer.data.mixing import MixedDataset
from mm_trainer.data.report import DataReport
from mm_trainer.data.survey.contact_sheet import THUMBNAIL, write_contact_sheet
from mm_trainer.data.survey.scan import BucketCount, ScanResult, scan, scan_tables
from mm_trainer.data.video.dataset import VideoDataset


def test_clips_whose_times_cannot_be_trusted_are_counted(tmp_path: Path) -> None:
    from data_clips import context
    from test_data_containers import write

    from mm_trainer.data.video.dataset import VideoDataset

    for name, codec in (("a.avi", "libx264"), ("b.mp4", "libx264"), ("c.avi", "mpeg4")):
        write(tmp_path / name, codec, {})
    rows = ["video,prompt", *(f"{name},bars" for name in ("a.avi", "b.mp4", "c.avi"))]
    (tmp_path / "metadata.csv").write_text("\n".join(rows), encoding="utf-8")
    settings = {"data_path": str(tmp_path / "metadata.csv"), "buckets": [[48, 64]], "num_frames": 9}
    result = scan(VideoDataset(settings, context()), micro_batch_size=1)
    assert result.slow == 2
    words = [cell for column in scan_tables(result)[0].columns for cell in column.cells]
    assert "decoded from the start" in words


def test_a_set_is_reported_and_shown(tmp_path: Path) -> None:
    """B062, B064: usable, skipped and why, buckets, cost of a step, and a picture."""
    lines = ["video,prompt,width,height,num_frames,fps"]
    for number in range(6):
        tall = number % 2
        write_clip(tmp_path / f"{number}.mp4", frames=8, height=64 if tall else 48, width=48 if tall else 64)
        lines.append(f"{number}.mp4,{'word ' * (3 + 2 * number)},,,,")
    write_clip(tmp_path / "short.mp4", frames=3)
    (tmp_path / "zero.mp4").touch()
    lines += ["short.mp4,x,,,,", "zero.mp4,x,,,,", "gone.mp4,x,64,48,40,16"]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    config = {"data_path": tmp_path / "m.csv", "buckets": [[5, 48, 64], [5, 64, 48]]}
    data = VideoDataset(config, context(tokenizer=WordTokenizer(8)))
    seen: list[tuple[int, int]] = []
    result = scan(
        data,
        micro_batch_size=1,
        data_size=2,
        workers=WorkerOptions(num_workers=2),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (7, 7)
    assert (result.report.rows, result.report.usable, result.report.bad) == (9, 6, 2)
    assert [(bucket.bucket, bucket.samples, bucket.tokens) for bucket in result.buckets] == [
        ("5×48×64", 3, 24),
        ("5×64×48", 3, 24),
    ]
    assert result.steps_per_epoch == 3
    assert result.step_tokens == (48, 48, 48)
    assert result.full_texts == 3
    console = Console(record=True, width=200)
    for table in scan_tables(result):
        console.print(table)
    text = console.export_text()
    assert "6 of 9" in text
    assert "too short" in text
    assert "gone.mp4" in text
    assert {glimpse.name for glimpse in result.glimpses} <= {path.name for path in tmp_path.iterdir()}
    write_contact_sheet(result.glimpses, tmp_path / "sheet.png", samples=result.report.rows)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape[0] > 3 * THUMBNAIL
    assert sheet.std() > 10


def test_a_foreign_set_is_scanned_too() -> None:
    result = scan(NumberDataset([0] * 5 + [1] * 3, bad=[1, 2]), micro_batch_size=2)
    assert result.report.bad == 2
    assert {bucket.samples for bucket in result.buckets} == {3}
    nothing = scan(NumberDataset([0] * 3, bad=range(3)), micro_batch_size=2)
    assert nothing.report.usable == 0
    assert nothing.steps_per_epoch == 0


def test_names_are_shown_as_they_are() -> None:
    """Square brackets are no markup."""
    report = DataReport(rows=2)
    report.skip("a[/b]/c [red].mp4", "no [such] file", bad=True)
    console = Console(record=True, width=200)
    for table in scan_tables(ScanResult(report, (BucketCount("[x]", 1, 1),), (1, 1, 1), 1, 0, 0.0, 0, 0, ())):
        console.print(table)
    text = console.export_text()
    assert all(name in text for name in ("a[/b]/c [red].mp4", "no [such] file", "[x]"))


def test_a_bad_sample_that_a_mix_repeats_is_one() -> None:
    mix = MixedDataset([NumberDataset([0] * 3, bad=[1]), NumberDataset([0] * 2)], repeats=[4, 1])
    result = scan(mix, micro_batch_size=2)
    assert (result.report.rows, result.report.usable, result.report.bad) == (5, 4, 1)
    loader = BatchLoader(mix, micro_batch_size=2, max_bad_fraction=1.0)
    with_bad = [next(batch) for batch in [iter(loader)] for _ in range(7)]
    assert len(with_bad) == 7
    assert loader.bad.count == 1
    assert len(loader.bad.found) > 1, "of the four places that one sample has"
