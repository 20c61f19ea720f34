"""The digest that says whether two weight sources are the same, and the memo that spares reading them again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ckpt_helpers as toys
import pytest
import xxhash

from mm_checkpoint import convert, find_source, source_digest
from mm_checkpoint._weights import identity
from mm_checkpoint.errors import SourceError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()), shards=3)


@pytest.fixture
def memo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a memo that also remembers files which were written a moment ago."""
    monkeypatch.setattr(identity, "_SETTLED_NS", -(10**9))
    (tmp_path / "beside").mkdir()
    return tmp_path / "beside"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    names: list[str] = []
    original = identity.digest_file
    monkeypatch.setattr(identity, "digest_file", lambda file, *rest: names.append(file.name) or original(file, *rest))
    return names


def digest_of(path: Path, beside: Path | None = None) -> str:
    return source_digest(find_source(path), beside=beside)


def change_one_byte(file: Path) -> None:
    """In the middle of the data; size and modification time stay."""
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(stat.st_size - 5)
        byte = opened.read(1)
        opened.seek(stat.st_size - 5)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_s_digest_is_that_of_all_its_bytes(tmp_path: Path) -> None:
    for size in (0, 1, (1 << 20) + 7):
        data = os.urandom(size)
        (tmp_path / "file").write_bytes(data)
        assert identity.digest_file(tmp_path / "file")[0] == xxhash.xxh3_128(data).hexdigest()


def test_copies_are_equal_and_each_change_is_another_source(tmp_path: Path, source: Path) -> None:
    first = digest_of(source)
    assert first.startswith("xxh3_128_")
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    assert digest_of(copy) == first
    seen = {first}
    for file in (*sorted(copy.glob("*.safetensors")), copy / "config.json"):
        if file.suffix == ".json":
            file.write_text('{"other": 1}')
        else:
            change_one_byte(file)
        seen.add(digest_of(copy))
    assert len(seen) == 5


def test_a_dcp_folder_has_one_too(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "dcp", to="dcp")
    first = digest_of(tmp_path / "dcp")
    change_one_byte(tmp_path / "dcp" / "__0_0.distcp")
    assert digest_of(tmp_path / "dcp") != first


def test_unchanged_files_are_read_once(source: Path, memo: Path, read: list[str]) -> None:
    first = digest_of(source, memo)
    assert len(read) == 3
    assert digest_of(source, memo) == first == digest_of(source)
    assert len(read) == 6, "the memo spared the second reading, and none was spared without one"
    changed = sorted(source.glob("*.safetensors"))[1]
    read.clear()
    change_one_byte(changed)
    assert digest_of(source, memo) != first
    assert read == [changed.name], "only what was written to"
    os.utime(changed, (1, 1))
    change_one_byte(changed)
    os.utime(changed, (2, 2))
    assert digest_of(source, memo) == first, "times decide nothing"


def test_a_file_written_a_moment_ago_is_not_remembered(source: Path, tmp_path: Path, read: list[str]) -> None:
    """It may be written to again under the same time stamp."""
    (tmp_path / "beside").mkdir()
    for _ in range(2):
        digest_of(source, tmp_path / "beside")
    assert len(read) == 6


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "another", "files": {}}', '{"format": "xxh3_128"}'])
def test_a_memo_that_can_t_be_used_is_none(source: Path, memo: Path, content: str) -> None:
    first = digest_of(source, memo)
    (memo / identity.MEMO_NAME).write_text(content)
    assert digest_of(source, memo) == first
    assert digest_of(source, memo) == first


def test_a_file_that_changes_while_it_is_read_is_refused(source: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[0]

    def grow(count: int) -> None:
        with file.open("ab") as opened:
            opened.write(b"x")
        file.chmod(0o600)

    with pytest.raises(SourceError, match=r"safetensors: changed while it was read"):
        identity.digest_file(file, _once(grow))
    found = find_source(source)
    file.unlink()
    with pytest.raises(SourceError, match="No such file"):
        source_digest(found)


def _once(call):  # type: ignore[no-untyped-def]
    done: list[int] = []

    def wrapper(count: int) -> None:
        if not done:
            done.append(count)
            call(count)

    return wrapper
