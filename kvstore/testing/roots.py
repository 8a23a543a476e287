"""The contract of all roots. Tests are named after the sentences of ``kvstore/root/interface.py``."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kvstore.core.buffers import BufferLoan, Withdrawn
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.places import Name
from kvstore.root.interface import Root

WAIT_S = 30.0
STAMP_NS = 1_700_000_000_123_456_000
A = Name("chunks/0001/a")
TICK_S = 0.05
"""NFS 3 sees that a folder changed by its time alone, which the server's kernel counts in ticks of up to 10 ms."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Hosts:
    """One root as two hosts have it open; ``again`` opens it once more."""

    first: Root
    second: Root

    @property
    def both(self) -> tuple[Root, Root]:
        return self.first, self.second


def stage(root: Root, content: bytes, *, stamp_ns: int = 1_700_000_000_000_000_000) -> Name:
    """Stages ``content`` in two pieces under a fresh name."""
    name = Name(f"staging/{uuid.uuid4().hex}/{next(_numbers)}.part")
    half = len(content) // 2
    pieces = [memoryview(content[:half]), memoryview(content[half:])]
    root.stage(name, [piece for piece in pieces if len(piece)], stamp_ns=stamp_ns, durable=False)
    return name


def publish(root: Root, name: Name, content: bytes, *, stamp_ns: int = 1_700_000_000_000_000_000) -> bool:
    """Stages and publishes."""
    return root.publish(stage(root, content, stamp_ns=stamp_ns), name, durable=False)


def content_of(root: Root, name: Name) -> bytes | None:
    """Returns a whole file; None if there is none."""
    reader = root.open(name)
    if reader is None:
        return None
    with reader:
        content = bytearray(reader.stat.size_bytes)
        count = reader.read([memoryview(content)], 0, BufferLoan()) if content else 0
        return bytes(content[:count])


def names(root: Root, folder: str) -> set[str]:
    """Returns the names of what is in a folder."""
    return {entry.name for entry in root.list(Name(folder))}


