"""Metadata in a file on a disk that is full: the log gives its room back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.format.places import METADATA
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.file import SPARE_BYTES, MetadataFile

VOLUME_BYTES = 32 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "volume"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(volume: Path) -> None:
    with open(volume / "other", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def write_until_full(meta: SqliteMeta, volume: Path) -> None:
    """Writes what makes the log grow, then leaves not a byte free."""
    for number in range(100):
        meta.put(f"/k/{number % 20}", bytes(2000), timeout_s=5.0)
    assert (volume / f"{METADATA}-wal").stat().st_size > 100 * 2000
    fill(volume)


def test_the_log_is_cut_and_writes_go_on(volume: Path) -> None:
    with closing(SqliteMeta(str(volume))) as meta:
        meta.put("/first", b"", timeout_s=5.0)
        assert (volume / METADATA).stat().st_blocks * 512 >= SPARE_BYTES, "what is in the log has room in the file"
        write_until_full(meta, volume)
        for number in range(50):
            meta.put(f"/more/{number}", b"1", timeout_s=5.0)
        assert {kv.key: kv.value for kv in meta.list("/k/").items} == {f"/k/{n}": bytes(2000) for n in range(20)}
        assert len(meta.list("/more/").items) == 50


def test_without_that_a_full_disk_is_an_error_that_says_so(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetadataFile, "shortened", lambda self, timeout_s: False)
    with closing(SqliteMeta(str(volume))) as meta:
        write_until_full(meta, volume)
        with pytest.raises(Unavailable, match="no space is left on the disk"):
            for number in range(50):
                meta.put(f"/more/{number}", b"1", timeout_s=5.0)
