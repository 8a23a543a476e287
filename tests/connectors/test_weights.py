"""The digest of weights: what changes it, what does not, and that it is computed once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.connectors import common
from kvstore.connectors.common import weights_fingerprint
from tests.kit.cases import for_each


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/kvstore/weights"


def model(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_content_decides_and_the_place_does_not(tmp_path: Path) -> None:
    one = model(tmp_path / "one", a=b"x" * 100, b=b"y")
    same = model(tmp_path / "two", a=b"x" * 100, b=b"y")
    other = model(tmp_path / "three", a=b"x" * 99 + b"z", b=b"y")
    moved = model(tmp_path / "four", a=b"x" * 100, c=b"y")
    assert weights_fingerprint(one) == weights_fingerprint(same)
    assert len({weights_fingerprint(each) for each in (one, other, moved)}) == 3


def test_weights_replaced_in_place_are_noticed_even_with_the_same_size_and_time(tmp_path: Path) -> None:
    folder = model(tmp_path / "one", a=b"x" * 100)
    file = folder / "a.safetensors"
    before, times = weights_fingerprint(folder), file.stat()
    file.write_bytes(b"z" * 100)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_fingerprint(folder) != before


def test_a_file_is_hashed_once(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "one", a=b"x" * 100)
    hashed: list[Path] = []
    hash_file = common._hash

    def counting(file: Path) -> str:
        hashed.append(file)
        return hash_file(file)

    monkeypatch.setattr(common, "_hash", counting)
    assert weights_fingerprint(folder) == weights_fingerprint(folder)
    assert len(hashed) == 1
    assert len(list(memory.iterdir())) == 1


def test_a_commit_names_the_content(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    commit = "0123456789" * 4
    assert weights_fingerprint(model(tmp_path / "snapshots" / commit, a=b"x")) == f"commit-{commit}"


@for_each("name", ["latest", "abc123", "0123456789" * 4 + "a"])
def test_a_folder_of_snapshots_that_is_not_hugging_faces_is_hashed(tmp_path: Path, name: str) -> None:
    (tmp_path / "snapshots").mkdir()
    folder = model(tmp_path / "snapshots" / name, a=b"x")
    before = weights_fingerprint(folder)
    (folder / "a.safetensors").write_bytes(b"y")
    assert weights_fingerprint(folder) != before
