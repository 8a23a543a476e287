"""Which engine-hashed blocks are there: native code looks for many in one call, and Python for what is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore.client.cache import BlockCache
from kvstore.client.store import Store
from kvstore.codec.image import ChunkRun
from kvstore.core.address import block_addresses
from kvstore.format.keyset import Mask
from kvstore.format.places import Name
from kvstore.native import is_available, library
from kvstore.root.interface import Stat
from kvstore.root.posix import PosixRoot
from tests.kit.native_modes import chunks_of, opened
from tests.kit.stores import TINY, member_of

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


def some_blocks(root: Path) -> tuple[list[bytes], list[bool]]:
    """Keys, and which of them have a file: blocks of many sizes, holes between them, and a folder instead of one."""
    keys = [bytes([at]) * (16 + at % 3) for at in range(90)]
    with opened(root, native=True) as store:
        blocks = store.namespace("m", TINY).blocks
        assert all(blocks.put(keys, [np.full(1 + 97 * at, at, np.uint8) for at in range(len(keys))]))
        namespace = blocks._namespace
        names = [chunks_of(store).name(each, namespace.id) for each in block_addresses(namespace, keys)]
    there = [at not in (40, 41, 60, 89) for at in range(len(keys))]
    for name, is_there in zip(names, there, strict=True):
        if not is_there:
            (root / str(name)).unlink()
    (root / str(names[60])).mkdir()
    return keys, there


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_blocks_are_found_whatever_their_size(tmp_root: Path, native: bool) -> None:
    keys, there = some_blocks(tmp_root)
    for ask in ("present", "hold", "match", "some"):
        with opened(tmp_root, native=native) as store:  # opened anew, it remembers nothing
            blocks = store.namespace("m", TINY).blocks
            if ask == "present":
                assert blocks.present(keys) == there
                assert blocks.present(keys) == there, "remembered"
            elif ask == "hold":
                with blocks.hold(keys) as hold:
                    assert hold.present == there
            elif ask == "match":
                assert (blocks.match(keys), blocks.match(keys[42:]), blocks.match(keys[40:])) == (40, 18, 0)
            else:
                assert blocks.present(keys[30:50]) == there[30:50]
                assert blocks.present(keys) == there, "some are remembered"
            assert store.stats()["miss_unreadable"] == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that Python looks at by themselves."""
    names, stat = list[str](), PosixRoot.stat

    def noted(root: PosixRoot, name: Name) -> Stat | None:
        names.append(str(name))
        return stat(root, name)

    monkeypatch.setattr(PosixRoot, "stat", noted)
    return names


def forgetful(store: Store) -> BlockCache:
    """Blocks of a root whose client may believe that a file is absent which is there."""
    chunks = chunks_of(store)
    assert chunks._files is not None and chunks._files.knows_absence
    chunks._files = replace(chunks._files, knows_absence=False)
    return store.namespace("m", TINY).blocks


def test_absence_is_believed_only_where_it_is_certain(tmp_root: Path, asked: list[str]) -> None:
    keys, there = some_blocks(tmp_root)
    with opened(tmp_root, native=True) as store:
        blocks, chunks = store.namespace("m", TINY).blocks, chunks_of(store)
        namespace = blocks._namespace
        names = [str(chunks.name(each, namespace.id)) for each in block_addresses(namespace, keys)]
        del asked[:]
        assert blocks.present(keys) == there
        assert asked == [names[60]], "a folder is asked for again in any case"
    with opened(tmp_root, native=True) as store:
        blocks = forgetful(store)
        del asked[:]
        assert blocks.present(keys) == there
        assert sorted(asked) == sorted(names[at] for at in (40, 41, 60, 89))
        del asked[:]
        assert blocks.match(keys[40:42]) == 0
        assert names[40] in asked


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code finds some files absent that are there, as a client of NFS does."""
    look = ChunkRun.look

    def late(run: ChunkRun, start: int, stop: int) -> tuple[Mask, npt.NDArray[np.int64]]:
        look(run, start, stop)
        part = run.items[start - run.first : stop - run.first]
        part["status"][1::7] = library.ABSENT
        found: Mask = part["status"] == library.FOUND
        return found, part["mtime_ns"][found]

    monkeypatch.setattr(ChunkRun, "look", late)


def test_a_block_that_only_a_second_look_finds_is_there(tmp_root: Path, asked: list[str], late: None) -> None:
    keys, there = some_blocks(tmp_root)
    with opened(tmp_root, native=True) as store:
        blocks = forgetful(store)
        assert blocks.present(keys) == there and asked
        assert blocks.match(keys) == 40


@pytest.mark.parametrize("memory", [0, 64 << 20], ids=["root", "memory"])
def test_h1_condemned_blocks_count_as_absent(tmp_root: Path, memory: int) -> None:
    keys, there = some_blocks(tmp_root)
    with kvstore.open(tmp_root, memory=memory) as store:
        blocks = store.namespace("m", TINY).blocks
        condemned = set(block_addresses(blocks._namespace, [keys[5], keys[70]]))
        found = [np.zeros(1 + 97 * at, np.uint8) for at in range(len(keys))]
        assert blocks.get(keys, found) == there, "it may be in memory now"
        host = member_of(store).host
        assert host is not None
        host.shared.append(b"".join(condemned))  # a batch that is not settled
        left = [is_there and at not in (5, 70) for at, is_there in enumerate(there)]
        assert blocks.present(keys) == left and blocks.match(keys) == 5
        member_of(store).node.store.known.clear()
        assert blocks.present(keys) == left
        assert (blocks.match(keys), blocks.match(keys[61:])) == (5, 9)


def test_h1_what_is_condemned_while_somebody_looks_is_not_remembered(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = some_blocks(tmp_root)
    with opened(tmp_root, native=True) as store:
        blocks, known = store.namespace("m", TINY).blocks, chunks_of(store).known
        addresses, look = block_addresses(blocks._namespace, keys), ChunkRun.look

        def condemned(run: ChunkRun, start: int, stop: int) -> tuple[Mask, npt.NDArray[np.int64]]:
            found = look(run, start, stop)
            known.forget_each(b"".join(addresses))
            return found

        monkeypatch.setattr(ChunkRun, "look", condemned)
        assert any(blocks.present(keys))
        assert not known.present(addresses, chunks_of(store).known.quantum()).any()
