"""Each fault of a root is found, named, and repaired without harm to anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.buffers import token_array
from kvstore.core.clock import RandomIds
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.format import places
from kvstore.format.header import Damage
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.fsck import Action, FindingKind, FsckReport, Options, fsck
from kvstore.root.identity import claim_key
from kvstore.root.inspect import READ_BYTES, Inspector
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from kvstore.root.object_store import open_object_root
from kvstore.root.posix import PosixReader, PosixRoot
from tests.kit.cases import for_each
from tests.kit.damage import LAYOUT, NOW_S, SHARD_BITS, Filled, chunk_bytes, fill, read, write
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Flipped, Rule
from tests.kit.stores import SetClock

SESSION = bytes(range(16))
OLD = 7200.0


@pytest.fixture(params=["memory", "posix", "fsspec"])
def filled(request: pytest.FixtureRequest) -> Iterator[Filled]:
    if request.param == "fsspec":
        root: Root = open_object_root(f"memory://fsck-{RandomIds().fresh().hex()}/root")
    elif request.param == "posix":
        root = PosixRoot(request.getfixturevalue("tmp_root"))
    else:
        root = MemoryRoot()
    yield fill(root)
    root.close()


@pytest.fixture
def memory() -> Filled:
    return fill(MemoryRoot())


def check(filled: Filled, **options: Any) -> FsckReport:
    return fsck(filled.root, filled.identity, Options(**options), clock=SetClock(NOW_S))


def on(root: Root, filled: Filled) -> Filled:
    """The same content through another root."""
    return Filled(root, filled.identity, filled.namespace, filled.chain)


def found(report: FsckReport) -> list[tuple[FindingKind, str, str, Action | None]]:
    return [(one.kind, one.name, one.detail, one.action) for one in report.findings]


def done(report: FsckReport) -> list[tuple[FindingKind, Action | None]]:
    return [(one.kind, one.action) for one in report.findings]


def names(root: Root, folder: str) -> set[str]:
    return {entry.name for entry in root.list(Name(folder))}


def test_sound_root_is_clean(filled: Filled) -> None:
    variants: list[dict[str, Any]] = [{}, {"repair": True}, {"verify_payload": False}, {"live_sessions": set()}]
    for options in variants:
        report = check(filled, **options)
        assert report.findings == []
        assert report.is_clean and report.unrepaired_count == 0
        assert (report.chunks_count, report.namespaces_count) == (7, 1)
    assert check(filled, verify_payload=False).read_bytes == 7 * 4096


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Damage]] = {
    "magic": (lambda content: b"\0" + content[1:], Damage.MAGIC),
    "version": (lambda content: content[:8] + b"\x03" + content[9:], Damage.VERSION),
    "algorithm": (lambda content: content[:10] + b"\x09" + content[11:], Damage.ALGORITHM),
    "header": (lambda content: content[:200] + b"\xff" + content[201:], Damage.HEADER_CHECKSUM),
    "geometry": (lambda content: content[:16] + b"\xff" * 4 + content[20:], Damage.GEOMETRY),
    "payload": (lambda content: content[:-1] + bytes([content[-1] ^ 1]), Damage.SECTION_CHECKSUM),
    "truncated": (lambda content: content[:-1], Damage.SIZE),
    "truncated header": (lambda content: content[:100], Damage.SIZE),
    "empty": (lambda content: b"", Damage.SIZE),
    "longer": (lambda content: content + b"\0", Damage.SIZE),
    "zeros": (lambda content: bytes(len(content)), Damage.MAGIC),
    "zero-filled end": (lambda content: content[:4100] + bytes(len(content) - 4100), Damage.SECTION_CHECKSUM),
}


@for_each("damage", DAMAGES)
def test_damaged_chunk_is_found_and_repaired(filled: Filled, damage: str) -> None:
    change, reason = DAMAGES[damage]
    write(filled.root, filled.name(5), change(filled.content(5)))
    report = check(filled)
    assert found(report) == [(FindingKind.DAMAGED, filled.name(5), reason.value, None)]
    assert not report.is_clean and report.unrepaired_count == 1
    assert filled.root.stat(filled.name(5)) is not None, "looking must not change anything"

    report = check(filled, repair=True)
    assert done(report) == [(FindingKind.DAMAGED, Action.QUARANTINED), (FindingKind.QUARANTINED, Action.REMOVED)]
    assert not report.is_clean and report.unrepaired_count == 0
    assert filled.root.stat(filled.name(5)) is None, "the next put can write it again"
    assert names(filled.root, "quarantine") == set(), "one run does it"
    assert check(filled).findings == []


def test_file_read_wrong_for_a_moment_is_restored(memory: Filled) -> None:
    content = read(memory.root, memory.name(5))

    def is_its(name: Name) -> bool:
        return name == memory.name(5) or name.startswith(f"quarantine/{memory.chain.addresses[5].hex()}")

    # Wrong at its name, and again just after it was taken: two readings each, of header and payload.
    root = FaultyRoot(memory.root, [Rule("read", Flipped(4096), is_its, times=8)])
    report = check(on(root, memory), repair=True)
    assert done(report) == [(FindingKind.DAMAGED, Action.QUARANTINED), (FindingKind.QUARANTINED, Action.RESTORED)]
    assert read(memory.root, memory.name(5)) == content and names(memory.root, "quarantine") == set()


def test_quick_check_reads_quarantined_payload(memory: Filled) -> None:
    write(memory.root, memory.name(4), DAMAGES["payload"][0](memory.content(4)))
    assert check(memory, verify_payload=False).is_clean
    aside = places.quarantined(memory.chain.addresses[5], SESSION, 1)
    write(memory.root, aside, DAMAGES["payload"][0](memory.content(5)))
    memory.root.remove(memory.name(5))
    report = check(memory, repair=True, verify_payload=False)
    assert report.actions == {Action.REMOVED: 1} and memory.root.stat(memory.name(5)) is None


def test_leftovers_never_crowd_out_damage(memory: Filled) -> None:
    for number in range(5):
        write(memory.root, places.staged(SESSION, number), b"part", age_s=OLD)
    write(memory.root, places.quarantined(memory.chain.addresses[5], SESSION, 1), b"damaged")
    report = check(memory, live_sessions=set(), findings_max=3)
    assert report.is_clean and report.problems_count == 0 and report.leftovers_count == 6
    assert len(report.findings) == 3 and report.is_truncated
    write(memory.root, memory.name(5), b"damaged")
    write(memory.root, Name("holiday.jpg"), b"mine")
    report = check(memory, live_sessions=set(), findings_max=3)
    assert not report.is_clean
    assert {one.kind for one in report.findings if one.is_problem} == {FindingKind.DAMAGED, FindingKind.FOREIGN}


def test_misplaced_files_are_moved_to_their_names(filled: Filled) -> None:
    """Files in a ring, another namespace's chunk, and one in another shard."""
    other = fill(filled.root, 2, "other")
    contents = [filled.content(index) for index in range(6)]
    for index in range(4):
        write(filled.root, filled.name(index), contents[(index + 1) % 4])
    write(filled.root, filled.name(4), theirs := other.content(1))
    filled.root.remove(other.name(1))
    shard = (places.shard(filled.chain.addresses[5], SHARD_BITS) + 1) % 16
    filled.root.move(filled.name(5), wrong := Name(f"chunks/{shard:04x}/{filled.name(5).rpartition('/')[2]}"))
    report = check(filled)
    problems = {one.name: one.kind for one in report.findings if one.is_problem}
    assert problems == {
        **{filled.name(index): FindingKind.MISPLACED for index in range(5)},
        wrong: FindingKind.WRONG_SHARD,
    }
    assert check(filled, repair=True).unrepaired_count == 0
    assert [read(filled.root, filled.name(index)) for index in (0, 1, 2, 3)] == contents[:4]
    assert read(filled.root, other.name(1)) == theirs and filled.root.stat(filled.name(4)) is None
    assert filled.root.stat(wrong) is None and filled.root.stat(filled.name(5)) is not None
    assert check(filled).is_clean


