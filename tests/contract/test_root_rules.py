"""Rules that a root on a file system keeps for the collectors: what is durable (W1, G6), and the fence (F1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.format.places import Name
from kvstore.root.posix import PosixRoot
from tests.kit.clusters import cluster, prompt, put

STAMP_NS = 1_700_000_000_000_000_000
STAGED = Name("staging/s/1.part")
PUBLISHED = Name("chunks/00/a")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[PosixRoot]:
    root = PosixRoot(str(tmp_path))
    yield root
    root.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files and folders of the root that were synced, in order."""
    found: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        found.append(str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path)))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def stage(root: PosixRoot, *, durable: bool) -> None:
    root.stage(STAGED, [memoryview(b"content")], stamp_ns=STAMP_NS, durable=durable)


def test_w1_a_durable_stage_syncs_its_file(root: PosixRoot, synced: list[str]) -> None:
    stage(root, durable=True)
    assert STAGED in synced


def test_w1_a_durable_publication_syncs_its_folder(root: PosixRoot, synced: list[str]) -> None:
    stage(root, durable=True)
    assert root.publish(STAGED, PUBLISHED, durable=True)
    assert "chunks/00" in synced


def test_w1_without_durability_nothing_is_synced(root: PosixRoot, synced: list[str]) -> None:
    stage(root, durable=False)
    assert root.publish(STAGED, PUBLISHED, durable=False)
    assert not synced


def test_g6_a_durable_fence_syncs_the_folder_above(root: PosixRoot, synced: list[str]) -> None:
    root.make_folder(Name("trash/sweep"))
    assert root.remove_folder(Name("trash/sweep"), durable=True)
    assert "trash" in synced


def test_g1_the_plan_of_a_sweep_is_durable(root: PosixRoot, synced: list[str]) -> None:
    with cluster(root) as made:
        node, chain = made.node(), prompt(1, 4)
        put(node, chain)
        assert made.collector().sweep(made.plans(chain)).reaped.count == 4
    assert "plans" in synced


def test_f1_a_removed_folder_takes_no_file(root: PosixRoot) -> None:
    stage(root, durable=False)
    assert root.publish(STAGED, PUBLISHED, durable=False)
    root.make_folder(Name("trash/sweep"))
    assert root.remove_folder(Name("trash/sweep"))
    assert not root.move(PUBLISHED, Name("trash/sweep/a.1"), make_folder=False)
    assert root.stat(PUBLISHED) is not None
