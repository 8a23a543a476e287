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
from kvstore.root.check import CheckTimings, Contender, Probe, is_sound
from kvstore.root.interface import Entry, Root, Stat
from kvstore.root.memory import MemoryFile, MemoryRoot
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Flipped, Missing, Rule
from tests.kit.roots import Hosts, names

pytestmark = pytest.mark.slow


SHORT = CheckTimings(fence_s=0.3, remove_pause_s=0.1)
check_root = partial(check.check_root, timings=SHORT)


def by_name(probes: list[Probe]) -> dict[str, Probe]:
    assert len({probe.name for probe in probes}) == len(probes)
    return {probe.name: probe for probe in probes}


def test_every_kind_of_root_is_sound_and_left_as_it_was(hosts: Hosts) -> None:
    seen: list[Probe] = []
    probes = check_root(hosts.first, progress=seen.append)
    wrong = [probe for probe in probes if probe.ok is False]
    if hosts.first.url.startswith("s3:") and not hosts.first.traits.exclusive_publish:
        # rclone now and then goes on listing an object that lost a race, and says that it is not there.
        assert {probe.name for probe in wrong} <= {"the scratch folder is removed"}
        return
    assert wrong == []
    assert is_sound(probes)
    assert seen == probes
    assert names(hosts.first, "") == set()


def test_a_mounted_root_is_asked_for_links_renames_and_fences(tmp_root: Path) -> None:
    probes = by_name(check_root(PosixRoot(tmp_root)))
    for name in ("O_EXCL has one winner", "link(2) has one winner", "a removed folder takes no renames"):
        assert probes[name].ok is True
        assert "two processes on one mount" in probes[name].detail
    assert probes["another mount sees changes"].ok is None
    assert os.listdir(tmp_root) == []


def test_a_second_mount_is_tried_where_one_is_given(tmp_root: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.symlink_to(tmp_root)
    probes = by_name(check_root(PosixRoot(tmp_root), second=str(again)))
    assert probes["the second mount"].ok is True
    assert "two mounts" in probes["link(2) has one winner"].detail
    assert probes["another mount sees new files"].ok is True
    assert probes["another mount sees deletions"].ok is None and "ms" in probes["another mount sees deletions"].detail


def test_a_second_mount_of_something_else_is_named(tmp_root: Path, tmp_path: Path) -> None:
    probes = check_root(PosixRoot(tmp_root), second=str(tmp_path), timings=replace(SHORT, visible_s_max=0.1))
    assert by_name(probes)["the second mount"].ok is False
    assert not is_sound(probes)


def test_a_root_that_cannot_be_written_is_an_error_and_not_a_list_of_failures() -> None:
    with pytest.raises(PermissionDenied):
        check_root(FaultyRoot(MemoryRoot(), [Rule("stage", EROFS)]))


def test_a_probe_that_meets_an_error_says_so_and_the_others_go_on() -> None:
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
        if self.promise == "mtime" and stat is not None:
            return Stat(stat.size_bytes, 0)
        if self.promise == "whole seconds" and stat is not None:
            return Stat(stat.size_bytes, stat.mtime_ns // 10**9 * 10**9)
        return stat

    def remove(self, name: Name) -> bool:
        with self.files.lock:
            file = self.files.find(name)
            if file is not None and self.promise == "deletion" and name.endswith("gone"):
                self.files.write(name, MemoryFile(file.content, file.mtime_ns))
                return True
        return super().remove(name)


def test_a_broken_promise_is_named_with_its_consequence() -> None:
    for promise, failing in (
        ("first writer wins", "publishing refuses a name that is taken"),
        ("first writer wins", "of racing writers one wins"),
        ("listing", "a listing shows what was just written"),
        ("mtime", "the mtime can be set"),
        ("deletion", "a deleted file is gone, and its name is free"),
    ):
        probes = check_root(Broken(promise))
        probe = by_name(probes)[failing]
        assert probe.ok is False
        assert probe.consequence
        assert not is_sound(probes)
        # What cannot be deleted is left behind, and said to be.
        assert ("the scratch folder is removed" in by_name(probes)) is (promise == "deletion")


def test_the_grain_of_the_mtime_is_told() -> None:
    for promise, grain in (("none", "to 1 ns"), ("whole seconds", "to coarser")):
        probe = by_name(check_root(Broken(promise)))["the mtime can be set"]
        assert probe.ok is True and probe.detail == grain
        assert bool(probe.consequence) is (promise == "whole seconds")


def test_wrong_bytes_are_noticed() -> None:
    for rule in (Rule("read", Flipped(5)), Rule("read", Missing(), nth=2)):
        probes = check_root(FaultyRoot(MemoryRoot(), [rule]))
        assert not is_sound(probes)
        assert by_name(probes)["parts of a file can be read"].ok is False


def test_a_fence_that_does_not_hold_is_told_in_the_words_of_the_weak_guarantee(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_PosixTries", _LateRenames)
    probe = by_name(check_root(PosixRoot(tmp_root)))["a removed folder takes no renames"]
    assert probe.ok is False
    assert "guarantee of this root is the weak one" in probe.consequence


class _LateRenames(check._PosixTries):
    """Delays one rename past its fence, which no available file system does."""

    def _one_fence(self, fence: str) -> tuple[int, int]:
        late, risen = super()._one_fence(fence)
        return late + 1, risen


def test_entries_of_a_root_are_not_mistaken_for_scratch(tmp_root: Path) -> None:
    root: Root = PosixRoot(tmp_root)
    (tmp_root / "chunks").mkdir()
    (tmp_root / "FORMAT").write_text("x")
    check_root(root)
    assert {Entry(entry.name, None).name for entry in root.list(Name(""))} == {"chunks", "FORMAT"}


def test_ctrl_c_in_a_terminal_is_not_for_the_second_process(tmp_path: Path) -> None:
    """A terminal interrupts all of its session. The second process is ended by the one that checks, without a word."""
    contender = Contender(str(tmp_path))
    try:
        assert os.getsid(contender._child.pid) == contender._child.pid != os.getsid(0)
    finally:
        contender.close()
