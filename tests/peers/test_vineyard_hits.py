"""Defects 1 to 4 of Vineyard's file mode (0.24.2), wrong hits, and the tests that show this store free of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout, errors
from kvstore.address import Chain
from kvstore.client import Cache, Store
from tests.kit.peers import (
    CHUNK,
    LAYOUT,
    file_of,
    files_under,
    is_kv_of,
    kv_of,
    open_cache,
    prompt,
)

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first bit of the payload": lambda file: file[:4096] + bytes([file[4096] ^ 1]) + file[4097:],
    "last bit of the payload": lambda file: file[:-1] + bytes([file[-1] ^ 0x80]),
    "a token in the header": lambda file: file[:128] + bytes([file[128] ^ 2]) + file[129:],
    "truncated by one byte": lambda file: file[:-1],
    "truncated to its header": lambda file: file[:4096],
    "truncated to half its header": lambda file: file[:2048],
    "empty": lambda file: b"",
    "zero-filled": lambda file: bytes(len(file)),
    "payload zero-filled": lambda file: file[:4096] + bytes(len(file) - 4096),
    "longer than it was": lambda file: file + b"\0",
}


# 1. Bit-flipped, truncated and zero-filled files came back as full hits; an update did not repair them.


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True], ids=["same store", "restarted"])
def test_1_a_damaged_file_is_a_miss_and_the_next_put_repairs_it(tmp_root: Path, damage: str, restarted: bool) -> None:
    tokens = prompt(1)
    store, cache = open_cache(tmp_root)
    cache.put(tokens, kv_of(tokens))
    path = file_of(tmp_root, cache, tokens, 1)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if restarted:
        store.close()
        store, cache = open_cache(tmp_root)
    with store:
        matched, kv = cache.get(tokens)
        assert matched == CHUNK
        assert is_kv_of(kv, tokens[:CHUNK])
        assert cache.match(tokens) == CHUNK
        assert store.stats()["miss_damaged"] == 1
        repaired = cache.put(tokens, kv_of(tokens))
        assert (repaired.tokens_present, repaired.chunks_written, repaired.chunks_found) == (12, 1, 2)
        matched, kv = cache.get(tokens)
        assert matched == 12
        assert is_kv_of(kv, tokens)


@pytest.mark.parametrize("damage", ["truncated by one byte", "empty", "longer than it was"])
def test_1_a_put_alone_repairs_a_file_of_the_wrong_size(tmp_root: Path, cache: Cache, damage: str) -> None:
    """Vineyard's update compared the tokens at the front, and left truncated and empty files as they were."""
    tokens = prompt(1)
    cache.put(tokens, kv_of(tokens))
    path = file_of(tmp_root, cache, tokens, 2)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert cache.put(tokens, kv_of(tokens)).chunks_written == 1
    matched, kv = cache.get(tokens)
    assert matched == 12
    assert is_kv_of(kv, tokens)


# 2. Another layer count, tensor size or chunk size on the same root gave garbage hits.

OTHER_LAYOUTS = {
    "layers": Layout(4, 2, 8, "float16", CHUNK),
    "fewer layers": Layout(1, 2, 8, "float16", CHUNK),
    "tensor size": Layout(2, 2, 16, "float16", CHUNK),
    "heads": Layout(2, 4, 8, "float16", CHUNK),
    "type of the same size": Layout(2, 2, 8, "bfloat16", CHUNK),
    "chunk size": Layout(2, 2, 8, "float16", 2 * CHUNK),
    "the same bytes in another shape": Layout(2, 4, 4, "float16", CHUNK),
}


@pytest.mark.parametrize("difference", OTHER_LAYOUTS)
def test_2_another_layout_under_one_name_is_refused(store: Store, cache: Cache, difference: str) -> None:
    cache.put(prompt(1), kv_of(prompt(1)))
    with pytest.raises(errors.LayoutMismatch, match="another name"):
        store.namespace("model", OTHER_LAYOUTS[difference])


