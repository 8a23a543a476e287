"""Segments over every port: put alone, found, held and read behind a verdict, apart from exact chains (SEGMENTS.md)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
import kvstore.aio
from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.client.local import LocalTransport
from kvstore.core.address import block_address
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format import places
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.segments import Bounds, Match, Measured, Rope, Rule, Segments, Verdict, gate, rotate
from kvstore.segments.gate import check
from kvstore.segments.segments import CLOSINGS, VERDICTS_MAX, _key
from tests.kit import faulty_root as faulty
from tests.kit.cases import for_each
from tests.kit.faulty_root import FaultyRoot, Flipped
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import member_of, member_on
from tests.kit.workers import connected, serving

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype="float32", chunk_tokens=16)
SIZE = 8
ROPE = Rope(10_000.0, 8)
DOCUMENTS = [np.arange(100 * number, 100 * number + SIZE * 3 + 5, dtype=np.uint32) for number in range(1, 4)]
SYSTEM, QUESTION = np.arange(11, dtype=np.uint32), np.arange(50, 57, dtype=np.uint32)


def kv_of(tokens: npt.NDArray[np.uint32], seed: int = 0) -> npt.NDArray[np.float32]:
    """KV that depends on all tokens before, as that of a model does."""
    rng = np.random.default_rng([seed, *tokens[:1].tolist()])
    return rng.standard_normal(LAYOUT.shape(len(tokens))).astype(np.float32)


def verdict_for(segments: Segments | kvstore.aio.Segments) -> Verdict:
    """A verdict that opens the gate."""
    measured = Measured(prompts=3, tokens=100, agreement=1.0, kl=0.001, answers_lost=0.0, work=0.32)
    return Verdict(segments.fingerprint, segments.rope.digest, Rule.V, (1, 2), (0.3, 0.15), Bounds(), measured)


def prompt_of(*parts: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], list[int]]:
    """A prompt, and where its parts begin."""
    return np.concatenate(parts), np.cumsum([0, *map(len, parts[:-1])]).tolist()


@pytest.fixture
def root() -> FaultyRoot:
    return FaultyRoot(MemoryRoot(MemoryFiles()))


@pytest.fixture(params=["local", "shared", "tcp", "grpc"])
def store(request: pytest.FixtureRequest, root: FaultyRoot) -> Iterator[Store]:
    if request.param == "local":
        with Store(LocalTransport(member_on(root))) as opened:
            yield opened
    else:
        with serving(root) as served, connected(served, bulk=request.param) as opened:
            yield opened


@pytest.fixture
def local(root: FaultyRoot) -> Iterator[Store]:
    with Store(LocalTransport(member_on(root))) as opened:
        yield opened


def cache_of(store: Store, fingerprint: str = "weights", layout: Layout = LAYOUT) -> Cache:
    return store.namespace("m", layout, fingerprint)


def segments_of(store: Store) -> Segments:
    return cache_of(store).segments(ROPE, chunk_tokens=SIZE)


def test_s12_segments_are_read_into_their_places_with_rotated_keys(store: Store) -> None:
    segments = segments_of(store)
    for document in DOCUMENTS:
        assert segments.put(document, kv_of(document)).chunks_written == 3
    prompt, starts = prompt_of(SYSTEM, DOCUMENTS[2], DOCUMENTS[0], QUESTION)
    for given in (starts, None):
        matches = segments.find(prompt, given, after=5)
        assert matches == [Match(11, 11 + 24, prompt[11:35]), Match(40, 64, prompt[40:64])]
        out = np.full(LAYOUT.shape(len(prompt) - 5), 7, np.float32)
        with segments.hold(matches) as held:
            assert held.read_into(out, verdict_for(segments), first=5) == matches == held.matches
        expected = np.full_like(out, 7)
        for match, document in zip(matches, (DOCUMENTS[2], DOCUMENTS[0]), strict=True):
            kv = kv_of(document)[:, :, :24]
            expected[:, 0, match.start - 5 : match.end - 5] = rotate(ROPE, kv[:, 0], match.start)
            expected[:, 1, match.start - 5 : match.end - 5] = kv[:, 1]
        assert out.tobytes() == expected.tobytes()


def holds_of(store: Store) -> float:
    """Holds of clients alone: a worker ends its own hold of a get a moment after the last byte was sent."""
    stats = store.stats()
    return stats.get("client_holds", stats["holds"])


def test_s12_what_a_search_finds_is_held(store: Store) -> None:
    segments = segments_of(store)
    for document in DOCUMENTS:
        segments.put(document, kv_of(document))
    prompt, starts = prompt_of(SYSTEM, *DOCUMENTS, QUESTION)
    out = np.empty(LAYOUT.shape(len(prompt)), np.float32)
    for given in (starts, None):
        found = segments.find(prompt, given, after=20)
        with segments.hold(found) as held:
            assert held.matches == found
            assert [len(match) for match in held.matches] == [24, 24]
            assert holds_of(store) == 2, "one for each"
            assert held.read_into(out, verdict_for(segments)) == held.matches
        assert holds_of(store) == 0
    with segments.hold(segments.find(QUESTION, [0]), ttl=5.0) as held:
        assert held.matches == []
        assert holds_of(store) == 0, "nothing is found, so nothing is held"


def test_s10_segments_of_another_process_are_found_at_any_offset() -> None:
    files, (prompt, _) = MemoryFiles(), prompt_of(SYSTEM, *DOCUMENTS)
    with (
        Store(LocalTransport(member_on(MemoryRoot(files)))) as one,
        Store(LocalTransport(member_on(MemoryRoot(files)))) as other,
    ):
        first, second = segments_of(one), segments_of(other)
        first.put(DOCUMENTS[0], kv_of(DOCUMENTS[0]))
        assert second.find(prompt) == [Match(11, 35, prompt[11:35])], "put before the first search"
        first.put(DOCUMENTS[1], kv_of(DOCUMENTS[1]))
        eventually(lambda: [len(match) for match in segments_of(other).find(prompt)] == [24, 24], "the log is read")


# Apart from exact chains


def test_s2_models_rope_settings_and_exact_chains_share_nothing(store: Store) -> None:
    document = DOCUMENTS[0]
    segments_of(store).put(document, kv_of(document))
    exact = cache_of(store)
    assert exact.match(document) == 0
    exact.put(document, kv_of(document))
    others = [
        cache_of(store, "other weights").segments(ROPE, chunk_tokens=SIZE),
        exact.segments(replace(ROPE, theta=500_000.0, frequencies=()), chunk_tokens=SIZE),
        exact.segments(Rope(10_000.0, 8, kvstore.segments.Style.INTERLEAVED), chunk_tokens=SIZE),
        exact.segments(Rope(10_000.0, 6), chunk_tokens=SIZE),
        exact.segments(ROPE, chunk_tokens=2 * SIZE),
        store.namespace("m", LAYOUT, "weights", "tenant").segments(ROPE, chunk_tokens=SIZE),
        store.namespace("m", LAYOUT, "weights", attributes={"lora": "a"}).segments(ROPE, chunk_tokens=SIZE),
    ]
    for other in others:
        assert other.find(document, [0]) == []


@for_each("kind", ("segment", "verdict"))
def test_s5_a_namespace_of_segments_opens_only_through_a_model(store: Store, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"use cache.segments\(rope\)"):
        store.namespace("m", LAYOUT, attributes={"kv": kind})


def test_s5_layouts_whose_keys_cannot_be_rotated_are_refused(local: Store) -> None:
    with pytest.raises(InvalidRequest, match="scales of their own"):
        local.namespace("q", replace(LAYOUT, dtype="int8")).segments(ROPE)
    with pytest.raises(InvalidRequest, match="a head of this layout has 8"):
        cache_of(local).segments(Rope(10_000.0, 16))


# Damage


def test_s12_a_damaged_chunk_ends_its_range_and_no_other(root: FaultyRoot, local: Store) -> None:
    segments = segments_of(local)
    for document in DOCUMENTS:
        segments.put(document, kv_of(document))
    prompt, starts = prompt_of(DOCUMENTS[0], DOCUMENTS[1])
    matches = segments.find(prompt, starts)
    assert [len(match) for match in matches] == [24, 24]
    out = np.empty(LAYOUT.shape(len(prompt)), np.float32)
    root.set_rules([faulty.Rule("read", Flipped(5000), times=1)])
    with segments.hold(matches) as held:
        read = held.read_into(out, verdict_for(segments))
    assert 0 < len(read) <= 2 and sum(map(len, read)) in (24, 32, 40)
    for match in read:
        document = DOCUMENTS[0] if match.start == 0 else DOCUMENTS[1]
        kv = kv_of(document)[:, :, : len(match)]
        assert out[:, 1, match.start : match.end].tobytes() == kv[:, 1].tobytes()
        assert out[:, 0, match.start : match.end].tobytes() == rotate(ROPE, kv[:, 0], match.start).tobytes()


def test_s12_a_read_that_fails_returns_once_no_other_writes(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four segments are read at once; an engine may use the memory for something else after the return."""
    segments = segments_of(local)
    for document in DOCUMENTS:
        segments.put(document, kv_of(document))
    prompt, starts = prompt_of(*DOCUMENTS)
    out, others_write, calls, writing = np.zeros(LAYOUT.shape(len(prompt)), np.float32), threading.Event(), [0], [0]

    def read_into(_: kvstore.Hold, place: npt.NDArray[np.float32]) -> int:
        calls[0] += 1
        if calls[0] == 1:
            assert others_write.wait(PATIENCE_S)
            raise Unavailable("the root does not answer")
        writing[0] += 1
        others_write.set()
        time.sleep(0.05)
        place[:] = 1
        writing[0] -= 1
        return int(place.shape[2])

    with segments.hold(segments.find(prompt, starts)) as held:
        monkeypatch.setattr(kvstore.Hold, "read_into", read_into)
        with pytest.raises(Unavailable):
            held.read_into(out, verdict_for(segments))
        assert calls[0] > 1 and not writing[0]


