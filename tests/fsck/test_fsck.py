"""Each fault of a root is found, named, and repaired without harm to anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.format import places
from kvstore.format.header import Damage
from kvstore.format.places import Name
from kvstore.fsck import Action, Finding, Kind, Options, Progress, Report, fsck
from kvstore.namespace import Namespace, NamespaceId
from kvstore.root.inspect import Broken, Inspector
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from kvstore.root.namespaces import claim_key
from kvstore.root.object_store import open_object_root
from kvstore.root.posix import PosixReader, PosixRoot
from kvstore.sources import RandomIds
from kvstore.tokens import token_array
from tests.kit.cases import for_each
from tests.kit.damage import LAYOUT, NOW_S, SHARD_BITS, Filled, chunk_bytes, fill, read, write
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Flipped, Rule

SESSION = bytes(range(16))
OLD = 7200.0


class Clock:
    """Stands still."""

    def now_s(self) -> float:
        return NOW_S

    def monotonic_s(self) -> float:
        return 0.0


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


def check(
    filled: Filled,
    found: Callable[[Finding], object] = lambda finding: None,
    progress: Callable[[Progress], object] = lambda progress: None,
    **options: Any,
) -> Report:
    return fsck(filled.root, filled.identity, Options(**options), found=found, progress=progress, clock=Clock())


def found(report: Report) -> list[tuple[Kind, str, str, Action | None]]:
    return [(one.kind, one.name, one.detail, one.action) for one in report.findings]


def names(root: Root, folder: str) -> set[str]:
    return {entry.name for entry in root.list(Name(folder))}


def test_a_sound_root_is_clean(filled: Filled) -> None:
    variants: list[dict[str, Any]] = [{}, {"repair": True}, {"verify_payload": False}, {"live_sessions": set()}]
    for options in variants:
        report = check(filled, **options)
        assert report.findings == []
        assert report.is_clean and report.unrepaired_count == 0
        assert (report.chunks_count, report.namespaces_count, report.unreachable_count) == (7, 1, 0)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Damage]] = {
    "magic": (lambda content: b"\0" + content[1:], Damage.MAGIC),
    "version": (lambda content: content[:8] + b"\x03" + content[9:], Damage.VERSION),
    "algorithm": (lambda content: content[:10] + b"\x09" + content[11:], Damage.ALGORITHM),
    "header": (lambda content: content[:200] + b"\xff" + content[201:], Damage.HEADER_CHECKSUM),
    "geometry": (lambda content: content[:16] + b"\xff" * 4 + content[20:], Damage.GEOMETRY),
    "payload": (lambda content: content[:-1] + bytes([content[-1] ^ 1]), Damage.SECTION_CHECKSUM),
    "first payload byte": (
        lambda content: content[:4096] + bytes([content[4096] ^ 1]) + content[4097:],
        Damage.SECTION_CHECKSUM,
    ),
    "truncated": (lambda content: content[:-1], Damage.SIZE),
    "truncated header": (lambda content: content[:100], Damage.SIZE),
    "empty": (lambda content: b"", Damage.SIZE),
    "longer": (lambda content: content + b"\0", Damage.SIZE),
    "zeros": (lambda content: bytes(len(content)), Damage.MAGIC),
    "zero-filled end": (lambda content: content[:4100] + bytes(len(content) - 4100), Damage.SECTION_CHECKSUM),
}


@for_each("damage", DAMAGES)
def test_a_damaged_chunk_is_found_with_its_reason_and_set_aside(filled: Filled, damage: str) -> None:
    change, reason = DAMAGES[damage]
    write(filled.root, filled.name(5), change(filled.content(5)))
    report = check(filled)
    assert found(report) == [(Kind.DAMAGED, filled.name(5), reason.value, None)]
    assert not report.is_clean and report.unrepaired_count == 1
    assert filled.root.stat(filled.name(5)) is not None, "looking must not change anything"

    report = check(filled, repair=True)
    assert [(one.kind, one.action) for one in report.findings] == [
        (Kind.DAMAGED, Action.QUARANTINED),
        (Kind.QUARANTINED, Action.REMOVED),
    ]
    assert not report.is_clean and report.unrepaired_count == 0
    assert filled.root.stat(filled.name(5)) is None, "the next put can write it again"
    assert names(filled.root, "quarantine") == set(), "one run does it"
    report = check(filled)
    assert report.is_clean and report.findings == []


def test_a_file_that_a_device_delivered_wrong_for_a_moment_is_back_at_the_end(memory: Filled) -> None:
    content = read(memory.root, memory.name(5))

    def is_its(name: Name) -> bool:
        return name == memory.name(5) or name.startswith(f"quarantine/{memory.chain.addresses[5].hex()}")

    # Wrong at its name, and again just after it was taken: two readings each, of header and payload.
    root = FaultyRoot(memory.root, [Rule("read", Flipped(4096), is_its, times=8)])
    report = check(Filled(root, memory.identity, memory.namespace, memory.chain), repair=True)
    assert [(one.kind, one.action) for one in report.findings] == [
        (Kind.DAMAGED, Action.QUARANTINED),
        (Kind.QUARANTINED, Action.RESTORED),
    ]
    assert read(memory.root, memory.name(5)) == content and names(memory.root, "quarantine") == set()


def test_a_quick_check_puts_nothing_back_whose_payload_is_damaged(memory: Filled) -> None:
    aside = places.quarantined(memory.chain.addresses[5], SESSION, 1)
    write(memory.root, aside, DAMAGES["payload"][0](memory.content(5)))
    memory.root.remove(memory.name(5))
    report = check(memory, repair=True, verify_payload=False)
    assert report.actions == {Action.REMOVED: 1} and memory.root.stat(memory.name(5)) is None


def test_housekeeping_is_no_problem_and_never_crowds_out_damage(memory: Filled) -> None:
    for number in range(5):
        write(memory.root, places.staged(SESSION, number), b"part", age_s=OLD)
    write(memory.root, places.quarantined(memory.chain.addresses[5], SESSION, 1), b"damaged")
    memory.root.remove(memory.name(2))
    report = check(memory, live_sessions=set(), findings_max=3)
    assert report.is_clean and report.problems_count == 0 and report.housekeeping_count == 7
    assert len(report.findings) == 3 and report.is_truncated
    write(memory.root, memory.name(5), b"damaged")
    write(memory.root, Name("holiday.jpg"), b"mine")
    report = check(memory, live_sessions=set(), findings_max=3)
    assert not report.is_clean
    assert {one.kind for one in report.findings if one.is_problem} == {Kind.DAMAGED, Kind.FOREIGN}


def test_payload_is_not_read_when_only_headers_are_asked_for(memory: Filled) -> None:
    write(memory.root, memory.name(5), DAMAGES["payload"][0](memory.content(5)))
    report = check(memory, verify_payload=False)
    assert report.is_clean
    assert report.read_bytes == 7 * 4096


def test_two_swapped_files_go_back_to_their_own_names(filled: Filled) -> None:
    a, b = filled.content(0), filled.content(3)
    write(filled.root, filled.name(0), b)
    write(filled.root, filled.name(3), a)
    report = check(filled)
    assert {(one.kind, one.name) for one in report.findings if one.is_problem} == {
        (Kind.MISPLACED, filled.name(0)),
        (Kind.MISPLACED, filled.name(3)),
    }
    check(filled, repair=True)
    assert read(filled.root, filled.name(0)) == a
    assert read(filled.root, filled.name(3)) == b
    assert check(filled).findings == []


def test_files_in_each_others_places_in_a_ring_all_go_home(filled: Filled) -> None:
    contents = [filled.content(index) for index in range(6)]
    for index in range(6):
        write(filled.root, filled.name(index), contents[(index + 1) % 6])
    check(filled, repair=True)
    assert [read(filled.root, filled.name(index)) for index in range(6)] == contents
    assert check(filled).findings == []


def test_another_namespaces_chunk_under_our_name_goes_to_its_own(filled: Filled) -> None:
    other = fill(filled.root, 2, "other")
    theirs = other.content(1)
    filled.root.remove(other.name(1))
    write(filled.root, filled.name(2), theirs)
    report = check(filled, repair=True)
    assert Kind.MISPLACED in report.counts
    assert read(filled.root, other.name(1)) == theirs
    assert filled.root.stat(filled.name(2)) is None


def test_a_misplaced_copy_is_deleted_where_a_whole_one_is_in_place(filled: Filled) -> None:
    write(filled.root, filled.name(5), filled.content(0))
    report = check(filled, repair=True)
    assert [(one.kind, one.action) for one in report.findings if one.kind is Kind.MISPLACED] == [
        (Kind.MISPLACED, Action.REMOVED)
    ]
    assert read(filled.root, filled.name(0)) is not None
    assert names(filled.root, "quarantine") == set()


def test_a_chunk_in_the_wrong_shard_is_moved_to_its_own(filled: Filled) -> None:
    address = filled.chain.addresses[2]
    wrong = Name(f"chunks/{(places.shard(address, SHARD_BITS) + 1) % 16:04x}/{filled.name(2).rpartition('/')[2]}")
    content = read(filled.root, filled.name(2))
    assert content is not None
    filled.root.move(filled.name(2), wrong)
    report = check(filled, repair=True)
    assert [(one.kind, one.name, one.action) for one in report.findings if one.is_problem] == [
        (Kind.WRONG_SHARD, wrong, Action.RESTORED)
    ]
    assert read(filled.root, filled.name(2)) == content
    assert check(filled).is_clean


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


def test_foreign_things_are_named_and_never_touched(filled: Filled) -> None:
    for name in FOREIGN:
        write(filled.root, Name(name), b"mine")
    report = check(filled, repair=True, live_sessions=set())
    assert report.counts == {Kind.FOREIGN: len(FOREIGN)}
    assert all(sum(name.startswith(one.name) for one in report.findings) == 1 for name in FOREIGN)
    assert all(read(filled.root, Name(name)) == b"mine" for name in FOREIGN)


@for_each("name", ["lost+found/x", "trash/x/y", "plans/x", "pins/o/p", ".snapshot/x"])
def test_what_file_systems_and_garbage_collection_keep_is_not_ours_to_judge(memory: Filled, name: str) -> None:
    write(memory.root, Name(name), b"theirs")
    assert check(memory, repair=True).findings == []


def test_the_scratch_folder_of_a_killed_check_is_removed(memory: Filled) -> None:
    write(memory.root, Name(".check-00ff/race/1"), b"x")
    report = check(memory)
    assert [(one.kind, one.name) for one in report.findings] == [(Kind.LEFTOVER, ".check-00ff")]
    assert check(memory, repair=True).actions == {Action.REMOVED: 1}
    assert check(memory).is_clean


def test_what_a_dead_session_staged_is_removed_and_what_a_live_one_staged_is_kept(memory: Filled) -> None:
    live, dead = bytes(16), SESSION
    for session in (live, dead):
        write(memory.root, places.staged(session, 1), b"part", age_s=OLD)
    report = check(memory, repair=True, live_sessions={live})
    assert found(report) == [(Kind.ORPHAN_STAGING, places.staged(dead, 1), "4 bytes", Action.REMOVED)]
    assert names(memory.root, "staging") == {live.hex()}
    assert read(memory.root, places.staged(live, 1)) == b"part"


def test_a_session_that_began_after_the_live_ones_were_listed_is_not_robbed(memory: Filled) -> None:
    write(memory.root, places.staged(SESSION, 1), b"part", age_s=5)
    report = check(memory, repair=True, live_sessions=set())
    assert found(report) == [(Kind.YOUNG_STAGING, places.staged(SESSION, 1), "4 bytes", None)]
    assert report.is_clean
    assert read(memory.root, places.staged(SESSION, 1)) == b"part"


@for_each(
    "age_s, kind",
    [(3500.0, Kind.YOUNG_STAGING), (3700.0, Kind.ORPHAN_STAGING), (-1e6, Kind.ORPHAN_STAGING)],
)
def test_where_nobody_knows_who_lives_an_hour_decides(memory: Filled, age_s: float, kind: Kind) -> None:
    write(memory.root, places.staged(SESSION, 1), b"part", age_s=age_s)
    report = check(memory, repair=True)
    assert [one.kind for one in report.findings] == [kind]
    assert (memory.root.stat(places.staged(SESSION, 1)) is None) is (kind is Kind.ORPHAN_STAGING)


def test_a_whole_chunk_in_quarantine_is_published_back(filled: Filled) -> None:
    content = read(filled.root, filled.name(2))
    aside = places.quarantined(filled.chain.addresses[2], SESSION, 1)
    assert filled.root.move(filled.name(2), aside)
    report = check(filled)
    assert (Kind.QUARANTINED, aside, "whole", None) in found(report)
    report = check(filled, repair=True)
    assert report.actions == {Action.RESTORED: 1}
    assert read(filled.root, filled.name(2)) == content
    assert check(filled).is_clean


def test_a_whole_chunk_in_quarantine_does_not_replace_a_published_one(filled: Filled) -> None:
    published = read(filled.root, filled.name(2))
    write(filled.root, places.quarantined(filled.chain.addresses[2], SESSION, 1), filled.content(2))
    report = check(filled, repair=True)
    assert report.actions == {Action.REMOVED: 1}
    assert read(filled.root, filled.name(2)) == published
    assert names(filled.root, "quarantine") == set()


def test_chunks_without_their_parent_are_told_as_information(memory: Filled) -> None:
    memory.root.remove(memory.name(2))
    report = check(memory)
    assert found(report) == [
        (Kind.UNREACHABLE, memory.name(3), f"its parent {memory.chain.addresses[2].hex()} is not there", None)
    ]
    assert report.is_clean and report.unreachable_count == 1


def test_chunks_of_an_unrecorded_namespace_are_told_once(memory: Filled) -> None:
    memory.root.remove(places.namespace_record(memory.namespace.digest))
    report = check(memory)
    assert report.counts == {Kind.NO_RECORD: 1}
    assert memory.namespace.digest.hex() in report.findings[0].detail
    assert report.is_clean


@for_each("content", [b"", b"{}", b"\xff\xfe", b"[]", b'{"layout": 5, "name": "x", "tenant": ""}'])
@for_each("which", ["record", "claim"])
def test_an_unreadable_record_is_found_and_makes_room_for_a_new_one(filled: Filled, which: str, content: bytes) -> None:
    namespace = filled.namespace
    record = places.namespace_record(namespace.digest)
    name = record if which == "record" else places.namespace_claim(claim_key(namespace.tenant, namespace.name))
    assert filled.root.stat(name) is not None
    write(filled.root, name, content)
    report = check(filled)
    assert [(one.kind, one.name) for one in report.findings if one.is_problem] == [(Kind.BAD_RECORD, name)]
    check(filled, repair=True)
    assert filled.root.stat(name) is None
    fill(filled.root, 0)
    assert check(filled, repair=True).counts.keys() <= {Kind.QUARANTINED}
    assert check(filled).is_clean


def test_a_record_under_another_namespaces_name_is_found(memory: Filled) -> None:
    other = Namespace.of("other", LAYOUT)
    write(memory.root, places.namespace_record(other.digest), memory.namespace.to_json())
    report = check(memory)
    assert [(one.kind, one.name) for one in report.findings] == [
        (Kind.BAD_RECORD, places.namespace_record(other.digest))
    ]


def test_an_unreadable_file_is_a_finding_and_the_rest_is_checked(memory: Filled) -> None:
    inner = memory.root
    write(inner, memory.name(5), b"damaged")
    root = FaultyRoot(inner, [Rule("read", EIO, lambda name: name == memory.name(1))])
    report = check(Filled(root, memory.identity, memory.namespace, memory.chain), repair=True)
    assert {(one.kind, one.name) for one in report.findings if one.is_problem} == {
        (Kind.UNREADABLE, memory.name(1)),
        (Kind.DAMAGED, memory.name(5)),
    }
    assert inner.stat(memory.name(1)) is not None, "what cannot be read is not known to be damaged"


def test_what_cannot_be_repaired_is_said_to_have_failed(memory: Filled) -> None:
    write(memory.root, memory.name(5), b"damaged")
    root = FaultyRoot(memory.root, [Rule("move", EROFS)])
    report = check(Filled(root, memory.identity, memory.namespace, memory.chain), repair=True)
    assert [(one.kind, one.action) for one in report.findings] == [(Kind.DAMAGED, Action.FAILED)]
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


def test_a_good_file_that_another_node_put_in_place_meanwhile_goes_back(memory: Filled) -> None:
    whole = memory.content(5)
    write(memory.root, memory.name(5), b"damaged")
    root = Meddling(memory.root, lambda: write(memory.root, memory.name(5), whole))
    report = check(Filled(root, memory.identity, memory.namespace, memory.chain), repair=True)
    assert [(one.kind, one.action) for one in report.findings] == [(Kind.DAMAGED, Action.VANISHED)]
    assert report.is_clean
    assert read(memory.root, memory.name(5)) == whole
    assert names(memory.root, "quarantine") == set()


def test_a_whole_chunk_that_another_node_put_under_a_swapped_name_meanwhile_is_not_mistaken(memory: Filled) -> None:
    # Chunk 0's bytes lie under chunk 5's name; just before they are taken, another node repairs that name.
    whole = memory.content(5)
    write(memory.root, memory.name(5), memory.content(0))
    memory.root.remove(memory.name(0))
    root = Meddling(memory.root, lambda: write(memory.root, memory.name(5), whole))
    check(Filled(root, memory.identity, memory.namespace, memory.chain), repair=True)
    assert read(memory.root, memory.name(5)) == whole
    assert memory.root.stat(memory.name(0)) is None


def test_reading_keeps_to_its_rate(memory: Filled) -> None:
    now, pauses = [0.0], []

    class Ticking(Clock):
        def monotonic_s(self) -> float:
            return now[0]

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    report = fsck(memory.root, memory.identity, Options(bytes_per_s=1000.0), clock=Ticking(), pause=pause)
    assert sum(pauses) == pytest.approx(report.read_bytes / 1000.0)


def test_a_header_of_several_pages_and_sections_larger_than_the_buffer_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvstore.keyset import ChunkKeys
    from kvstore.layout import Layout

    monkeypatch.setattr("kvstore.root.inspect.READ_BYTES", 20_000)
    filled = fill(MemoryRoot(), 0)
    namespace = Namespace.of("long", Layout(layers=1, kv_heads=1, head_dim=50, dtype="int8", chunk_tokens=3000))
    expected = ChunkKeys.of(namespace, token_array(range(3000))).expected(0)
    assert expected.header_bytes == 3 * 4096 and expected.section_bytes == 150_000
    name = places.chunk(expected.address, NamespaceId(namespace.digest[:8]), SHARD_BITS)
    content = bytearray(chunk_bytes(expected))
    write(filled.root, name, bytes(content))
    assert check(filled).is_clean
    content[-140_000] ^= 1
    write(filled.root, name, bytes(content))
    assert [one.detail for one in check(filled).findings if one.is_problem] == ["section_checksum"]


def test_a_link_to_somewhere_else_is_never_followed_out_of_the_root(tmp_path: Path) -> None:
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


def test_a_header_whose_tokens_are_not_those_of_its_address_is_damage(memory: Filled) -> None:
    """Each part of it is valid alone: one chunk's tokens are in front of another's bytes."""
    forged = replace(memory.expected(5), identity=memory.expected(4).identity)
    write(memory.root, memory.name(5), chunk_bytes(forged))
    assert found(check(memory)) == [(Kind.DAMAGED, memory.name(5), Damage.IDENTITY.value, None)]


def test_a_file_that_is_cut_while_it_is_read_is_damage(tmp_root: Path) -> None:
    filled = fill(PosixRoot(tmp_root))

    class Cut(PosixRoot):
        def open(self, name: Name) -> PosixReader | None:
            reader = super().open(name)
            (tmp_root / name).write_bytes((tmp_root / name).read_bytes()[:4100])
            return reader

    assert Inspector(Cut(tmp_root)).look(filled.name(5)) == Broken(Damage.SIZE)
