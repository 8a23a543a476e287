"""Encrypted and compressed chunks through a node: every read returns what was put, and no file shows any of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.codec.codec import KeyFile
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.settings import NO_TIERS, TierSettings
from kvstore.format.header import Encoding, decode_any, is_encoded
from kvstore.format.places import Name
from kvstore.fsck.check import Options, fsck
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from tests.kit.cases import for_each
from tests.kit.keyed import LAYOUT, TENANT, key_file, kv_of, write_keys
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import chunk_files, flip, member_on, same

COUNT = 5
TOKENS = np.arange(1_000_000, 1_000_000 + COUNT * LAYOUT.chunk_tokens)
KV = kv_of(TOKENS)
BLOCK_KEYS = [np.random.default_rng(100 + number).bytes(32) for number in range(3)]
BLOCKS = [np.random.default_rng(number).bytes(5000) for number in range(3)]
WINDOW = 12
"""Bytes of plain text that are looked for; by chance so many come nowhere."""


@contextmanager
def opened(
    root: Root | Path, keys: KeyFile | None = None, settings: TierSettings = NO_TIERS, *, compress: bool = False
) -> Iterator[tuple[ClusterMember, Store]]:
    found = PosixRoot(root) if isinstance(root, Path) else root
    member = member_on(found, tiers=settings, keys=keys, compress=compress)
    with Store(LocalTransport(member)) as store:
        yield member, store


def namespace(store: Store, tenant: str = TENANT) -> Cache:
    return store.namespace("model", LAYOUT, tenant=tenant)


def put_all(store: Store, tenant: str = TENANT) -> Cache:
    cache = namespace(store, tenant)
    assert cache.put(TOKENS, KV).chunks_written == COUNT
    assert cache.blocks.put(BLOCK_KEYS, [bytearray(block) for block in BLOCKS]) == [True] * 3
    return cache


def reads_right(cache: Cache) -> None:
    """Every way in which a caller reads."""
    assert cache.match(TOKENS) == len(TOKENS)
    count, array = cache.get(TOKENS)
    assert count == len(TOKENS) and same(array, KV)
    with cache.hold(TOKENS) as hold:
        views = hold.view()
        assert same(np.concatenate(views, axis=2), KV) and not any(view.flags.writeable for view in views)
        for layer, k, v in hold.layers():
            assert same(k, np.ascontiguousarray(KV[layer, 0])) and same(v, np.ascontiguousarray(KV[layer, 1]))
    buffers = [bytearray(len(block)) for block in BLOCKS]
    assert cache.blocks.match(BLOCK_KEYS) == 3
    assert cache.blocks.get(BLOCK_KEYS, buffers) == [True] * 3 and buffers == [bytearray(block) for block in BLOCKS]
    assert cache.blocks.get(BLOCK_KEYS[:1], [bytearray(17)]) == [False]


def windows() -> list[bytes]:
    """Returns pieces of what was put: of every section of every chunk, of the tokens, of the blocks and their keys."""
    found = [
        TOKENS.astype("<u4").tobytes()[at : at + WINDOW] for at in range(0, 4 * len(TOKENS), 4 * LAYOUT.chunk_tokens)
    ]
    found += [key[:WINDOW] for key in BLOCK_KEYS] + [block[1000 : 1000 + WINDOW] for block in BLOCKS]
    for chunk in range(COUNT):
        part = KV[:, :, chunk * LAYOUT.chunk_tokens : (chunk + 1) * LAYOUT.chunk_tokens]
        for section in part.reshape(2 * LAYOUT.layers, -1):
            raw = section.tobytes()
            found += [raw[:WINDOW], raw[len(raw) // 2 :][:WINDOW], raw[-WINDOW:]]
    return found


def shows_plain_text(folder: Path) -> list[Path]:
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [path for path, content in contents.items() if any(window in content for window in windows())]


def names_of(root: Path) -> list[Name]:
    return [Name(str(path.relative_to(root))) for path in chunk_files(root)]


def test_an_encrypted_tenant_reads_all_and_its_files_show_nothing(tmp_root: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.json", "a")
    with opened(tmp_root, keys) as (member, store):
        reads_right(put_all(store))
        assert shows_plain_text(tmp_root) == []
        assert all(decode_any(path.read_bytes()).encoding == Encoding.ENCRYPTED for path in chunk_files(tmp_root))
        assert member.stats()["keys_known"] == 1
        assert namespace(store).put(TOKENS, KV).chunks_found == COUNT
    with opened(tmp_root, key_file(tmp_path / "keys.json", "b", "a")) as (_, store):
        reads_right(namespace(store))


@pytest.mark.parametrize("key", [None, "a"])
def test_a_compressing_node_writes_smaller_files(tmp_root: Path, tmp_path: Path, key: str | None) -> None:
    with opened(tmp_root, key_file(tmp_path / "keys.json", key), compress=True) as (_, store):
        reads_right(put_all(store))
        saved_bytes = store.stats()["compressed_saved_bytes"]
        assert namespace(store).put(TOKENS, KV).chunks_found == COUNT
    headers = [decode_any(path.read_bytes()) for path in chunk_files(tmp_root)]
    chunks = [each for each in headers if each.section_bytes == LAYOUT.section_bytes]
    assert {each.encoding for each in chunks} == {Encoding.COMPRESSED | (Encoding.ENCRYPTED if key else Encoding.PLAIN)}
    # Blocks of noise do not get smaller.
    assert {each.encoding for each in headers} - {each.encoding for each in chunks} == {
        Encoding.ENCRYPTED if key else Encoding.PLAIN
    }
    assert 0 < saved_bytes < KV.nbytes
    with opened(tmp_root, key_file(tmp_path / "keys.json", key)) as (_, store):
        reads_right(namespace(store))


def test_other_tenants_have_files_of_version_1(tmp_root: Path, tmp_path: Path) -> None:
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a")) as (_, store):
        reads_right(put_all(store, tenant="other"))
        assert not any(is_encoded(path.read_bytes()) for path in chunk_files(tmp_root))


@for_each("known", ["none", "another"])
def test_a_key_that_is_not_known_is_a_miss_and_nothing_is_set_aside(tmp_root: Path, tmp_path: Path, known: str) -> None:
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a")) as (_, store):
        put_all(store)
    keys = key_file(tmp_path / "keys.json", "b") if known == "another" else None
    before = chunk_files(tmp_root)
    with opened(tmp_root, keys) as (_, store):
        cache = namespace(store)
        assert cache.match(TOKENS) == 0 and cache.get(TOKENS)[0] == 0
        assert cache.blocks.get(BLOCK_KEYS, [bytearray(5000) for _ in range(3)]) == [False] * 3
        assert cache.put(TOKENS, KV).chunks_written == 0, "the name is taken"
        assert cache.match(TOKENS) == 0 and store.stats()["known_chunks"] == 0, "what it met is not promised"
        stats = store.stats()
        assert stats["miss_key"] >= 3 and stats["miss_damaged"] == 0
    assert chunk_files(tmp_root) == before and not any((tmp_root / "quarantine").glob("*"))
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a")) as (_, store):
        reads_right(namespace(store))


@for_each("compress", [False, True])
def test_a_flipped_bit_is_a_miss_is_set_aside_and_is_put_again(tmp_root: Path, tmp_path: Path, compress: bool) -> None:
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a"), compress=compress) as (member, store):
        cache = put_all(store)
        path = next(path for path in chunk_files(tmp_root) if decode_any(path.read_bytes()).depth == 2)
        for at in (0, 13, 110, 125, 200, path.stat().st_size - 5):
            content = bytearray(path.read_bytes())
            content[at] ^= 4
            path.write_bytes(content)
            member.node.forget()
            assert cache.get(TOKENS)[0] <= 2 * LAYOUT.chunk_tokens
            assert not path.exists(), f"byte {at}: set aside"
            assert cache.put(TOKENS, KV).chunks_written == 1
            assert cache.get(TOKENS)[0] == len(TOKENS)


def test_fsck_verifies_encrypted_files_without_a_key(tmp_root: Path, tmp_path: Path) -> None:
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a")) as (member, store):
        put_all(store)
        identity = member.node.identity
    report = fsck(PosixRoot(tmp_root), identity)
    assert report.problems_count == 0 and report.chunks_count == COUNT + 3
    path = chunk_files(tmp_root)[3]
    flip(path)
    assert fsck(PosixRoot(tmp_root), identity, Options(repair=True)).problems_count == 1
    assert not path.exists()


@pytest.mark.slow
def test_the_local_disk_has_no_plain_text_and_gives_it_back_after_a_restart(tmp_root: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    settings = TierSettings.of(16 << 20, (str(disk), 64 << 20), "through")
    for round_ in range(2):
        with opened(tmp_root, key_file(tmp_path / "keys.json", "a"), settings) as (member, store):
            cache = put_all(store) if not round_ else namespace(store)
            chain = member.node.chains.of(cache.namespace, TOKENS.astype(np.uint32))
            tiers = member.node.tiers
            assert tiers is not None and tiers.disk is not None
            if not round_:
                assert cache.prefetch(TOKENS, "disk").wait(PATIENCE_S)
                with tiers.memory.refer(chain, 0, COUNT) as slots:
                    tiers.memory.evict([*reversed(slots.referred)])
            else:
                while tiers.disk.stats()["disk_refilling"]:
                    pass
            assert tiers.disk.leading(chain, 0) == COUNT
            for path in chunk_files(tmp_root):
                path.unlink()  # only the disk has them
            member.node.forget()
            count, array = cache.get(TOKENS)
            assert count == len(TOKENS) and same(array, KV)
            assert store.stats()["disk_hits"] >= COUNT
        assert shows_plain_text(disk) == [] and shows_plain_text(tmp_root) == []
    with opened(tmp_root, None, settings) as (member, store):
        tiers = member.node.tiers
        assert tiers is not None and tiers.disk is not None
        while tiers.disk.stats()["disk_refilling"]:
            pass
        assert tiers.disk.stats()["disk_entries"] == 0, "a cache of what nobody here can read is let go"


def test_a_tenant_that_is_listed_while_a_node_runs_is_encrypted_from_then_on(tmp_root: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.json", "a", tenant="somebody")
    with opened(tmp_root, keys) as (_, store):
        half = TOKENS[: 2 * LAYOUT.chunk_tokens]
        cache = namespace(store)
        cache.put(half, KV[:, :, : len(half)])
        write_keys(tmp_path / "keys.json", None, "a", tenant="somebody")
        assert keys.ring.current
        write_keys(tmp_path / "keys.json", "b")
        cache.put(TOKENS, KV)
        encoded = [is_encoded(path.read_bytes()) for path in chunk_files(tmp_root)]
        assert sorted(encoded) == [False] * 2 + [True] * 3
        count, array = cache.get(TOKENS)
        assert count == len(TOKENS) and same(array, KV)
        with cache.hold(TOKENS) as hold:
            assert same(np.concatenate(hold.view(), axis=2), KV)


def mapped_chunk_files() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/chunks/" in line]


def test_files_of_an_encrypted_tenant_are_never_mapped(tmp_root: Path, tmp_path: Path) -> None:
    with opened(tmp_root) as (_, store):
        half = TOKENS[: 2 * LAYOUT.chunk_tokens]
        namespace(store).put(half, KV[:, :, : len(half)])
        with namespace(store).hold(half) as hold:
            views: list[npt.NDArray[np.generic]] = hold.view()
            assert mapped_chunk_files(), "this is how a mapped file shows"
        del views
    with opened(tmp_root, key_file(tmp_path / "keys.json", "a")) as (_, store):
        cache = namespace(store)
        cache.put(TOKENS, KV)
        with cache.hold(TOKENS) as hold:
            views = hold.view()
            assert len(views) == COUNT and not mapped_chunk_files(), (
                "the plain ones from before no more than the others"
            )