# The gate


def test_s11_nothing_is_read_without_a_verdict_that_fits(store: Store) -> None:
    segments = segments_of(store)
    segments.put(DOCUMENTS[0], kv_of(DOCUMENTS[0]))
    good = verdict_for(segments)
    wrong: dict[str, Any] = {
        "only with a verdict": None,
        "other weights": replace(good, fingerprint="others"),
        "other RoPE settings": replace(good, rope=Rope(10_000.0, 6).digest),
        "does not hold its bounds": replace(good, measured=replace(good.measured, kl=0.5)),
    }
    out = np.zeros(LAYOUT.shape(24), np.float32)
    with segments.hold(segments.find(DOCUMENTS[0], [0])) as held:
        for reason, verdict in wrong.items():
            with pytest.raises(InvalidRequest, match=reason):
                held.read_into(out, verdict)
        assert not out.any()
        assert held.read_into(out, good)


def test_s11_the_newest_verdict_is_kept_and_a_lost_one_closes_the_gate(store: Store) -> None:
    segments = segments_of(store)
    assert segments.verdict() is None
    first, second = verdict_for(segments), replace(verdict_for(segments), rule=Rule.BOTH)
    segments.record(first)
    assert segments_of(store).verdict() == first
    segments.record(second)
    assert segments_of(store).verdict() == second
    assert cache_of(store, "other weights").segments(ROPE, chunk_tokens=SIZE).verdict() is None
    with pytest.raises(InvalidRequest, match="other weights"):
        segments.record(replace(first, fingerprint="others"))


