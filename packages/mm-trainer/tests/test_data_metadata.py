"""Metadata in all its forms: the same rows arrive, and every error names file, line and column."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mm_trainer.data.metadata.formats import read_table
from mm_trainer.data.metadata.table import Table
from mm_trainer.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"video": "a b/一.mp4", "prompt": 'quoted "words", and\na line', "width": 64, "fps": 23.976},
    {"video": "é.mp4", "prompt": "", "width": None, "fps": 16},
    {"video": "🙂.mp4", "prompt": "nan", "width": 48, "fps": 30},
    {"video": "d.mp4", "prompt": "None", "width": 48, "fps": 30},
]


def csv_text(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else '"' + str(value).replace('"', '""') + '"'

    lines = [",".join(rows[0])] + [",".join(map(cell, row.values())) for row in rows]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str, bom: bool = False) -> Path:
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8", newline="")
    return path


def contents(table: Table) -> list[tuple[Any, ...]]:
    return [
        (table.media(i), table.captions(i), table.number("width", i), table.number("fps", i)) for i in range(len(table))
    ]


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("form", ["csv", "json", "jsonl"])
def test_all_forms_give_the_same_rows(tmp_path: Path, form: str, bom: bool) -> None:
    """B072, B074: non-ASCII names, empty captions, and the words nan and None."""
    texts = {
        "csv": csv_text(ROWS),
        "json": json.dumps(ROWS, ensure_ascii=False, indent=1),
        "jsonl": "\n".join(json.dumps(row) for row in ROWS),
    }
    table = read_table(write(tmp_path / f"m.{form}", texts[form], bom))
    expected = [(r["video"], [r["prompt"]], float(r["width"] or "nan"), float(r["fps"])) for r in ROWS]
    assert str(contents(table)) == str(expected)


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "m.parquet")
    jsonl = write(tmp_path / "m.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    assert str(contents(read_table(tmp_path / "m.parquet"))) == str(contents(read_table(jsonl)))


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "m.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS * 500), path)
    content = bytearray(path.read_bytes())
    content[8:200] = bytes(192)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"m\.parquet: can't be read as Parquet"):
        read_table(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"mm-trainer\[parquet\]"):
        read_table(write(tmp_path / "m.parquet", ""))


def test_lines_survive_line_breaks_in_cells_and_blank_lines(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "m.csv", 'video,prompt\na.mp4,"two\nlines"\n\nb.mp4,x\n'))
    assert [table.where(row) for row in range(2)] == [f"{tmp_path}/m.csv:3: video", f"{tmp_path}/m.csv:5: video"]


def test_several_captions_and_rows_with_other_keys(tmp_path: Path) -> None:
    rows = [{"path": "a.mp4", "cap": ["one", "two"]}, {"image": "b.png", "caption": "three"}]
    table = read_table(write(tmp_path / "m.json", json.dumps(rows)))
    assert [table.captions(0), table.captions(1)] == [["one", "two"], ["three"]]
    assert table.media(1) == "b.png"


def test_list_of_annotation_files(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write(tmp_path / "one.json", json.dumps([{"path": "a.mp4", "cap": "x", "mask": "m.png", "source": "/abs/s.mp4"}]))
    write(tmp_path / "two.json", json.dumps([{"path": "b.mp4", "cap": "y", "fps": 8}]))
    table = read_table(write(tmp_path / "data.txt", "one,one.json\n\nelse/where,two.json\n"), paths=["mask", "source"])
    assert [table.media(0), table.media(1)] == [f"{tmp_path}/one/a.mp4", f"{tmp_path}/else/where/b.mp4"]
    assert table.paths("mask", 0) == [f"{tmp_path}/one/m.png"]
    assert table.paths("mask", 1) == []
    assert table.paths("source", 0) == ["/abs/s.mp4"]
    assert str(table.number("fps", 0)) == "nan"
    assert table.where(1) == f"{tmp_path}/two.json:1: path"


def test_folder_with_sidecar_texts(tmp_path: Path) -> None:
    """B075"""
    for name in ("b.png", "sub/a.mp4", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    write(tmp_path / "b.txt", "a picture\n", bom=True)
    with pytest.raises(DataError, match=r"1 of 2 clips have no caption file: sub/a\.mp4; write them or set missing_"):
        read_table(tmp_path)
    write(tmp_path / "sub/a.txt", "a clip")
    table = read_table(tmp_path)
    assert [(table.media(i), table.captions(i)) for i in range(2)] == [
        ("b.png", ["a picture"]),
        ("sub/a.mp4", ["a clip"]),
    ]


def test_clips_without_captions_follow_one_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        (tmp_path / f"{number}.MP4").touch()
    write(tmp_path / "3.TXT", "the third")
    with pytest.raises(
        DataError, match=r"7 of 8 clips have no caption file: 0\.MP4, .*, 5\.MP4 and 2 more; write them"
    ):
        read_table(tmp_path)
    empty = read_table(tmp_path, missing_captions="empty")
    assert [empty.captions(i) for i in range(8)] == [["the third"] if i == 3 else [""] for i in range(8)]
    assert "7 of 8 clips have no caption file and get an empty caption" in caplog.text
    some = read_table(tmp_path, missing_captions="skip")
    assert [some.media(i) for i in range(len(some))] == ["3.MP4"]
    assert "7 of 8 clips have no caption file and are left out" in caplog.text


def test_what_a_folder_holds_besides_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were lost without a line: formats that are read now, and those that aren't."""
    read = ("a.wmv", "b.flv", "c.mpg", "d.3gp", "e.m2ts", "f.ts", "g.MKV")
    for name in (*read, "h.heic", "i.heic", "j.psd", "README"):
        (tmp_path / name).touch()
        write((tmp_path / name).with_suffix(".txt"), "a caption")
    write(tmp_path / "lost.txt", "of nothing")
    table = read_table(tmp_path)
    assert [table.media(i) for i in range(len(table))] == sorted(read)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(
        "not read: 2 .heic, 1 .psd, 1 without suffix, 5 captions without a clip (README.txt, h.txt, i.txt, j.txt, "
        "lost.txt)"
    )


