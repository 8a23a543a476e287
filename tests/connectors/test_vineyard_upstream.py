"""Vineyard's own tests (modules/llm-cache/tests), written again on the calls that its users have.

Its garbage collection is in test_vineyard_collection.py. Left out: memory figures of its blobs, serialised radix trees.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvstore.connectors.vineyard import FileCacheConfig, KVCache, VineyardCacheConfig
from tests.kit.tensors import asking, bytes_in, kv_of, over

ROUNDS = (
    [*range(1, 70)],
    [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14],
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [1, 3, 4, 2, 5, 6],
)
"""Overlapping prompts, as kv_cache_test and kv_cache_local_file_test use them."""


def files_of(root: Path, chunk: int, size: int = 80, layers: int = 3) -> KVCache:
    return KVCache(FileCacheConfig(chunk_size=chunk, root=str(root)), size, layer=layers)


def blob_of(root: Path, size: int = 80, layers: int = 3, capacity: int = 20) -> KVCache:
    return KVCache(VineyardCacheConfig(str(root / "v.sock"), block_size=5), size, capacity, layers)


def test_hash_tokens_fewer_than_a_chunk_have_no_chunk(tmp_root: Path) -> None:
    with files_of(tmp_root, 16) as cache, pytest.raises(RuntimeError, match="multiple of chunk_size"):
        cache.update(None, [*range(15)], over(kv_of(range(15), 3, 80)))
    with files_of(tmp_root, 16) as cache:
        assert cache.query(None, [*range(15)], over(np.zeros((15, 3, 2, 80), np.uint8))) == 0


def test_hash_a_hundred_tokens_in_chunks_of_sixteen_are_six(tmp_root: Path) -> None:
    tokens = [*range(100)]
    with files_of(tmp_root, 16) as cache:
        assert cache.update(None, tokens[:96], over(kv_of(tokens[:96], 3, 80))) == 96
        assert len([*(tmp_root / "chunks").rglob("*.*")]) == 6
        for length, matched in ((100, 96), (17, 16), (18, 16)):
            assert cache.query(None, tokens[:length], over(np.zeros((length, 3, 2, 80), np.uint8))) == matched


def test_hash_the_same_tokens_have_the_same_place_in_every_instance(tmp_root: Path) -> None:
    random = Random(0)
    prompts = [[random.randrange(2**31) for _ in range(random.randrange(2, 40) // 2 * 2)] for _ in range(100)]
    with files_of(tmp_root, 2, 8, 1) as writer, files_of(tmp_root, 2, 8, 1) as reader:
        for prompt in filter(None, prompts):
            kv = kv_of(prompt, 1, 8)
            assert writer.update(None, prompt, over(kv)) == len(prompt)
            out = np.zeros_like(kv)
            assert reader.query(None, prompt, over(out)) == len(prompt)
            assert np.array_equal(out, kv)


def test_radix_tree_of_growing_prefixes(tmp_root: Path) -> None:
    """Ten prefixes, each one token longer; nothing is evicted, and each is found again."""
    tokens = [*range(10)]
    kv = kv_of(tokens, 3, 80)
    with blob_of(tmp_root, capacity=10) as cache:
        for end in range(1, 11):
            assert cache.update(tokens[: end - 1], tokens[end - 1 : end], over(kv[end - 1 : end])) == 1
        for end in range(1, 11):
            asked = asking(end, 3)
            assert cache.query(None, tokens[:end], asked) == end
            assert np.array_equal(bytes_in(asked), kv[:end])


def test_radix_tree_insert_behind_an_absent_prefix_and_query_of_an_absent_one(tmp_root: Path) -> None:
    with blob_of(tmp_root) as cache:
        assert cache.update([1, 2, 3], [4], over(kv_of([1, 2, 3, 4], 3, 80, skip=3))) == 0
        assert cache.query(None, [1, 2, 3, 4], asking(4, 3)) == 0
        assert cache.query([1, 2, 3], [4], asking(1, 3)) == 0


def test_blob_two_clients_overlapping_rounds_token_by_token(tmp_root: Path) -> None:
    """kv_cache_test: query the next token; a miss is updated, a hit compared. Then all again, by both."""
    with blob_of(tmp_root) as one, blob_of(tmp_root) as two:
        hits = 0
        for turn in range(2):
            for tokens in ROUNDS:
                kv = kv_of(tokens, 3, 80)
                for at in range(len(tokens)):
                    cache = (one, two)[at % 2]
                    asked = asking(1, 3)
                    if cache.query(tokens[:at], tokens[at : at + 1], asked):
                        hits += 1
                        assert np.array_equal(bytes_in(asked)[0], kv[at])
                    else:
                        assert turn == 0, "stored in the first turn"
                        assert cache.update(tokens[:at], tokens[at : at + 1], over(kv[at : at + 1])) == 1
        shared = 5 + 9 + 1  # of rounds 2 to 4 with those before
        assert hits == shared + sum(map(len, ROUNDS))


def test_local_file_overlapping_rounds_and_a_new_instance(tmp_root: Path) -> None:
    """kv_cache_local_file_test: chunks of four; each round is updated and queried; then again by a new instance."""
    for _ in range(2):
        with files_of(tmp_root, 4) as cache:
            for tokens in ROUNDS:
                whole = tokens[: len(tokens) // 4 * 4]
                kv = kv_of(whole, 3, 80)
                assert cache.update(None, whole, over(kv)) == len(whole)
                out = np.zeros((len(tokens), 3, 2, 80), np.uint8)
                assert cache.query(None, tokens, over(out)) == len(whole)
                assert np.array_equal(out[: len(whole)], kv)


def test_llm_batched_round_trip(tmp_root: Path) -> None:
    """test_llm.py's third case; its arrays were compared and the result thrown away."""
    tokens = [1, 2, 3, 4]
    k, v = np.random.default_rng(1).random((2, 4, 2, 2, 2), dtype=np.float32)
    stored = np.stack([k, v], axis=2).view(np.uint8).reshape(4, 2, 2, 16)
    with files_of(tmp_root, 2, 16, 2) as cache:
        assert cache.batched_update(tokens, over(stored)) == 4
        out = np.zeros_like(stored)
        assert cache.batched_query(tokens, over(out)) == 4
        assert np.array_equal(out, stored)