def test_s11_a_verdict_that_does_not_hold_closes_the_gate_that_an_earlier_one_opened(store: Store) -> None:
    segments = segments_of(store)
    good = verdict_for(segments)
    bad = replace(good, measured=replace(good.measured, answers_lost=0.5))
    segments.record(good)
    segments.record(bad)
    assert segments.verdict() is None and segments_of(store).verdict() is None
    segments.record(good)
    assert segments_of(store).verdict() == good, "a later check opens it again"
    with pytest.raises(InvalidRequest, match="other weights"):
        segments.record(replace(bad, fingerprint="others"))
    assert segments.verdict() == good


def test_s11_a_gate_that_was_closed_stays_closed_if_one_file_is_lost(root: FaultyRoot, local: Store) -> None:
    segments, node = segments_of(local), member_of(local).node
    good = verdict_for(segments)
    segments.record(good)
    segments.record(replace(good, measured=replace(good.measured, kl=0.5)))
    namespace = gate.verdicts_of(segments.namespace)
    newest = segments._newest(segments._verdicts())
    lost = places.chunk(block_address(namespace, _key(newest)), namespace.id, node.identity.shard_bits)
    assert root.remove(lost)
    node.forget()
    assert segments._newest(segments._verdicts()) == newest - 1
    assert segments.verdict() is None


def test_s11_a_damaged_verdict_closes_the_gate(root: FaultyRoot, local: Store) -> None:
    segments = segments_of(local)
    segments.record(verdict_for(segments))
    root.set_rules([faulty.Rule("read", Flipped(5000), times=1)])
    assert segments.verdict() is None