def test_misplaced_copy_of_a_sound_chunk_is_removed(filled: Filled) -> None:
    write(filled.root, filled.name(5), filled.content(0))
    report = check(filled, repair=True)
    assert done(report) == [(FindingKind.MISPLACED, Action.QUARANTINED), (FindingKind.QUARANTINED, Action.REMOVED)]
    assert read(filled.root, filled.name(0)) is not None
    assert names(filled.root, "quarantine") == set()


def test_only_copy_stays_while_its_name_is_taken(memory: Filled) -> None:
    aside = places.quarantined(memory.chain.addresses[2], SESSION, 1)
    memory.root.move(memory.name(2), aside)
    write(memory.root, memory.name(2), b"damaged")
    root = FaultyRoot(memory.root, [Rule("move", EROFS)])
    report = check(on(root, memory), repair=True)
    assert (FindingKind.QUARANTINED, Action.QUARANTINED) in done(report)
    assert memory.root.stat(aside) is not None


FOREIGN = (
    "holiday.jpg",
    "mine/file",
    "chunks/file",
    "chunks/folder/file",
    "chunks/0001/file.txt",
    "chunks/0001/sub/file",
    "staging/file",
    "staging/folder/file",
    "quarantine/sub/file",
    "namespaces/readme.txt",
    "chunks/fffff/file",
)