def test_a_caption_may_be_long(tmp_path: Path) -> None:
    """Python's parser stops at 131,072 characters."""
    text = "word " * 40_000
    table = read_table(write(tmp_path / "m.csv", f'video,prompt\na.mp4,"{text}"\nb.mp4,x\n'))
    assert table.captions(0) == [text]


def test_an_open_quote_is_blamed_on_its_own_line(tmp_path: Path) -> None:
    rows = [f"{number}.mp4,caption {number}" for number in range(50)]
    rows[20] = '20.mp4,"a man says: hello'
    path = write(tmp_path / "m.csv", "\n".join(["video,prompt", *rows]))
    with pytest.raises(DataError, match=r"m\.csv:22: .*is a quote not closed\?"):
        read_table(path)
    rows[40] = '40.mp4,"a woman answers" softly'
    path = write(tmp_path / "m.csv", "\n".join(["video,prompt", *rows]))
    with pytest.raises(DataError, match=r"m\.csv:22: "):
        read_table(path)


def test_folders_behind_links_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    """A circle of links ends; macOS leaves `._` files on disks of other systems."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder, name in ((data, "b"), (elsewhere, "a")):
        folder.mkdir()
        (folder / f"{name}.mp4").touch()
        write(folder / f"{name}.txt", name)
    (data / "._b.mp4").touch()
    (data / "part").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    table = read_table(data)
    assert [table.media(row) for row in range(len(table))] == ["b.mp4", "part/a.mp4"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.json", "[" * 100_000, r"m\.json:1: too deeply nested"),
        ("m.jsonl", "[" * 100_000, r"m\.jsonl:1: too deeply nested"),
        (
            "m.jsonl",
            f'{{"video": "a", "prompt": "b", "fps": {"9" * 400}}}',
            r"m\.jsonl:1: fps: expected a number, got",
        ),
        ("m.csv", "clip,prompt\na,b\n", r"m\.csv:1: no media column; expected one of video, .* found clip, prompt"),
        ("m.csv", "video,prompt\na.mp4,b,c\n", r"m\.csv:2: 3 fields, the header has 2"),
        ("m.csv", "video,prompt\na.mp4,b\n ,c\n", r"m\.csv:3: video: expected a path, got ' '"),
        ("m.csv", "video,prompt,fps\na.mp4,b,fast\n", r"m\.csv:2: fps: expected a number, got 'fast'"),
        ("m.csv", "video,prompt,fps\na.mp4,b,-1\n", r"m\.csv:2: fps: expected a number of at least 0"),
        ("m.csv", 'video,prompt\na.mp4,"b\n', r"m\.csv:2: unexpected end of data"),
        ("m.csv", "video,prompt\n", r"m\.csv: no rows"),
        ("m.jsonl", '{"video": "a", "prompt": "b"}\n{"video": "a"}\n', r"m\.jsonl:2: no caption column; expected"),
        ("m.jsonl", '{"video": "a", "prompt": null}\n', r"m\.jsonl:1: prompt: expected text .*, got None"),
        ("m.jsonl", '{"video": "a", "prompt": 3.5}\n', r"m\.jsonl:1: prompt: expected text .*, got 3\.5"),
        ("m.jsonl", '{"video": "a", "prompt": "\\ud83d"}\n', r"m\.jsonl:1: prompt: not a text"),
        ("m.jsonl", '{"video": "a", "prompt": "b\\u0000c"}\n', r"m\.jsonl:1: prompt: holds a NUL"),
        ("m.jsonl", '{"video": "a", "prompt": "b", "fps": true}\n', r"m\.jsonl:1: fps: expected a number"),
        ("m.jsonl", "{\n", r"m\.jsonl:1: not JSON"),
        ("m.json", '[\n{"video": "a", "prompt": "b"},\n3]', r"m\.json:3: expected an object, got 3"),
        ("m.json", '[{"video": "a", "prompt": "b"},\n{"video" "a"}]', r"m\.json:2: not JSON"),
        ("m.json", '{"a": 1}', r"m\.json:1: expected a list of objects"),
        (
            "m.json",
            '[{"video": "a", "prompt": "b"}]\n[{"video": "c", "prompt": "d"}]',
            r"m\.json:2: the list has",
        ),
        ("m.jsonl", json.dumps(["a" * 99] * 99), r"m\.jsonl:1: expected an object, got \['a.{1,200}$"),
        ("m.csv", "video,prompt,prompt\na.mp4,b,c\n", r"m\.csv:1: two columns are called prompt"),
        ("m.yaml", "", r"unknown metadata form '\.yaml'"),
        ("data.txt", "only one thing\n", r"data\.txt:1: expected `folder,annotations\.json`"),
        ("data.txt", "a,b.json\n", r"data\.txt:1: metadata file not found: /"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, name: str, text: str, message: str) -> None:
    """B074, B075"""
    with pytest.raises(DataError, match=message):
        read_table(write(tmp_path / name, text))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    before = "video,prompt\n" + 2000 * "a.mp4,x\n"  # more than is decoded at once
    (tmp_path / "m.csv").write_bytes((before + "é.mp4,x\n").encode("latin-1"))
    with pytest.raises(DataError, match=rf"m\.csv:2002: not UTF-8: byte 0xe9 at offset {len(before)}$"):
        read_table(tmp_path / "m.csv")


def test_non_ascii_names_under_an_ascii_locale(tmp_path: Path) -> None:
    """B072: the clip is found and read, and messages get out."""
    script = (
        "import sys, logging\n"
        "from data_clips import context, read_numbers, write_clip\n"
        "from pathlib import Path\n"
        "from mm_trainer.data.metadata.formats import read_table\n"
        "from mm_trainer.data.video.dataset import VideoDataset\n"
        "logging.basicConfig()\n"
        "folder = Path(sys.argv[1])\n"
        "write_clip(folder / read_table(folder / 'm.csv').media(0), frames=6)\n"
        "data = VideoDataset({'data_path': folder / 'm.csv', 'num_frames': 5, 'buckets': [[48, 64]]}, context())\n"
        "print(len(data), read_numbers(data.load(0, 0)['video']), ascii(data.load(0, 0)['caption']))\n"
    )
    write(tmp_path / "m.csv", "video,prompt\n一 é 🙂.mp4,中文\nmissing é.mp4,x\n", bom=True)
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environ, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "1 [0, 1, 2, 3, 4] '\\u4e2d\\u6587'\n"
    assert b"no such file" in done.stderr