def test_s11_verdicts_are_bounded(local: Store) -> None:
    segments = segments_of(local)
    good = verdict_for(segments)
    bad = replace(good, measured=replace(good.measured, kl=0.5))
    for _ in range(VERDICTS_MAX - CLOSINGS):
        segments.record(good)
    with pytest.raises(InvalidRequest, match="64 verdicts are recorded"):
        segments.record(good)
    assert segments.verdict() == good
    segments.record(bad)
    assert segments.verdict() is None, "there is always room to close it"
    segments.record(bad)
    with pytest.raises(InvalidRequest, match="64 verdicts are recorded"):
        segments.record(good)


# Arguments


def test_wrong_arguments_are_refused(local: Store) -> None:
    segments, document = segments_of(local), DOCUMENTS[0]
    segments.put(document, kv_of(document))
    matches, verdict = segments.find(document, [0]), verdict_for(segments)
    with pytest.raises(InvalidRequest, match="expected 28"):
        segments.put(document[:-1], kv_of(document))
    with pytest.raises(InvalidRequest, match="after=30: expected 0 to 29"):
        segments.find(document, after=30)
    with pytest.raises(InvalidRequest, match="after='x': expected an integer"):
        segments.find(document, after="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ttl=0"):
        segments.hold(matches, ttl=0)
    with pytest.raises(InvalidRequest, match="expected what find returned"):
        segments.hold([*matches, *matches])
    with segments.hold(matches) as held:
        with pytest.raises(InvalidRequest, match="room for 23"):
            held.read_into(np.empty(LAYOUT.shape(23), np.float32), verdict)
        with pytest.raises(InvalidRequest, match="first=1"):
            held.read_into(np.empty(LAYOUT.shape(24), np.float32), verdict, first=1)
    for odd in ([0, 1.5], "0", 7):
        with pytest.raises(InvalidRequest, match="expected a sequence of integers"):
            segments.find(document, odd)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"expected kvstore.segments.Rope"):
        cache_of(local).segments("rope")  # type: ignore[arg-type]


def test_the_asyncio_twin_does_the_same(tmp_path: Path) -> None:
    document = DOCUMENTS[0]

    async def use() -> None:
        async with kvstore.aio.open(tmp_path) as store:
            cache = await store.namespace("m", LAYOUT, "weights")
            segments = await cache.segments(ROPE, chunk_tokens=SIZE)
            await segments.put(document, kv_of(document))
            matches = await segments.find(document)
            out = np.zeros(LAYOUT.shape(24), np.float32)
            async with segments.hold(matches) as held:
                assert await held.read_into(out, verdict_for(segments)) == held.matches == matches
            assert out[:, 1].tobytes() == kv_of(document)[:, 1, :24].tobytes()
            await segments.record(verdict_for(segments))
            assert await segments.verdict() == verdict_for(segments)

    asyncio.run(use())


MEASURED = Measured(prompts=60, tokens=6000, agreement=0.99, kl=0.005, answers_lost=0.0, work=0.32)
VERDICT = Verdict("weights", "rope", Rule.V, (1, 2, 3), (0.3, 0.22, 0.15), Bounds(), MEASURED)


@for_each(
    "measured, bounds",
    (
        ({"agreement": 0.97}, {}),
        ({"kl": 0.031}, {}),
        ({"answers_lost": 0.03}, {}),
        ({"prompts": 0}, {}),
        ({}, {"work_max": 0.31}),
    ),
)
def test_s11_each_bound_closes_the_gate(measured: dict[str, Any], bounds: dict[str, Any]) -> None:
    assert VERDICT.holds and check(VERDICT, "weights", "rope") is VERDICT
    closed = replace(VERDICT, measured=replace(MEASURED, **measured), bounds=replace(Bounds(), **bounds))
    assert not closed.holds
    with pytest.raises(InvalidRequest, match="does not hold its bounds"):
        check(closed, "weights", "rope")


@for_each(
    "changed, reason",
    (
        ({"fingerprint": ""}, "digest of the weights"),
        ({"rule": "v"}, "expected a kvstore.segments.Rule"),
        ({"ratios": (0.3, 0.2)}, "one ratio for each"),
        ({"check_layers": (), "ratios": ()}, "one ratio for each"),
        ({"check_layers": (1, 1, 2)}, "ascending layers"),
        ({"check_layers": (-1, 1, 2)}, "ascending layers"),
        ({"ratios": (0.1, 0.2, 0.3)}, "falling shares"),
        ({"ratios": (1.1, 0.2, 0.1)}, "falling shares"),
        ({"measured": replace(MEASURED, kl=float("nan"))}, "finite"),
    ),
)
def test_a_wrong_verdict_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        replace(VERDICT, **changed)