def eventually(condition: Callable[[], bool]) -> bool:
    """True once ``condition`` holds: other clients of a distributed file system may see a change a second late."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


class RootTests:
    """Override ``hosts``. Each test has a fresh root."""

    @pytest.fixture
    def hosts(self) -> Hosts:
        """One empty root, as two hosts have it open."""
        raise NotImplementedError

    @pytest.fixture
    def root(self, hosts: Hosts) -> Root:
        """The first host's."""
        return hosts.first

    def test_missing_file_is_a_value(self, root: Root) -> None:
        assert root.open(A) is None
        assert root.stat(A) is None
        assert root.look(A, 10) is None
        assert root.touch(A, STAMP_NS) is False
        assert root.remove(A) is False
        assert root.move(A, Name("quarantine/a")) is False
        assert list(root.list(Name("chunks/0001"))) == []
        assert root.remove_folder(Name("chunks/0001")) is True
        root.discard(Name("staging/unknown/0.part"))

    def test_published_content_is_seen_by_every_host(self, hosts: Hosts) -> None:
        content = bytes(range(256)) * 40
        staged = stage(hosts.first, content)
        for host in hosts.both:
            assert host.stat(A) is None and host.open(A) is None
        assert hosts.first.publish(staged, A, durable=False) is True
        for host in hosts.both:
            assert eventually(lambda: content_of(host, A) == content)  # noqa: B023  called immediately
            stat = host.stat(A)
            assert stat is not None and stat.size_bytes == len(content)
        folder = Name("chunks/0001")
        assert hosts.first.stat(folder) is None and hosts.first.open(folder) is None
        assert hosts.first.look(folder, 10) is None, "a folder is no file"
        assert list(hosts.first.list(A)) == [], "and a file is no folder"

    def test_staged_name_is_used_up_by_publishing(self, root: Root) -> None:
        with pytest.raises(KVStoreError):
            root.publish(Name("staging/unknown/0.part"), A, durable=False)
        assert root.stat(A) is None
        for won in (True, False):
            staged = stage(root, b"content")
            assert root.publish(staged, A, durable=False) is won
            assert root.stat(staged) is None
            with pytest.raises(KVStoreError):
                root.publish(staged, Name("chunks/0001/b"), durable=False)
            root.discard(staged)

    def test_empty_and_durable_files_are_published(self, root: Root) -> None:
        assert publish(root, A, b"") is True
        assert content_of(root, A) == b""
        staged, durable = Name("staging/durable/0.part"), Name("chunks/0001/durable")
        root.stage(staged, [memoryview(b"synced")], stamp_ns=STAMP_NS, durable=True)
        assert root.publish(staged, durable, durable=True) is True
        root.sync()
        assert content_of(root, durable) == b"synced"

    def test_rule_W2_used_staging_name_is_refused(self, root: Root) -> None:
        staged = stage(root, b"first")
        with pytest.raises(KVStoreError):
            root.stage(staged, [memoryview(b"second")], stamp_ns=0, durable=False)
        assert root.publish(staged, A, durable=False) is True
        assert content_of(root, A) == b"first"

    def test_rule_W1_first_writer_wins(self, hosts: Hosts) -> None:
        assert publish(hosts.first, A, b"first") is True
        assert eventually(lambda: hosts.second.stat(A) is not None)
        assert publish(hosts.second, A, b"second, and longer") is False
        assert content_of(hosts.first, A) == b"first"

    def test_rule_W1_one_of_racing_publishers_wins(self, hosts: Hosts) -> None:
        writers_count = 6
        for number in range(10):
            name = Name(f"chunks/0002/{number}")
            staged = [
                (host := hosts.both[index % 2], stage(host, b"%d" % index * 500)) for index in range(writers_count)
            ]
            start = threading.Barrier(writers_count)

            def compete(index: int, name: Name = name, staged: object = staged, start: object = start) -> bool:
                assert isinstance(start, threading.Barrier) and isinstance(staged, list)
                root, mine = staged[index]
                start.wait(WAIT_S)
                won: bool = root.publish(mine, name, durable=False)
                return won

            with ThreadPoolExecutor(writers_count) as pool:
                won = list(pool.map(compete, range(writers_count)))
            if hosts.first.traits.exclusive_publish:
                assert won.count(True) == 1
                assert content_of(hosts.first, name) == b"%d" % won.index(True) * 500
            else:  # the last of several writers wins
                assert any(won) and content_of(hosts.first, name) in [
                    b"%d" % index * 500 for index in range(writers_count)
                ]

    def test_readers_during_publishing_see_nothing_or_all(self, hosts: Hosts) -> None:
        content, files_count, wrong = b"0123456789abcdef" * 4096, 20, []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                for number in range(files_count):
                    seen = content_of(hosts.second, Name(f"chunks/0003/{number}"))
                    if seen is not None and seen != content:
                        wrong.append((number, len(seen)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(files_count):
                publish(hosts.first, Name(f"chunks/0003/{number}"), content)
        finally:
            done.set()
            watcher.join(WAIT_S)
        assert not wrong

    def test_read_gives_the_range_and_less_at_the_end(self, root: Root) -> None:
        for offset, size, expected in (
            (0, 10, 10),
            (4090, 12, 12),
            (0, 10_000, 10_000),
            (9_990, 50, 10),
            (10_000, 10, 0),
            (20_000, 10, 0),
            (5, 0, 0),
        ):
            content = bytes((7 * index) % 256 for index in range(10_000))
            publish(root, A, content)
            reader = root.open(A)
            assert reader is not None
            with reader:
                assert reader.stat.size_bytes == len(content)
                memory = bytearray(b"\xee" * (size + 1))
                view = memoryview(memory)
                cut = size // 3
                pieces = [piece for piece in (view[:cut], view[cut:size]) if len(piece)]
                assert reader.read(pieces, offset, BufferLoan()) == expected
            assert memory[:expected] == content[offset : offset + expected]
            assert memory[expected:] == b"\xee" * (size + 1 - expected), "bytes behind the end were touched"

    def test_thousands_of_pieces_are_written_and_read(self, root: Root) -> None:
        pieces = [memoryview(b"%05d" % number if number % 7 else b"") for number in range(3000)]
        size = sum(map(len, pieces))
        staged = Name("staging/many/0.part")
        root.stage(staged, pieces, stamp_ns=STAMP_NS, durable=False)
        assert root.publish(staged, A, durable=False)
        memory = bytearray(size)
        view = memoryview(memory)
        reader = root.open(A)
        assert reader is not None
        with reader:
            into = [view[start : start + 3] for start in range(0, size, 3)]
            assert reader.read([view[:0], *into, view[:0]], 0, BufferLoan()) == size
        assert memory == b"".join(pieces)

    def test_withdrawn_memory_is_never_written(self, root: Root) -> None:
        content = b"\x01" * (1 << 20)
        publish(root, A, content)
        for _ in range(5):
            memory = bytearray(len(content))
            borrowed, started = BufferLoan(), threading.Barrier(3)

            def read(
                memory: bytearray = memory, borrowed: BufferLoan = borrowed, started: threading.Barrier = started
            ) -> None:
                reader = root.open(A)
                assert reader is not None
                with reader:
                    started.wait(WAIT_S)
                    try:
                        reader.read([memoryview(memory)], 0, borrowed)
                    except Withdrawn:
                        return

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            started.wait(WAIT_S)
            borrowed.withdraw()
            memory[:] = b"\xee" * len(memory)
            for thread in threads:
                thread.join(WAIT_S)
            assert memory.count(0xEE) == len(memory)

    def test_mtime_is_set_by_stage_and_touch(self, root: Root) -> None:
        publish(root, A, b"content", stamp_ns=STAMP_NS)
        if not root.traits.touch:
            assert root.touch(A, STAMP_NS) is False
            return
        stat = root.stat(A)
        assert stat is not None and abs(stat.mtime_ns - STAMP_NS) < 1_000_000_000
        assert root.touch(A, STAMP_NS + 60_000_000_000) is True
        stat = root.stat(A)
        assert stat is not None and abs(stat.mtime_ns - STAMP_NS - 60_000_000_000) < 1_000_000_000

    def test_listing_names_files_with_their_size(self, hosts: Hosts) -> None:
        for number in range(30):
            publish(hosts.first, Name(f"chunks/0004/f{number}"), b"x" * number)
        assert eventually(lambda: len(list(hosts.second.list(Name("chunks/0004")))) == 30)
        found = {entry.name: entry.stat for entry in hosts.second.list(Name("chunks/0004"))}
        assert {name: stat and stat.size_bytes for name, stat in found.items()} == {f"f{n}": n for n in range(30)}
        assert [(entry.name, entry.stat) for entry in hosts.second.list(Name("chunks"))] == [("0004", None)]
        assert "chunks" in names(hosts.second, "")

    def test_listing_follows_what_another_host_did(self, hosts: Hosts) -> None:
        publish(hosts.first, A, b"content")
        assert eventually(lambda: names(hosts.second, "chunks/0001") == {"a"})
        time.sleep(TICK_S)
        publish(hosts.first, Name("chunks/0001/b"), b"content")
        assert eventually(lambda: names(hosts.second, "chunks/0001") == {"a", "b"})
        time.sleep(TICK_S)
        hosts.first.remove(A)
        assert hosts.first.remove(A) is False
        assert eventually(lambda: names(hosts.second, "chunks/0001") == {"b"})
        for host in hosts.both:
            assert eventually(lambda: host.open(A) is None and host.stat(A) is None)  # noqa: B023  called immediately
        time.sleep(TICK_S)
        assert publish(hosts.second, A, b"second") is True
        assert eventually(lambda: content_of(hosts.first, A) == b"second")

    def test_reader_of_a_removed_file_never_gets_other_bytes(self, hosts: Hosts) -> None:
        publish(hosts.first, A, b"content" * 1000)
        assert eventually(lambda: hosts.second.stat(A) is not None)
        reader = hosts.second.open(A)
        assert reader is not None
        with reader:
            hosts.first.remove(A)
            memory = bytearray(7000)
            count = reader.read([memoryview(memory)], 0, BufferLoan())
        assert memory[:count] == (b"content" * 1000)[:count]

    def test_look_gives_size_mtime_and_first_bytes(self, root: Root) -> None:
        for content in (b"", b"x", b"header and payload"):
            name = Name(f"chunks/0001/{len(content)}")
            publish(root, name, content)
            seen = root.look(name, 6)
            assert seen is not None
            assert (seen.stat, seen.prefix) == (root.stat(name), content[:6])

    def test_file_is_removed_conditionally_or_not_at_all(self, hosts: Hosts) -> None:
        root = hosts.first
        publish(root, A, b"first")
        seen = root.look(A, 5)
        assert seen is not None
        if not root.traits.conditional_remove:
            with pytest.raises(InvalidRequest):
                root.remove_if(A, seen)
            assert content_of(root, A) == b"first"
            return
        hosts.second.remove(A)
        assert root.remove_if(A, seen) is True, "the file is gone, although another host deleted it"
        publish(hosts.second, A, b"newer")
        assert root.remove_if(A, seen) is False
        assert content_of(root, A) == b"newer"
        newer = root.look(A, 5)
        assert newer is not None and newer.prefix == b"newer" and newer.tag != seen.tag
        assert root.remove_if(A, newer) is True
        assert root.stat(A) is None

    def test_a_moved_file_is_under_its_new_name_only(self, hosts: Hosts) -> None:
        publish(hosts.first, A, b"content", stamp_ns=STAMP_NS)
        assert hosts.first.move(A, Name("quarantine/a.1")) is True
        assert content_of(hosts.first, Name("quarantine/a.1")) == b"content"
        assert eventually(lambda: hosts.second.stat(A) is None)
        assert hosts.first.move(A, Name("quarantine/a.2")) is False
        assert names(hosts.first, "quarantine") == {"a.1"}

    def test_a_folder_is_deleted_only_when_empty(self, root: Root) -> None:
        publish(root, A, b"content")
        assert root.remove_folder(Name("chunks/0001")) is False
        root.remove(A)
        assert root.remove_folder(Name("chunks/0001")) is True
        assert root.remove_folder(Name("chunks/0001")) is True
        assert "0001" not in names(root, "chunks")
        assert publish(root, A, b"again") is True

    def test_a_root_describes_itself(self, root: Root) -> None:
        space = root.space()
        assert (space.total_bytes is None) == (space.free_bytes is None)
        if space.total_bytes is not None and space.free_bytes is not None:
            assert 0 <= space.free_bytes <= space.total_bytes
        assert "://" in root.url
        assert not (root.traits.fenced and root.traits.conditional_remove), "one way at most to stop a late collector"

    def test_readers_and_roots_close_more_than_once(self, root: Root) -> None:
        publish(root, A, b"content")
        reader = root.open(A)
        assert reader is not None
        for opened in (reader, root):
            opened.close()
            opened.close()