def test_foreign_files_are_named_and_never_touched(filled: Filled) -> None:
    for name in FOREIGN:
        write(filled.root, Name(name), b"mine")
    for name in ("lost+found/x", "trash/x/y", "plans/x", "pins/o/p", ".snapshot/x"):
        write(filled.root, Name(name), b"kept by file systems and by garbage collection")
    report = check(filled, repair=True, live_sessions=set())
    assert report.counts == {FindingKind.FOREIGN: len(FOREIGN)}
    assert all(sum(name.startswith(one.name) for one in report.findings) == 1 for name in FOREIGN)
    assert all(read(filled.root, Name(name)) == b"mine" for name in FOREIGN)


def test_scratch_folder_of_a_killed_check_is_removed(memory: Filled) -> None:
    write(memory.root, Name(".check-00ff/race/1"), b"x")
    report = check(memory)
    assert [(one.kind, one.name) for one in report.findings] == [(FindingKind.LEFTOVER, ".check-00ff")]
    assert check(memory, repair=True).actions == {Action.REMOVED: 1}
    assert check(memory).is_clean


def test_staged_files_of_dead_sessions_are_removed(memory: Filled) -> None:
    live, dead, new = bytes(16), SESSION, b"n" * 16
    for session, age_s in ((live, OLD), (dead, OLD), (new, 5)):
        write(memory.root, places.staged(session, 1), b"part", age_s=age_s)
    report = check(memory, repair=True, live_sessions={live})
    assert set(found(report)) == {
        (FindingKind.ORPHAN_STAGING, places.staged(dead, 1), "4 bytes", Action.REMOVED)
    }  # the new one may have begun after the list was read
    assert names(memory.root, "staging") == {live.hex(), new.hex()} and report.is_clean
    assert read(memory.root, places.staged(live, 1)) == read(memory.root, places.staged(new, 1)) == b"part"


@for_each("age_s, is_old", [(3500.0, False), (3700.0, True), (-1e6, True)])
def test_staged_file_without_sessions_counts_by_age(memory: Filled, age_s: float, is_old: bool) -> None:
    write(memory.root, places.staged(SESSION, 1), b"part", age_s=age_s)
    report = check(memory, repair=True)
    assert [one.kind for one in report.findings] == [FindingKind.ORPHAN_STAGING] * is_old
    assert (memory.root.stat(places.staged(SESSION, 1)) is None) is is_old


def test_whole_chunk_in_quarantine_is_published_back(filled: Filled) -> None:
    content = read(filled.root, filled.name(2))
    aside = places.quarantined(filled.chain.addresses[2], SESSION, 1)
    assert filled.root.move(filled.name(2), aside)
    assert (FindingKind.QUARANTINED, aside, "whole", None) in found(check(filled))
    assert check(filled, repair=True).actions == {Action.RESTORED: 1}
    assert read(filled.root, filled.name(2)) == content
    write(filled.root, aside, filled.content(2))
    assert check(filled, repair=True).actions == {Action.REMOVED: 1}
    assert read(filled.root, filled.name(2)) == content, "a published chunk is never replaced"
    assert names(filled.root, "quarantine") == set()


def test_unrecorded_namespace_is_information(memory: Filled) -> None:
    memory.root.remove(places.namespace_record(memory.namespace.digest))
    report = check(memory)
    assert report.counts == {FindingKind.NO_RECORD: 1} and report.is_clean
    assert memory.namespace.digest.hex() in report.findings[0].detail


@for_each("content", [b"", b"{}", b"\xff\xfe", b"[]", b'{"layout": 5, "name": "x", "tenant": ""}'])
@for_each("which", ["record", "claim"])
def test_unreadable_record_makes_way_for_a_new_one(filled: Filled, which: str, content: bytes) -> None:
    namespace = filled.namespace
    record = places.namespace_record(namespace.digest)
    name = record if which == "record" else places.namespace_claim(claim_key(namespace.tenant, namespace.name))
    assert filled.root.stat(name) is not None
    write(filled.root, name, content)
    report = check(filled)
    assert [(one.kind, one.name) for one in report.findings if one.is_problem] == [(FindingKind.BAD_RECORD, name)]
    check(filled, repair=True)
    assert filled.root.stat(name) is None
    fill(filled.root, 0)
    assert check(filled, repair=True).counts.keys() <= {FindingKind.QUARANTINED}
    assert check(filled).is_clean


def test_record_under_another_name_is_found(memory: Filled) -> None:
    other = Namespace.of("other", LAYOUT)
    record = places.namespace_record(other.digest)
    claim, own = (places.namespace_claim(claim_key("", name)) for name in ("other", memory.namespace.name))
    write(memory.root, record, memory.namespace.to_json())
    write(memory.root, claim, read(memory.root, own) or b"")
    report = check(memory)
    assert {(one.kind, one.name) for one in report.findings} == {
        (FindingKind.BAD_RECORD, record),
        (FindingKind.BAD_RECORD, claim),
    }