@pytest.mark.parametrize("difference", OTHER_LAYOUTS)
def test_2_another_layout_on_one_root_is_a_miss(store: Store, cache: Cache, difference: str) -> None:
    tokens = prompt(1, 4)
    cache.put(tokens, kv_of(tokens))
    layout = OTHER_LAYOUTS[difference]
    other = store.namespace("another model", layout)
    assert (other.match(tokens), other.get(tokens)[0]) == (0, 0)
    other.put(tokens, kv_of(tokens, layout))
    assert is_kv_of(other.get(tokens)[1], tokens, layout)
    assert is_kv_of(cache.get(tokens)[1], tokens)


@pytest.mark.parametrize(
    "difference", [{"fingerprint": "other weights"}, {"tenant": "b"}, {"attributes": {"rank": "1"}}]
)
def test_2_other_weights_tenants_and_ranks_are_misses(store: Store, cache: Cache, difference: dict[str, str]) -> None:
    """Vineyard's key had nothing in it but the tokens."""
    cache.put(prompt(1), kv_of(prompt(1)))
    assert store.namespace("model", LAYOUT, **difference).match(prompt(1)) == 0  # type: ignore[arg-type]


# 3. A collision of two prompts' keys (32 bits) made update delete the other prompt's entry and store nothing.


def test_3_no_collision_among_as_many_chunks_as_gave_vineyard_ten(cache: Cache) -> None:
    tokens = np.random.default_rng(3).integers(0, 150_000, 300_000 * CHUNK, dtype=np.uint32)
    halves = np.split(tokens, 2)  # one prompt has at most 262,144 chunks
    addresses = [address for half in halves for address in Chain.of(cache.namespace, half).addresses]
    assert len(addresses) == 300_000
    assert len(set(addresses)) == 300_000
    assert all(len(address) == 16 for address in addresses)


def test_3_an_entry_of_another_prompt_under_our_key_is_a_miss_and_costs_nobody_an_entry(
    tmp_root: Path, cache: Cache
) -> None:
    """A collision cannot be made, so another prompt's file is put where a collision would have put it."""
    ours, theirs = prompt(1), prompt(2)
    cache.put(ours, kv_of(ours))
    cache.put(theirs, kv_of(theirs))
    shutil.copyfile(file_of(tmp_root, cache, theirs, 0), file_of(tmp_root, cache, ours, 0))
    assert cache.get(ours)[0] == 0
    assert cache.put(ours, kv_of(ours)).tokens_present == 12
    for tokens in (ours, theirs):
        matched, kv = cache.get(tokens)
        assert matched == 12
        assert is_kv_of(kv, tokens)


# 4. Where a prefix chunk was missing, update with that prefix deleted the valid chunks after it.


def test_4_a_put_behind_a_missing_prefix_chunk_stores_nothing_and_deletes_nothing(tmp_root: Path, cache: Cache) -> None:
    tokens = prompt(1, 5)
    cache.put(tokens[:16], kv_of(tokens[:16]))
    gone = file_of(tmp_root, cache, tokens, 1)
    gone.unlink()
    before = files_under(tmp_root / "chunks")
    result = cache.put(tokens, kv_of(tokens, skip=16), prefix=16)
    assert (result.tokens_present, result.chunks_written) == (4, 0)
    assert files_under(tmp_root / "chunks") == before
    whole = cache.put(tokens, kv_of(tokens))
    assert (whole.tokens_present, whole.chunks_written, whole.chunks_found) == (20, 2, 3)
    matched, kv = cache.get(tokens)
    assert matched == 20
    assert is_kv_of(kv, tokens)


def test_4_a_chunk_behind_a_hole_is_no_hit(tmp_root: Path) -> None:
    tokens = prompt(1, 5)
    store, cache = open_cache(tmp_root)
    with store:
        cache.put(tokens, kv_of(tokens))
        file_of(tmp_root, cache, tokens, 0).unlink()
    store, cache = open_cache(tmp_root)
    with store:
        assert cache.match(tokens) == 0
        assert cache.get(tokens)[0] == 0
