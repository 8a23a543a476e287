"""The contract of all roots. Tests are named after the sentences of ``kvstore/root/interface.py``."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.buffers import Borrowed, Withdrawn
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.places import Name
from kvstore.root.interface import Root
from tests.kit.roots import WAIT_S, Hosts, content_of, eventually, names, publish, stage

STAMP_NS = 1_700_000_000_123_456_000
A = Name("chunks/0001/a")
TICK_S = 0.05
"""NFS 3 sees that a folder changed by its time alone, which the server's kernel counts in ticks of up to 10 ms."""


def test_a_missing_file_is_a_value(root: Root) -> None:
    assert root.open(A) is None
    assert root.stat(A) is None
    assert root.look(A, 10) is None
    assert root.touch(A, STAMP_NS) is False
    assert root.remove(A) is False
    assert root.move(A, Name("quarantine/a")) is False
    assert list(root.list(Name("chunks/0001"))) == []
    assert root.remove_folder(Name("chunks/0001")) is True
    root.discard(Name("staging/nobody/0.part"))


def test_a_folder_is_no_file(root: Root) -> None:
    publish(root, A, b"content")
    assert root.stat(Name("chunks/0001")) is None
    assert root.open(Name("chunks/0001")) is None
    assert root.look(Name("chunks/0001"), 10) is None
    assert list(root.list(A)) == [], "and a file is no folder"


def test_published_content_is_what_was_staged_on_every_host(hosts: Hosts) -> None:
    content = bytes(range(256)) * 40
    assert publish(hosts.first, A, content) is True
    for host in hosts.both:
        assert eventually(lambda: content_of(host, A) == content)  # noqa: B023  called at once
        stat = host.stat(A)
        assert stat is not None and stat.size_bytes == len(content)


def test_empty_durable_and_synced_files_are_published(root: Root) -> None:
    assert publish(root, A, b"") is True
    assert content_of(root, A) == b""
    staged, durable = Name("staging/durable/0.part"), Name("chunks/0001/durable")
    root.stage(staged, [memoryview(b"synced")], stamp_ns=STAMP_NS, durable=True)
    assert root.publish(staged, durable, durable=True) is True
    root.sync()
    assert content_of(root, durable) == b"synced"


def test_a_staged_file_is_not_there_under_its_final_name(hosts: Hosts) -> None:
    staged = stage(hosts.first, b"content")
    for host in hosts.both:
        assert host.stat(A) is None
        assert host.open(A) is None
    hosts.first.discard(staged)


def test_a_staged_name_is_gone_after_publishing_whoever_won(root: Root) -> None:
    for won in (True, False):
        staged = stage(root, b"content")
        assert root.publish(staged, A, durable=False) is won
        assert root.stat(staged) is None
        with pytest.raises(KVStoreError):
            root.publish(staged, Name("chunks/0001/b"), durable=False)


def test_a_file_that_is_not_staged_cannot_be_published(root: Root) -> None:
    with pytest.raises(KVStoreError):
        root.publish(Name("staging/nobody/0.part"), A, durable=False)
    assert root.stat(A) is None
    staged = stage(root, b"content")
    root.discard(staged)
    root.discard(staged)
    with pytest.raises(KVStoreError):
        root.publish(staged, A, durable=False)


def test_rule_W2_a_staging_name_is_refused_a_second_time_and_keeps_its_content(root: Root) -> None:
    staged = stage(root, b"first")
    with pytest.raises(KVStoreError):
        root.stage(staged, [memoryview(b"second")], stamp_ns=0, durable=False)
    assert root.publish(staged, A, durable=False) is True
    assert content_of(root, A) == b"first"


def test_rule_W1_the_first_writer_wins_and_nothing_is_replaced(hosts: Hosts) -> None:
    assert publish(hosts.first, A, b"first") is True
    assert eventually(lambda: hosts.second.stat(A) is not None)
    assert publish(hosts.second, A, b"second, and longer") is False
    assert content_of(hosts.first, A) == b"first"


def test_rule_W1_of_racing_publishers_exactly_one_wins(hosts: Hosts) -> None:
    if not hosts.first.traits.exclusive_publish:
        pytest.skip("this store cannot create conditionally: the last of several writers wins")
    writers_count = 6
    for number in range(10):
        name = Name(f"chunks/0002/{number}")
        staged = [(host := hosts.both[index % 2], stage(host, b"%d" % index * 500)) for index in range(writers_count)]
        start = threading.Barrier(writers_count)

        def compete(index: int, name: Name = name, staged: object = staged, start: object = start) -> bool:
            assert isinstance(start, threading.Barrier) and isinstance(staged, list)
            root, mine = staged[index]
            start.wait(WAIT_S)
            won: bool = root.publish(mine, name, durable=False)
            return won

        with ThreadPoolExecutor(writers_count) as pool:
            won = list(pool.map(compete, range(writers_count)))
        assert won.count(True) == 1
        assert content_of(hosts.first, name) == b"%d" % won.index(True) * 500


