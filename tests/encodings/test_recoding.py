"""Rule W5: a chunk is replaced by itself in another encoding; its name is never empty and never has other bytes."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.address import Chain
from kvstore.buffers import Borrowed
from kvstore.encodings.keys import Key, KeyFile
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.format import places
from kvstore.format.checksum import checksum
from kvstore.format.descent import Descent
from kvstore.format.encoded import Encoding, decode_any
from kvstore.format.header import incarnation_at
from kvstore.format.places import Name
from kvstore.fsck.check import Options, fsck
from kvstore.layout import Layout
from kvstore.node.limits import Limits
from kvstore.node.member import Member, Sharing
from kvstore.node.recoding import Outcome, Recoded, Recoding
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.tokens import token_array
from tests.encodings.test_node import COUNT, KV, TOKENS, names_of, namespace, opened, put_all, reads_right
from tests.kit.cases import for_each
from tests.kit.clusters import SPACE, cluster, eventually, put
from tests.kit.faulty_root import EIO, ENOSPC, Fails, FaultyRoot, Rule
from tests.kit.keyed import LAYOUT, TENANT, chunk_files, key_file, kv_of, recode, same, secret
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY

C, E = Encoding.COMPRESSED, Encoding.ENCRYPTED


def all_recoded(member: Member, root: Path, act: Recoding) -> set[Outcome]:
    return {recode(member.node, name, act).outcome for name in names_of(root)}


def encodings_of(root: Path) -> set[Encoding]:
    """The encodings of the chunks of tokens: blocks of noise do not get smaller."""
    headers = [decode_any(path.read_bytes()) for path in chunk_files(root)]
    return {header.encoding for header in headers if header.section_bytes == LAYOUT.section_bytes}


def test_each_act_does_what_it_says_and_every_read_goes_on(tmp_root: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.json", None, "a", "b")
    steps: list[tuple[str | None, Recoding, Encoding]] = [
        (None, Recoding.COMPRESS, C),
        ("a", Recoding.REENCRYPT, C | E),
        ("b", Recoding.REENCRYPT, C | E),
        ("b", Recoding.DECOMPRESS, E),
        ("b", Recoding.COMPRESS, C | E),
        (None, Recoding.REENCRYPT, C),
        (None, Recoding.DECOMPRESS, Encoding.PLAIN),
    ]
    with opened(tmp_root, keys) as (member, store):
        cache = put_all(store)
        for current, act, encoding in steps:
            key_file(tmp_path / "keys.json", current, "a", "b")
            outcomes = all_recoded(member, tmp_root, act)
            assert Outcome.REWRITTEN in outcomes and outcomes <= {Outcome.REWRITTEN, Outcome.KEPT}
            assert encodings_of(tmp_root) == {encoding}
            reads_right(cache)
            member.node.forget()
            reads_right(cache)
            assert all_recoded(member, tmp_root, act) == {Outcome.KEPT}, "nothing is left to do"
        stats = store.stats()
        assert stats["chunks_recoded"] >= 7 * COUNT and stats["miss_damaged"] == 0
    assert not any(path.is_file() for path in (tmp_root / "staging").rglob("*")), "nothing stays behind"


def test_a_recoded_chunk_keeps_lineage_and_last_use_and_is_another_publication(tmp_root: Path) -> None:
    with opened(tmp_root) as (member, store):
        put_all(store)
        path = chunk_files(tmp_root)[0]
        os.utime(path, ns=(1_600_000_000_000_000_123, 1_600_000_000_000_000_123))
        before = decode_any(path.read_bytes())
        for path in chunk_files(tmp_root):
            recode(member.node, Name(str(path.relative_to(tmp_root))), Recoding.COMPRESS)
        path = next(path for path in chunk_files(tmp_root) if decode_any(path.read_bytes()).address == before.address)
        after = decode_any(path.read_bytes())
        assert path.stat().st_mtime_ns == 1_600_000_000_000_000_123
        assert after.incarnation[:12] == before.incarnation[:12]
        assert (after.incarnation != before.incarnation) is bool(after.encoding)


def test_a_recoded_block_says_the_same_of_its_descent_unless_it_is_encrypted(tmp_root: Path, tmp_path: Path) -> None:
    keys, said = key_file(tmp_path / "keys.json", None, "a"), Descent([1, 2, 3], 0)
    with opened(tmp_root, keys) as (member, store):
        blocks = store.namespace("m", LAYOUT, tenant=TENANT).blocks
        assert blocks.put([b"k" * 32], [bytes(100_000)], descents=[said]) == [True]
        (name,) = names_of(tmp_root)
        for current, act, shown in (
            (None, Recoding.COMPRESS, said.pack()),
            (None, Recoding.DECOMPRESS, said.pack()),
            ("a", Recoding.REENCRYPT, b""),
        ):
            key_file(tmp_path / "keys.json", current, "a")
            assert recode(member.node, name, act).outcome is Outcome.REWRITTEN
            content = (tmp_root / name).read_bytes()
            assert decode_any(content).descent == shown
            assert (said.pack() in content) == bool(shown)
            assert blocks.get([b"k" * 32], [bytearray(100_000)]) == [True]


def test_who_has_the_old_file_open_or_mapped_goes_on(tmp_root: Path) -> None:
    with opened(tmp_root, limits=Limits(hold_max_s=31.0)) as (member, store):
        cache = put_all(store, "other")
        name = next(each for each in names_of(tmp_root) if len((tmp_root / each).read_bytes()) > 10_000)
        old = (tmp_root / name).read_bytes()
        reader = PosixRoot(tmp_root).open(name)
        assert reader is not None
        mapped = reader.map()
        with cache.hold(TOKENS) as hold:
            views = hold.view()
            assert recode(member.node, name, Recoding.COMPRESS).outcome is Outcome.REWRITTEN
            assert same(np.concatenate(views, axis=2), KV)
        again = bytearray(len(old))
        assert reader.read([memoryview(again)], 0, Borrowed()) == len(old) and again == old
        assert mapped is not None and bytes(mapped) == old
        kept = [path for path in (tmp_root / "staging").rglob("*") if path.is_file()]
        assert [path.read_bytes() for path in kept] == [old], "for file systems that forget what has no name"
        member.node.recoder.sweep()
        assert all(path.exists() for path in kept)
        reader.close()


@for_each("shared", [False, True])
def test_a_node_that_ends_leaves_in_a_cluster_what_others_may_hold_and_else_nothing(
    tmp_root: Path, shared: bool
) -> None:
    with opened(tmp_root) as (member, store):
        put_all(store, "other")
        for name in names_of(tmp_root):
            recode(member.node, name, Recoding.COMPRESS)
        member.sharing = Sharing.CLUSTER if shared else Sharing.ALONE
        staged = places.staged(member.node._session(), 1 << 40)
        member.node.root.stage(staged, [memoryview(b"of a put that was cut off")], stamp_ns=0, durable=False)
        older = places.staged(bytes(16), 1)
        member.node.root.stage(older, [memoryview(b"of a session before")], stamp_ns=0, durable=False)
        member.node.staging.leave(bytes(16))
    left = [path.name for path in (tmp_root / "staging").rglob("*")]
    assert bool(left) is shared
    assert all(places.parse_replaced(path.name) for path in (tmp_root / "staging").rglob("*") if path.is_file())


def test_a_replaced_file_that_could_not_be_removed_is_removed_later() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()), [])
    with opened(root) as (member, store):
        put_all(store, "other")
        folder = next(each.name for each in root.list(Name("chunks")))
        name = next(Name(f"chunks/{folder}/{each.name}") for each in root.list(Name(f"chunks/{folder}")) if each.stat)
        assert recode(member.node, name, Recoding.COMPRESS).outcome is Outcome.REWRITTEN
        staging = Name(f"staging/{member.node._session().hex()}")
        assert len([*root.list(staging)]) == 1
        root.set_rules([Rule("remove", EIO)])
        assert member.node.recoder.sweep(even_held=True) and member.node.recoder.has_asides
        root.set_rules([])
        assert member.node.recoder.sweep(even_held=True) and not member.node.recoder.has_asides
        assert [*root.list(staging)] == []


@for_each("when", ["look", "open", "read", "stage", "replace", "space"])
@for_each("error", [EIO, ENOSPC])
def test_a_failure_at_any_step_leaves_the_old_file(tmp_path: Path, when: str, error: Fails) -> None:
    files = MemoryFiles()
    root = FaultyRoot(MemoryRoot(files), [])
    with opened(root) as (member, store):
        cache = put_all(store, "other")
        folders = [entry.name for entry in root.list(Name("chunks"))]
        sizes = {
            Name(f"chunks/{folder}/{entry.name}"): entry.stat.size_bytes
            for folder in folders
            for entry in root.list(Name(f"chunks/{folder}"))
            if entry.stat
        }
        chunk = max(sizes, key=lambda name: sizes[name])
        root.set_rules([Rule(when, error)])
        with pytest.raises((Overloaded, Unavailable)):
            recode(member.node, chunk, Recoding.COMPRESS)
        root.set_rules([])
        assert not [entry for entry in root.list(Name(f"staging/{member.node._session().hex()}")) if entry.stat]
        member.node.forget()
        reads_right(cache)


@for_each("instead", ["gone", "newer"])
def test_a_file_that_is_another_by_now_is_left_alone(tmp_root: Path, instead: str) -> None:
    class Late(PosixRoot):
        """Somebody else comes between the look and the second name."""

        meddle: Callable[[], object] = staticmethod(lambda: None)

        def replace(self, *args: object, **given: object) -> bool:
            self.meddle()
            return super().replace(*args, **given)  # type: ignore[arg-type]

    root = Late(tmp_root)
    with opened(root) as (member, store):
        put_all(store, "other")
        name = next(each for each in names_of(tmp_root) if (tmp_root / each).stat().st_size > 10_000)
        path = tmp_root / name
        newer = bytearray(path.read_bytes())
        newer[104:120] = bytes(16)

        def meddle() -> None:
            path.unlink()
            if instead == "newer":
                path.write_bytes(newer)

        root.meddle = meddle
        assert recode(member.node, name, Recoding.COMPRESS).outcome is Outcome.CHANGED
        assert path.exists() is (instead == "newer")
        assert instead == "gone" or path.read_bytes() == newer
        assert not [each for each in (tmp_root / "staging").rglob("*") if each.is_file()]


def test_names_that_are_no_chunks_and_roots_that_cannot_are_refused(tmp_path: Path) -> None:
    with opened(MemoryRoot(objects=True)) as (member, store):
        put_all(store, "other")
        for name in ("FORMAT", "chunks/0000/x", "quarantine/a"):
            with pytest.raises(InvalidRequest):
                recode(member.node, Name(name), Recoding.COMPRESS)
        folder = next(entry.name for entry in member.node.root.list(Name("chunks")))
        for entry in member.node.root.list(Name(f"chunks/{folder}")):
            name = Name(f"chunks/{folder}/{entry.name}")
            try:
                outcome = recode(member.node, name, Recoding.COMPRESS).outcome
            except InvalidRequest as error:
                assert "object store" in str(error)
            else:
                assert outcome is Outcome.KEPT
        reads_right(namespace(store, "other"))


def test_damaged_and_missing_chunks_are_left_to_others(tmp_root: Path) -> None:
    with opened(tmp_root) as (member, store):
        put_all(store, "other")
        name = names_of(tmp_root)[0]
        content = bytearray((tmp_root / name).read_bytes())
        content[-1] ^= 1
        (tmp_root / name).write_bytes(content)
        assert recode(member.node, name, Recoding.COMPRESS).outcome is Outcome.DAMAGED
        assert (tmp_root / name).read_bytes() == content
        (tmp_root / name).unlink()
        assert recode(member.node, name, Recoding.COMPRESS) == Recoded(Outcome.GONE)


@for_each("section_bytes", [1 << 40, 1 << 60, 1 << 63])
def test_a_compressed_file_that_claims_sections_of_any_size_takes_no_memory(tmp_root: Path, section_bytes: int) -> None:
    """One file whose header lies ended the whole act, with a MemoryError."""
    with opened(tmp_root) as (member, store):
        put_all(store)
        assert Outcome.REWRITTEN in all_recoded(member, tmp_root, Recoding.COMPRESS)
        name = next(each for each in names_of(tmp_root) if decode_any((tmp_root / each).read_bytes()).encoding)
        content = bytearray((tmp_root / name).read_bytes())
        end = decode_any(content).header_bytes - 8
        struct.pack_into("<Q", content, 32, section_bytes)
        struct.pack_into("<Q", content, end, checksum(memoryview(content)[:end]))
        (tmp_root / name).write_bytes(content)
        assert decode_any(content).section_bytes == section_bytes, "nothing else is wrong with it"
        assert recode(member.node, name, Recoding.DECOMPRESS).outcome is Outcome.DAMAGED


def test_a_sweep_that_condemned_the_old_file_puts_the_new_one_back(tmp_root: Path) -> None:
    with cluster(PosixRoot(tmp_root)) as c:
        chain = Chain.of(SPACE, token_array(np.arange(16)))
        member = c.node()
        assert put(member, chain) == 4
        plans = c.plans(chain)
        wanted = c.name(chain.addresses[2])
        before = incarnation_at((tmp_root / wanted).read_bytes())
        recoded = threading.Event()

        class Slow(PosixRoot):
            def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
                if source == wanted and not recoded.is_set():
                    recoded.set()
                    content = (tmp_root / wanted).read_bytes()
                    fresh = bytearray(content)
                    fresh[104:120] = b"another one here"
                    (tmp_root / "staging" / "s").mkdir(parents=True)
                    (tmp_root / "staging" / "s" / "0.part").write_bytes(fresh)
                    seen = self.look(wanted, 128)
                    assert seen is not None
                    assert self.replace(Name("staging/s/0.part"), wanted, seen, Name("staging/s/1.part"), durable=False)
                return super().move(source, name, make_folder=make_folder)

        report = c.collector(Slow(tmp_root)).sweep(plans)
        assert recoded.is_set() and report.reaped.count == 3
        assert incarnation_at((tmp_root / wanted).read_bytes()) != before
        assert c.leftovers() == []


def test_fsck_finds_nothing_wrong_where_a_recoding_node_died(tmp_root: Path) -> None:
    with opened(tmp_root) as (member, store):
        put_all(store, "other")
        identity = member.node.identity
        dying = PosixRoot(tmp_root, step=_die)
        name = next(each for each in names_of(tmp_root) if len((tmp_root / each).read_bytes()) > 10_000)
        old = (tmp_root / name).read_bytes()
        os.utime(tmp_root / name, (1_600_000_000, 1_600_000_000))
        seen = dying.look(name, 128)
        assert seen is not None
        staging = f"staging/{bytes(16).hex()}"
        dying.stage(Name(f"{staging}/0.part"), [memoryview(old)], stamp_ns=0, durable=False)
        with pytest.raises(KeyboardInterrupt):
            dying.replace(Name(f"{staging}/0.part"), name, seen, Name(f"{staging}/1.part"), durable=False)
        assert (tmp_root / name).read_bytes() == old
        report = fsck(
            PosixRoot(tmp_root),
            identity,
            Options(live_sessions={member.node._session()}, staging_age_s=0.0, repair=True),
        )
        assert report.chunks_count == COUNT + 3
        assert not [each for each in (tmp_root / staging).rglob("*") if each.is_file()]
        reads_right(namespace(store, "other"))


def _die(point: str) -> None:
    if point == "replace.before":
        raise KeyboardInterrupt


@pytest.mark.slow
def test_keys_rotate_under_load_and_nothing_is_lost(tmp_root: Path, tmp_path: Path) -> None:
    """Threads put and get while keys rotate and chunks are recoded: every get is a hit, and right."""
    layout = Layout(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16", chunk_tokens=32)
    keys = key_file(tmp_path / "keys.json", "key-0")
    reading = key_file(tmp_path / "keys.json", "key-0")
    stop, troubles, rounds = threading.Event(), list[str](), [0, 0]
    prompts = [np.arange(4 * 32) + 1_000 * number for number in range(12)]
    values = [kv_of(tokens, number, layout) for number, tokens in enumerate(prompts)]

    with opened(tmp_root, keys) as (member, store), opened(tmp_root, reading) as (other_member, other):
        caches = [each.namespace("model", layout, tenant=TENANT) for each in (store, other)]
        for tokens, kv in zip(prompts[:6], values[:6], strict=True):
            caches[0].put(tokens, kv)
        put_count = [6]

        def get(which: int) -> None:
            generator = np.random.default_rng(which)
            while not stop.is_set():
                number = int(generator.integers(put_count[0]))
                (member if which == 0 else other_member).node.forget()
                count, array = caches[which].get(prompts[number])
                if count != len(prompts[number]) or not same(array, values[number]):
                    troubles.append(f"{count} tokens of prompt {number}")
                rounds[which] += 1

        def guarded(work: Callable[[int], None], which: int) -> None:
            try:
                work(which)
            except (KVStoreError, OSError, AssertionError) as error:
                troubles.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(get, which)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for turn in range(1, 5):
            # As ENCODINGS.md says: the new key on every node, then current, then existing chunks are recoded.
            _rotate(tmp_path / "keys.json", f"key-{turn - 1}", f"key-{turn}", (keys, reading))
            for number in range(put_count[0], min(put_count[0] + 2, len(prompts))):
                caches[0].put(prompts[number], values[number])
                put_count[0] = number + 1
            act = [Recoding.COMPRESS, Recoding.REENCRYPT, Recoding.DECOMPRESS, Recoding.REENCRYPT][turn - 1]
            node = (member if turn % 2 else other_member).node
            outcomes = [recode(node, name, act).outcome for name in names_of(tmp_root)]
            assert set(outcomes) <= {Outcome.REWRITTEN, Outcome.KEPT}
            wanted = keys.ring.current[TENANT]
            assert wanted is not None
            assert {decode_any(path.read_bytes()).key_id for path in chunk_files(tmp_root)} == {wanted.id}
            # Gets go on beside each turn, however slow the machine.
            eventually(lambda reads=6 * turn: troubles or min(rounds) >= reads)  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert troubles == [] and min(rounds) > 20
        for each in (store, other):
            stats = each.stats()
            assert stats["miss_damaged"] == stats["miss_key"] == stats["miss_absent"] == 0
    # The old keys are no longer needed.
    with opened(tmp_root, key_file(tmp_path / "last.json", "key-4")) as (_, store):
        cache = store.namespace("model", layout, tenant=TENANT)
        for tokens, kv in zip(prompts, values, strict=True):
            count, array = cache.get(tokens)
            assert count == len(tokens) and same(array, kv)


def _rotate(path: Path, old: str, new: str, files: tuple[KeyFile, ...]) -> None:
    """Rotates the keys and waits for each node: while one thread reloads the file, others use the old keys."""
    key_file(path, old, new)
    eventually(lambda: all(len(each.ring.by_id) == 2 for each in files))
    key_file(path, new, old)
    wanted = Key(new, secret(new))
    eventually(lambda: all(each.ring.current[TENANT] == wanted for each in files))


def test_small_files_of_one_page_are_not_worth_it(tmp_root: Path) -> None:
    with opened(tmp_root) as (member, store):
        cache = store.namespace("tiny", TINY)
        tokens = np.arange(8)
        cache.put(tokens, kv_of(tokens, 0, TINY))
        assert all_recoded(member, tmp_root, Recoding.COMPRESS) == {Outcome.KEPT}
