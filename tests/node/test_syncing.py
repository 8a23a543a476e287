"""The durability "everysec": what was published is synced soon, once for many puts, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.engine.coordination import Syncing
from kvstore.errors import Unavailable
from kvstore.root import posix
from tests.kit.host_process import LAYOUT, kv, tokens
from tests.kit.patience import PATIENCE_S, eventually


class Disk:
    """A root that counts its syncs."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self.synced_bytes = 0
        self.syncs = 0
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def sync(self) -> None:
        written_bytes = self.written_bytes
        self.syncs += 1
        assert self.goes_on.wait(PATIENCE_S)
        if self.fails:
            raise Unavailable("no answer")
        self.synced_bytes = written_bytes


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def every(disk: Disk) -> Iterator[Syncing]:
    made = Syncing(disk.sync, lambda: disk.written_bytes, every_s=0.01)
    yield made
    disk.goes_on.set()
    made.close()


def test_what_was_published_is_synced_and_nothing_else(disk: Disk, every: Syncing) -> None:
    assert disk.syncs == 0
    for _ in range(3):
        disk.written_bytes += 100
        eventually(lambda: disk.synced_bytes == disk.written_bytes, "it is synced")
    assert disk.syncs == 3, "one for each time that something was published"


def test_the_end_does_not_wait_for_a_root_that_hangs(disk: Disk) -> None:
    made = Syncing(disk.sync, lambda: disk.written_bytes, close_s=0.05)
    disk.goes_on.clear()
    disk.written_bytes = 100
    made.close()
    eventually(lambda: disk.syncs == 1, "it began")
    assert disk.synced_bytes == 0
    disk.goes_on.set()


def test_a_store_syncs_its_root_and_by_default_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(posix, "sync_file_system", synced.append)
    for durability in ("none", "fsync", "everysec"):
        root = tmp_path / durability
        with kvstore.open(root, durability=durability) as store:
            store.namespace("model", LAYOUT).put(tokens(1), kv(1))
    assert set(synced) == {str(tmp_path / "everysec")}