def test_racing_publishers_leave_one_whole_file_even_where_the_last_one_wins(hosts: Hosts) -> None:
    staged = [(host := hosts.both[index % 2], stage(host, b"%d" % index * 5000)) for index in range(6)]
    with ThreadPoolExecutor(len(staged)) as pool:
        won = list(pool.map(lambda pair: pair[0].publish(pair[1], A, durable=False), staged))
    assert any(won)
    assert content_of(hosts.first, A) in [b"%d" % index * 5000 for index in range(6)]


def test_readers_during_publishing_see_nothing_or_all(hosts: Hosts) -> None:
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


def test_a_read_gives_the_range_and_less_only_at_the_end(root: Root) -> None:
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
            assert reader.read(pieces, offset, Borrowed()) == expected
        assert memory[:expected] == content[offset : offset + expected]
        assert memory[expected:] == b"\xee" * (size + 1 - expected), "bytes behind the end were touched"


def test_empty_pieces_are_passed_over(root: Root) -> None:
    empty = memoryview(b"")
    staged = Name("staging/empty/0.part")
    root.stage(staged, [empty, memoryview(b"ab"), empty, memoryview(b"cd"), empty], stamp_ns=STAMP_NS, durable=False)
    assert root.publish(staged, A, durable=False)
    memory = bytearray(4)
    view = memoryview(memory)
    reader = root.open(A)
    assert reader is not None
    with reader:
        assert reader.read([view[:0], view[:1], view[1:1], view[1:4], view[4:]], 0, Borrowed()) == 4
    assert memory == b"abcd"


def test_more_pieces_than_one_system_call_takes_are_written_and_read(root: Root) -> None:
    pieces = [memoryview(b"%05d" % number) for number in range(3000)]
    staged = Name("staging/many/0.part")
    root.stage(staged, pieces, stamp_ns=STAMP_NS, durable=False)
    assert root.publish(staged, A, durable=False)
    memory = bytearray(15_000)
    view = memoryview(memory)
    reader = root.open(A)
    assert reader is not None
    with reader:
        into = [view[start : start + 3] for start in range(0, 15_000, 3)]
        assert reader.read(into, 0, Borrowed()) == 15_000
    assert memory == b"".join(pieces)


def test_withdrawn_memory_is_not_written(root: Root) -> None:
    publish(root, A, b"content" * 100)
    memory = bytearray(b"\xee" * 700)
    borrowed = Borrowed()
    reader = root.open(A)
    assert reader is not None
    with reader:
        borrowed.withdraw()
        with pytest.raises(Withdrawn):
            reader.read([memoryview(memory)], 0, borrowed)
    assert memory == b"\xee" * 700


