"""``check-root``: it reports a sound root as sound, and names each fault in plain words."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import PermissionDenied
from kvstore.format.places import Name
from kvstore.root import check
from kvstore.root.check import CheckTimings, Probe, is_sound
from kvstore.root.interface import Stat
from kvstore.root.memory import MemoryFile, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.testing.roots import Hosts, names
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Flipped, Missing, Rule

pytestmark = pytest.mark.slow


SHORT = CheckTimings(fence_s=0.3, remove_pause_s=0.1)
check_root = partial(check.check_root, timings=SHORT)


def by_name(probes: list[Probe]) -> dict[str, Probe]:
    assert len({probe.name for probe in probes}) == len(probes)
    return {probe.name: probe for probe in probes}


def test_check_of_every_root_finds_it_sound_and_leaves_nothing(hosts: Hosts) -> None:
    seen: list[Probe] = []
    before = names(hosts.first, "")
    probes = check_root(hosts.first, progress=seen.append)
    wrong = [probe for probe in probes if probe.ok is False]
    if hosts.first.url.startswith("s3:") and not hosts.first.traits.exclusive_publish:
        # rclone now and then goes on listing an object that lost a race, and says that it is not there.
        assert {probe.name for probe in wrong} <= {"the scratch folder is removed"}
        return
    assert wrong == []
    assert is_sound(probes)
    assert seen == probes
    assert names(hosts.first, "") == before


def test_mount_check_tries_links_and_fences(tmp_root: Path) -> None:
    (tmp_root / "chunks").mkdir()
    probes = by_name(check_root(PosixRoot(tmp_root)))
    for name in ("link(2) has one winner", "a removed folder takes no renames"):
        assert probes[name].ok is True
    assert probes["another mount sees changes"].ok is None
    assert os.listdir(tmp_root) == ["chunks"], "only the scratch folder is removed"


def test_second_mount_is_tried(tmp_root: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.symlink_to(tmp_root)
    probes = by_name(check_root(PosixRoot(tmp_root), second=str(again)))
    for name in ("the second mount", "another mount sees new files", "another mount sees deletions"):
        assert probes[name].ok is True
    assert "two mounts" in probes["link(2) has one winner"].detail


def test_second_mount_of_another_file_system_fails(tmp_root: Path, tmp_path: Path) -> None:
    probes = check_root(PosixRoot(tmp_root), second=str(tmp_path), timings=replace(SHORT, visible_s_max=0.1))
    assert by_name(probes)["the second mount"].ok is False
    assert not is_sound(probes)


def test_root_that_refuses_writes_raises() -> None:
    with pytest.raises(PermissionDenied):
        check_root(FaultyRoot(MemoryRoot(), [Rule("stage", EROFS)]))


def test_failing_probe_leaves_the_others_running() -> None:
    root = FaultyRoot(MemoryRoot(), [Rule("touch", EIO)])
    probes = by_name(check_root(root))
    assert probes["mtime"].ok is False and "EIO" in probes["mtime"].detail
    assert probes["of racing writers one wins"].ok is True
    assert names(root.inner, "") == set()


class Broken(MemoryRoot):
    """A memory root that breaks one promise."""

    def __init__(self, promise: str) -> None:
        super().__init__()
        self.promise = promise

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        if self.promise == "first writer wins":
            self.remove(name)
        return super().publish(staged, name, durable=durable)

    def list(self, folder: Name) -> Any:
        entries = list(super().list(folder))
        return iter(entries[1:] if self.promise == "listing" and len(entries) > 1 else entries)

    def stat(self, name: Name) -> Stat | None:
        stat = super().stat(name)
        return Stat(stat.size_bytes, 0) if self.promise == "mtime" and stat is not None else stat

    def remove(self, name: Name) -> bool:
        with self.files.lock:
            file = self.files.find(name)
            if file is not None and self.promise == "deletion" and name.endswith("gone"):
                self.files.write(name, MemoryFile(file.content, file.mtime_ns))
                return True
        return super().remove(name)


@pytest.mark.parametrize(
    ("promise", "failing"),
    [
        ("first writer wins", "publishing refuses a name that is taken"),
        ("first writer wins", "of racing writers one wins"),
        ("listing", "a listing shows what was just written"),
        ("mtime", "the mtime can be set"),
        ("deletion", "a deleted file is gone, and its name is free"),
    ],
)
def test_broken_promise_is_named_with_its_consequence(promise: str, failing: str) -> None:
    probes = check_root(Broken(promise))
    probe = by_name(probes)[failing]
    assert probe.ok is False
    assert probe.consequence
    assert not is_sound(probes)
    assert ("the scratch folder is removed" in by_name(probes)) is (promise == "deletion")


def test_wrong_bytes_fail_the_check() -> None:
    for rule in (Rule("read", Flipped(5)), Rule("read", Missing(), nth=2)):
        probes = check_root(FaultyRoot(MemoryRoot(), [rule]))
        assert not is_sound(probes)
        assert by_name(probes)["parts of a file can be read"].ok is False


def test_late_rename_is_reported_as_a_weak_fence(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No available file system delays a rename past its fence.
    make = os.mkdir

    def brought_back(path: Any, *mode: int, **folder: Any) -> None:
        make(path, *mode, **folder)
        if str(path).endswith("/fence"):
            raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", brought_back)
    probe = by_name(check_root(PosixRoot(tmp_root)))["a removed folder takes no renames"]
    assert probe.ok is False
    assert "guarantee of this root is the weak one" in probe.consequence