def test_reference_counts_what_one_client_drops_stays_for_the_other(tmp_root: Path) -> None:
    """refcnt_map_test: two clients with overlapping prefixes; blocks go when nobody's tree has them."""
    prompts = [1, 2, 3, 4, 5], [1, 2, 4, 9, 10]
    with blob_of(tmp_root) as second:
        with blob_of(tmp_root) as first:
            for cache, tokens in zip((first, second), prompts, strict=True):
                assert cache.update(None, tokens, over(kv_of(tokens, 3, 80))) == 5
        for tokens in prompts:
            asked = asking(5, 3)
            assert second.query(None, tokens, asked) == 5
            assert np.array_equal(bytes_in(asked), kv_of(tokens, 3, 80))


def test_pods_that_query_all_and_update_the_rest(tmp_root: Path) -> None:
    """k8s-test: each pod asks for a prompt, then stores behind what matched; it finds what any pod stored before."""
    random, chunk = Random(3), 4
    subjects = [[random.randrange(1000) for _ in range(24)] for _ in range(3)]
    known: set[tuple[int, ...]] = set()
    with files_of(tmp_root, chunk, 16, 2) as one, files_of(tmp_root, chunk, 16, 2) as two:
        for turn in range(30):
            tail = [random.randrange(1000) for _ in range(random.randrange(12))]
            tokens = [*random.choice(subjects)[: random.randrange(25)], *tail]
            whole = len(tokens) // chunk * chunk
            kv = kv_of(tokens, 2, 16)
            out = np.zeros_like(kv)
            cache = (one, two)[turn % 2]
            matched = cache.query(None, tokens, over(out))
            ends = range(chunk, whole + 1, chunk)
            assert matched == max((end for end in ends if tuple(tokens[:end]) in known), default=0)
            assert np.array_equal(out[:matched], kv[:matched])
            rest = cache.update(tokens[:matched], tokens[matched:whole], over(kv[matched:whole]))
            assert rest == whole - matched
            known.update(tuple(tokens[:end]) for end in ends)


def test_benchmark_random_prompts_come_back(tmp_root: Path) -> None:
    """kv_cache_benchmark_test's workload, smaller, and verified (its own query measured failures)."""
    random = Random(7)
    with blob_of(tmp_root, 64, 4, 8000) as cache:
        for _ in range(10):
            tokens = [random.randrange(10_000) for _ in range(random.randrange(1, 60))]
            kv = kv_of(tokens, 4, 64)
            assert cache.update(None, tokens, over(kv)) == len(tokens)
            asked = asking(len(tokens), 4)
            assert cache.query(None, tokens, asked) == len(tokens)
            assert np.array_equal(bytes_in(asked), kv)
