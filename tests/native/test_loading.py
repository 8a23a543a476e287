"""The native library is optional: turned off, not built or built anew, kvstore says so and works."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.native import library as native
from tests.kit.programs import ended, load_program

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kvstore" / "native"
USE = """
import sys, numpy as np, kvstore
from kvstore.native import is_available, why_not
layout = kvstore.Layout(layers=2, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)
tokens, kv = np.arange(16), np.random.default_rng(1).integers(0, 9, layout.shape(16), np.int8)
with kvstore.open(sys.argv[1]) as store:
    cache = store.namespace("m", layout)
    cache.put(tokens, kv)
    count, found = cache.get(tokens)
    assert count == 16 and (found == kv).all()
    assert store.stats()["native_path"] == is_available()
print(is_available(), why_not())
"""


builder = load_program(".ci/build_native.py")
WAIT_S = 150.0
"""For a process that takes two seconds on an idle machine."""


def used(path: Path, setting: str) -> str:
    """Returns the report of a process with ``KVSTORE_NATIVE`` set after it stored and read something."""
    search = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "KVSTORE_NATIVE": setting, "PYTHONPATH": search}
    return ended(sys.executable, "-c", USE, str(path), env=environment, check=True).stdout.strip()


def test_turned_off_by_the_environment(tmp_root: Path) -> None:
    assert used(tmp_root, "0") == "False turned off by KVSTORE_NATIVE=0"


def test_without_a_compiler_it_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler" in builder.build(tmp_path)
    monkeypatch.setenv("CC", "false")
    assert "failed" in builder.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [(None, "was not built"), ("", "of another version"), ("int kv_abi(void) { return 99; }", "of another version")],
    ids=["missing", "foreign", "newer"],
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_library_that_does_not_fit_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, reason: str
) -> None:
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    library = tmp_path / "libkvstore.so"
    if source is not None:
        (tmp_path / "other.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True, timeout=WAIT_S)
    monkeypatch.setattr(native, "LIBRARY", library)
    found, brief, said = native._load()
    assert found is brief is native.PurePython and reason in said


def test_only_a_library_older_than_its_sources_is_removed(tmp_path: Path) -> None:
    source, library = tmp_path / "one.c", tmp_path / "libkvstore.so"
    builder.remove_outdated(tmp_path)
    source.write_text("")
    library.write_bytes(b"")
    os.utime(source, (1000, 1000))
    os.utime(library, (2000, 2000))
    builder.remove_outdated(tmp_path)
    assert library.exists()
    os.utime(source, (3000, 3000))
    builder.remove_outdated(tmp_path)
    assert not library.exists()


@pytest.mark.parametrize("named", [None, "", "cc -g"])
@pytest.mark.timeout(960)  # as long as the build itself may take
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_builds_from_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    for source in (*SOURCES.glob("*.c"), *SOURCES.glob("*.h")):
        shutil.copy(source, tmp_path)
    before = set(tmp_path.iterdir())
    assert builder.build(tmp_path) == ""
    (built,) = set(tmp_path.iterdir()) - before
    assert ctypes.CDLL(str(built)).kv_abi() >= 1