def test_unreadable_file_does_not_stop_the_check(memory: Filled) -> None:
    inner = memory.root
    write(inner, memory.name(5), b"damaged")
    root = FaultyRoot(inner, [Rule("read", EIO, lambda name: name == memory.name(1))])
    report = check(on(root, memory), repair=True)
    assert {(one.kind, one.name) for one in report.findings if one.is_problem} == {
        (FindingKind.UNREADABLE, memory.name(1)),
        (FindingKind.DAMAGED, memory.name(5)),
    }
    assert inner.stat(memory.name(1)) is not None, "what cannot be read is not known to be damaged"


def test_failed_repair_is_reported(memory: Filled) -> None:
    write(memory.root, memory.name(5), b"damaged")
    root = FaultyRoot(memory.root, [Rule("move", EROFS)])
    report = check(on(root, memory), repair=True)
    assert done(report) == [(FindingKind.DAMAGED, Action.FAILED)]
    assert report.unrepaired_count == 1


class Meddling(FaultyRoot):
    """A root in which another node acts just before a file is taken."""

    def __init__(self, inner: Root, act: Any) -> None:
        super().__init__(inner)
        self.act = act

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        if self.act is not None:
            act, self.act = self.act, None
            act()
        return super().move(source, name, make_folder=make_folder)


def test_file_repaired_by_another_node_is_put_back(memory: Filled) -> None:
    whole = memory.content(5)
    write(memory.root, memory.name(5), b"damaged")
    root = Meddling(memory.root, lambda: write(memory.root, memory.name(5), whole))
    report = check(on(root, memory), repair=True)
    assert done(report) == [(FindingKind.DAMAGED, Action.VANISHED)]
    assert report.is_clean
    assert read(memory.root, memory.name(5)) == whole
    assert names(memory.root, "quarantine") == set()


def test_reading_keeps_to_its_rate(memory: Filled) -> None:
    clock = FakeClock()
    began_s = clock.monotonic_s()
    report = fsck(memory.root, memory.identity, Options(bytes_per_s=1000.0), clock=clock, pause=clock.advance)
    assert clock.monotonic_s() - began_s == pytest.approx(report.read_bytes / 1000.0)


def test_long_headers_and_sections_are_checked() -> None:
    filled = fill(MemoryRoot(), 0)
    layout = Layout(layers=1, kv_heads=1, head_dim=READ_BYTES // 2500, dtype="int8", chunk_tokens=3000)
    namespace = Namespace.of("long", layout)
    expected = ChunkKeys.of(namespace, token_array(range(3000))).expected(0)
    assert expected.header_bytes == 3 * 4096 and expected.section_bytes > READ_BYTES
    name = places.chunk(expected.address, NamespaceId(namespace.digest[:8]), SHARD_BITS)
    content = bytearray(chunk_bytes(expected))
    write(filled.root, name, bytes(content))
    assert check(filled).is_clean
    content[-10] ^= 1
    write(filled.root, name, bytes(content))
    assert [one.detail for one in check(filled).findings if one.is_problem] == ["section_checksum"]


def test_links_out_of_the_root_are_never_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    (tmp_path / "root").mkdir()
    filled = fill(PosixRoot(tmp_path / "root"))
    (tmp_path / "root/.check-ab").mkdir()
    (tmp_path / "root/.check-ab/link").symlink_to(tmp_path / "precious")
    (tmp_path / "root/chunks/0001").mkdir(exist_ok=True)
    (tmp_path / "root/chunks/0001/link").symlink_to(tmp_path / "precious")
    (tmp_path / "root/staging" / SESSION.hex()).symlink_to(tmp_path / "precious")
    check(filled, repair=True, live_sessions=set())
    assert (tmp_path / "precious/file").read_text() == "mine"
    assert not (tmp_path / "root/.check-ab").exists()


def test_header_with_foreign_tokens_is_damage(memory: Filled) -> None:
    """Each part of it is valid alone: one chunk's tokens are in front of another's bytes."""
    forged = replace(memory.expected(5), identity=memory.expected(4).identity)
    write(memory.root, memory.name(5), chunk_bytes(forged))
    assert found(check(memory)) == [(FindingKind.DAMAGED, memory.name(5), Damage.IDENTITY.value, None)]


def test_file_cut_while_it_is_read_is_damage(tmp_root: Path) -> None:
    filled = fill(PosixRoot(tmp_root))

    class Cut(PosixRoot):
        def open(self, name: Name) -> PosixReader | None:
            reader = super().open(name)
            (tmp_root / name).write_bytes((tmp_root / name).read_bytes()[:4100])
            return reader

    assert Inspector(Cut(tmp_root)).look(filled.name(5)) is Damage.SIZE