def test_after_withdraw_returned_no_byte_changes_however_many_reads_are_under_way(root: Root) -> None:
    content = b"\x01" * (1 << 20)
    publish(root, A, content)
    for _ in range(5):
        memory = bytearray(len(content))
        borrowed, started = Borrowed(), threading.Barrier(3)

        def read(
            memory: bytearray = memory, borrowed: Borrowed = borrowed, started: threading.Barrier = started
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


def test_the_mtime_is_what_was_staged_and_then_what_was_touched(root: Root) -> None:
    publish(root, A, b"content", stamp_ns=STAMP_NS)
    if not root.traits.touch:
        assert root.touch(A, STAMP_NS) is False
        return
    stat = root.stat(A)
    assert stat is not None and abs(stat.mtime_ns - STAMP_NS) < 1_000_000_000
    assert root.touch(A, STAMP_NS + 60_000_000_000) is True
    stat = root.stat(A)
    assert stat is not None and abs(stat.mtime_ns - STAMP_NS - 60_000_000_000) < 1_000_000_000


def test_a_listing_names_files_with_their_size_and_folders_without(hosts: Hosts) -> None:
    for number in range(30):
        publish(hosts.first, Name(f"chunks/0004/f{number}"), b"x" * number)
    assert eventually(lambda: len(list(hosts.second.list(Name("chunks/0004")))) == 30)
    found = {entry.name: entry.stat for entry in hosts.second.list(Name("chunks/0004"))}
    assert {name: stat and stat.size_bytes for name, stat in found.items()} == {f"f{n}": n for n in range(30)}
    assert [(entry.name, entry.stat) for entry in hosts.second.list(Name("chunks"))] == [("0004", None)]
    assert "chunks" in names(hosts.second, "")


def test_a_listing_shows_what_another_host_published_and_removed_since_the_last_one(hosts: Hosts) -> None:
    publish(hosts.first, A, b"content")
    assert eventually(lambda: names(hosts.second, "chunks/0001") == {"a"})
    time.sleep(TICK_S)
    publish(hosts.first, Name("chunks/0001/b"), b"content")
    assert eventually(lambda: names(hosts.second, "chunks/0001") == {"a", "b"})
    time.sleep(TICK_S)
    hosts.first.remove(A)
    assert eventually(lambda: names(hosts.second, "chunks/0001") == {"b"})


def test_a_removed_file_is_missing_on_every_host_and_its_name_is_free(hosts: Hosts) -> None:
    publish(hosts.first, A, b"first")
    assert hosts.first.remove(A) is True
    assert hosts.first.remove(A) is False
    for host in hosts.both:
        assert eventually(lambda: host.open(A) is None and host.stat(A) is None)  # noqa: B023  called at once
    time.sleep(TICK_S)
    assert publish(hosts.second, A, b"second") is True
    assert eventually(lambda: content_of(hosts.first, A) == b"second")


def test_a_reader_of_a_removed_file_gets_its_bytes_or_fewer_never_others(hosts: Hosts) -> None:
    publish(hosts.first, A, b"content" * 1000)
    assert eventually(lambda: hosts.second.stat(A) is not None)
    reader = hosts.second.open(A)
    assert reader is not None
    with reader:
        hosts.first.remove(A)
        memory = bytearray(7000)
        count = reader.read([memoryview(memory)], 0, Borrowed())
    assert memory[:count] == (b"content" * 1000)[:count]


def test_a_look_gives_size_mtime_and_the_first_bytes(root: Root) -> None:
    for content in (b"", b"x", b"header and payload"):
        name = Name(f"chunks/0001/{len(content)}")
        publish(root, name, content)
        seen = root.look(name, 6)
        assert seen is not None
        assert (seen.stat, seen.prefix) == (root.stat(name), content[:6])


def test_a_file_is_removed_conditionally_or_not_at_all(hosts: Hosts) -> None:
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
    assert root.remove_if(A, seen) is True, "it is gone, whoever deleted it"
    publish(hosts.second, A, b"newer")
    assert root.remove_if(A, seen) is False
    assert content_of(root, A) == b"newer"
    newer = root.look(A, 5)
    assert newer is not None and newer.prefix == b"newer" and newer.tag != seen.tag
    assert root.remove_if(A, newer) is True
    assert root.stat(A) is None


def test_a_moved_file_is_under_its_new_name_only(hosts: Hosts) -> None:
    publish(hosts.first, A, b"content", stamp_ns=STAMP_NS)
    assert hosts.first.move(A, Name("quarantine/a.1")) is True
    assert content_of(hosts.first, Name("quarantine/a.1")) == b"content"
    assert eventually(lambda: hosts.second.stat(A) is None)
    assert hosts.first.move(A, Name("quarantine/a.2")) is False
    assert names(hosts.first, "quarantine") == {"a.1"}


def test_rule_W5_a_file_is_replaced_if_it_is_the_one_that_was_looked_at(hosts: Hosts) -> None:
    root = hosts.first
    publish(root, A, b"old one", stamp_ns=STAMP_NS)
    seen = root.look(A, 3)
    assert seen is not None
    staged = stage(root, b"newer")
    folder = staged.rpartition("/")[0]
    aside = Name(f"{folder}/aside.part")
    if not root.traits.mapped:
        with pytest.raises(InvalidRequest):
            root.replace(staged, A, seen, aside, durable=False)
        assert content_of(root, A) == b"old one"
        return
    reader = root.open(A)
    assert reader is not None
    assert root.replace(staged, A, seen, aside, durable=True) is True
    assert eventually(lambda: content_of(hosts.second, A) == b"newer")
    assert content_of(root, aside) == b"old one" and root.stat(staged) is None
    with reader:
        content = bytearray(7)
        assert reader.read([memoryview(content)], 0, Borrowed()) == 7 and content == b"old one"
    root.remove(aside)
    again = stage(root, b"newest")
    assert root.replace(again, A, seen, aside, durable=False) is False, "it is another file by now"
    root.remove(A)
    assert root.replace(again, A, seen, aside, durable=False) is False, "there is none"
    assert root.stat(A) is None and root.stat(aside) is None and content_of(root, again) == b"newest"


def test_a_folder_is_deleted_only_when_empty(root: Root) -> None:
    publish(root, A, b"content")
    assert root.remove_folder(Name("chunks/0001")) is False
    root.remove(A)
    assert root.remove_folder(Name("chunks/0001")) is True
    assert root.remove_folder(Name("chunks/0001")) is True
    assert "0001" not in names(root, "chunks")
    assert publish(root, A, b"again") is True


def test_a_mapped_file_stays_readable_after_close(root: Root) -> None:
    publish(root, A, b"content" * 1000)
    reader = root.open(A)
    assert reader is not None
    with reader:
        mapped = reader.map()
    if not root.traits.mapped:
        assert mapped is None
        return
    assert mapped is not None and mapped.readonly
    assert bytes(mapped) == b"content" * 1000
    reader.close()


def test_a_root_describes_itself(root: Root) -> None:
    space = root.space()
    assert (space.total_bytes is None) == (space.free_bytes is None)
    if space.total_bytes is not None and space.free_bytes is not None:
        assert 0 <= space.free_bytes <= space.total_bytes
    assert "://" in root.url
    assert not (root.traits.fenced and root.traits.conditional_remove), "one way at most to stop a late collector"


def test_readers_and_roots_close_more_than_once(root: Root) -> None:
    publish(root, A, b"content")
    reader = root.open(A)
    assert reader is not None
    for opened in (reader, root):
        opened.close()
        opened.close()
