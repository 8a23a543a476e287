"""A chunk file that cannot be read is renamed away, and the next put repairs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Store
from kvstore.engine.chunk_store import FAILURES_MAX
from kvstore.errors import PermissionDenied
from kvstore.format.header import decode_any
from kvstore.format.places import QUARANTINE, Name
from tests.kit.faulty_root import EACCES, EIO, EROFS, Fails, FaultyRoot, Rule
from tests.kit.stores import TINY, chunk_files, kv_of, same

TOKENS = np.arange(6 * TINY.chunk_tokens)
KV = kv_of(TINY, TOKENS)
OTHER = TOKENS + 1000
STRIKES = [("open", EIO), ("read", EIO)]


def filled(store: Store) -> Cache:
    cache = store.namespace("m", TINY)
    cache.put(TOKENS, KV)
    cache.put(OTHER, kv_of(TINY, OTHER))
    return cache


def third_of(root: Path) -> Path:
    """The third chunk of one of the prompts."""
    return next(path for path in chunk_files(root) if decode_any(path.read_bytes()).depth == 2)


def name_of(root: Path, path: Path) -> Name:
    return Name(str(path.relative_to(root)))


def gets(cache: Cache) -> list[int]:
    return [cache.get(tokens)[0] for tokens in (TOKENS, OTHER)]


@pytest.mark.parametrize(("operation", "fault"), STRIKES)
def test_a_file_that_nobody_can_read_is_repaired_by_the_next_put(
    store: Store, root: FaultyRoot, tmp_root: Path, operation: str, fault: Fails
) -> None:
    cache = filled(store)
    wrong = third_of(tmp_root)
    old = wrong.stat().st_ino
    root.set_rules([Rule(operation, fault, _is_inode(tmp_root, old))])
    found = gets(cache)
    assert sorted(found) == [2 * TINY.chunk_tokens, len(TOKENS)], "a miss at first"
    tokens = TOKENS if found[0] < len(TOKENS) else OTHER
    for _ in range(2):
        assert cache.put(tokens, kv_of(TINY, tokens)).tokens_present == len(tokens)
    assert wrong.stat().st_ino != old, "written anew"
    assert [path.stat().st_ino for path in (tmp_root / QUARANTINE).iterdir()] == [old]
    assert gets(cache) == [len(TOKENS)] * 2 and same(cache.get(tokens)[1], kv_of(TINY, tokens))


def _is_inode(root: Path, inode: int) -> Callable[[Name], bool]:
    """True if a name is that of one file, wherever it was moved."""

    def is_it(name: Name) -> bool:
        path = root / name
        return path.is_file() and path.stat().st_ino == inode

    return is_it


def test_a_failure_that_passes_costs_a_miss_and_moves_nothing(store: Store, root: FaultyRoot, tmp_root: Path) -> None:
    cache = filled(store)
    wrong = third_of(tmp_root)
    root.set_rules([Rule("read", EIO, _is_inode(tmp_root, wrong.stat().st_ino), times=FAILURES_MAX - 1)])
    assert sorted(gets(cache)) == [2 * TINY.chunk_tokens, len(TOKENS)]
    assert gets(cache) == [len(TOKENS)] * 2
    assert wrong.exists() and not [*(tmp_root / "quarantine").glob("*")]


def test_a_file_that_can_neither_be_read_nor_moved_is_an_error_of_puts(
    store: Store, root: FaultyRoot, tmp_root: Path
) -> None:
    cache = filled(store)
    wrong = name_of(tmp_root, third_of(tmp_root))
    root.set_rules([Rule("open", EIO, lambda name: name == wrong), Rule("move", EROFS)])
    found = gets(cache)
    tokens = TOKENS if found[0] < len(TOKENS) else OTHER
    for _ in range(3):
        with pytest.raises(PermissionDenied, match=r"cannot be read.*cannot be set aside"):
            cache.put(tokens, kv_of(TINY, tokens))
        assert cache.match(tokens) < len(tokens) or cache.get(tokens)[0] < len(tokens)
    root.set_rules([])
    assert cache.put(tokens, kv_of(TINY, tokens)).chunks_written == 0
    assert gets(cache) == [len(TOKENS)] * 2


def test_file_of_another_user_stays_and_fails_puts(store: Store, root: FaultyRoot, tmp_root: Path) -> None:
    cache = filled(store)
    wrong = third_of(tmp_root)
    root.set_rules([Rule("open", EACCES, lambda name: name == name_of(tmp_root, wrong))])
    tokens = TOKENS if gets(cache)[0] < len(TOKENS) else OTHER
    for _ in range(FAILURES_MAX):
        with pytest.raises(PermissionDenied, match=r"cannot be read.*fix its permissions"):
            cache.put(tokens, kv_of(TINY, tokens))
    assert wrong.exists() and not [*(tmp_root / "quarantine").glob("*")]
