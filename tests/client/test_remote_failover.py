"""Several workers on one root: load is spread, a dead worker is left out until it is back, a read goes on elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.client import Store
from kvstore.client.failover import WorkerEndpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.remote import RemoteTransport
from kvstore.core.buffers import Planes, planes_of
from kvstore.errors import HoldBroken, InvalidRequest, Unavailable
from kvstore.format import places
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.cases import for_each
from tests.kit.patience import stretched
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.workers import Served, Several, connected, eventually, serving, tokens_of, worker_process

pytestmark = pytest.mark.slow

LARGE = Layout(layers=4, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256)  # 4 MiB
TOKENS = np.arange(4 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)


@pytest.fixture(params=["auto", "tcp", "grpc"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of the bytes of chunks."""
    chosen: str = request.param
    monkeypatch.setenv("KVSTORE_BULK", chosen)
    return chosen


@pytest.fixture
def pair() -> Iterator[tuple[Served, Served]]:
    """Two workers on one root."""
    files = MemoryFiles()
    with serving(MemoryRoot(files)) as first, serving(MemoryRoot(files)) as second:
        yield first, second


def endpoints_of(store: Store) -> WorkerEndpoints:
    port = store._port
    assert isinstance(port, RemoteTransport)
    return port.endpoints


def matches(served: Served) -> int:
    return served.member.node.counters.snapshot()["requests_match"]


def test_load_is_spread_and_prompts_that_begin_alike_stay_together(pair: tuple[Served, Served]) -> None:
    with connected(*pair) as store:
        cache = store.namespace("m", SMALL)
        for number in range(64):
            cache.match(tokens_of(number, len(TOKENS)))
        assert min(map(matches, pair)) >= 8
        before = [matches(served) for served in pair]
        for length in range(1, 5):
            cache.match(TOKENS[: length * SMALL.chunk_tokens])
        assert sorted(matches(served) - was for served, was in zip(pair, before, strict=True)) == [0, 4]


def test_a_worker_that_stops_is_left_out_and_comes_back(pair: tuple[Served, Served]) -> None:
    first, second = pair
    with connected(*pair) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        first.worker.stop()
        for number in range(30):
            tokens = tokens_of(number, len(TOKENS))
            assert cache.put(tokens, kv_of(SMALL, tokens)).tokens_present == len(TOKENS)
            assert cache.match(tokens) == len(TOKENS)
            assert same(cache.get(tokens)[1], kv_of(SMALL, tokens))
        assert store.stats()["workers"] == 1
        assert store.stats()["client_misses_unreachable"] == 0
        with serving(first.member.node.root, listen=first.address) as again:
            eventually(lambda: store.stats()["workers"] == 2, "the worker is asked again")
            eventually(lambda: all(each.aside is None for each in endpoints_of(store).every()), "it is back")
            eventually(
                lambda: cache.match(tokens_of(int(time.monotonic() * 1000) % 1_000_000, 16)) or matches(again),
                "it gets calls",
            )
        assert second.worker.health.is_serving


@pytest.mark.slow
def test_a_worker_killed_in_the_middle(tmp_root: Path) -> None:
    """SIGKILL under load: every answer stays right, and acknowledged chunks exist."""
    acknowledged: list[int] = []
    with worker_process(tmp_root) as first, worker_process(tmp_root) as second:
        with kvstore.connect(first.address, second.address) as store:
            cache = store.namespace("m", SMALL)

            def work(number: int, turn: int) -> None:
                key = 10_000 * number + turn
                tokens = tokens_of(key, len(TOKENS))
                assert cache.put(tokens, kv_of(SMALL, tokens)).tokens_present == len(tokens)
                acknowledged.append(key)
                count, array = cache.get(tokens)
                assert same(array, kv_of(SMALL, tokens)[:, :, :count])

            clients = Several(4, work)
            eventually(lambda: len(acknowledged) > 40, "both are at work")
            first.kill()
            done = len(acknowledged)
            eventually(lambda: len(acknowledged) > done + 40, "the other one goes on")
            clients.stop()
            for key in acknowledged:
                tokens = tokens_of(key, len(TOKENS))
                assert same(cache.get(tokens)[1], kv_of(SMALL, tokens))


@pytest.mark.slow
def test_a_frozen_worker_costs_one_deadline_not_every_one(tmp_root: Path) -> None:
    limits = ClientLimits(match_s=1.0, pin_s=5.0, probe_s=0.5, refresh_s=0.5)
    limits = stretched(limits, "match_s", "pin_s", "probe_s")
    with worker_process(tmp_root) as first, worker_process(tmp_root) as second:
        with kvstore.connect(first.address, second.address, limits=limits) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
            for number in range(8):
                cache.match(tokens_of(number, len(TOKENS)))  # both are connected
            first.send(signal.SIGSTOP)
            try:
                eventually(lambda: endpoints_of(store).every()[0].aside, "it is set aside")
                for _ in range(10):
                    assert cache.match(TOKENS) == len(TOKENS)
                    assert same(cache.get(TOKENS)[1], KV)
            finally:
                first.send(signal.SIGCONT)
            eventually(lambda: endpoints_of(store).every()[0].aside is None, "it is back")


def test_a_read_goes_on_at_another_worker_where_the_first_one_died() -> None:
    tokens = np.arange(24 * LARGE.chunk_tokens)
    kv = np.random.default_rng(0).integers(0, 60_000, LARGE.shape(len(tokens)), dtype=np.uint16)
    files = MemoryFiles()
    with ExitStack() as stack:
        pair = [stack.enter_context(serving(MemoryRoot(files))) for _ in range(2)]
        store = stack.enter_context(connected(*pair))
        cache = store.namespace("m", LARGE)
        cache.put(tokens, kv)
        port = store._port
        asked = 0

        def memory(count: int) -> Planes:
            """Stops the worker that serves this read once the first bytes are about to be written."""
            nonlocal asked
            asked += 1
            assert count == 24
            (busy,) = [each for each in pair if each.worker.service.gate.inside_count]
            busy.worker.stop()
            return planes_of(out, LARGE)

        out = np.zeros_like(kv)
        ids = tokens.astype("<u4")
        assert port.get(cache.namespace, ids, 24, memory) == 24
        assert asked == 1
        assert same(out, kv)
        stats = store.stats()
        assert (stats["client_retries"], stats["client_misses_unreachable"]) == (1, 0)


def test_a_hold_says_that_it_is_gone_with_its_worker(tmp_root: Path) -> None:
    """Another worker of the same root does not help: it knows nothing of this hold."""
    with worker_process(tmp_root) as doomed, worker_process(tmp_root) as other, connected(doomed.address) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        hold = cache.hold(TOKENS)
        assert hold.read_into(np.empty_like(KV)) == hold.tokens == len(TOKENS)
        port = store._port
        assert isinstance(port, RemoteTransport)
        port.endpoints._list([doomed.address, other.address])
        doomed.kill()
        for read in (lambda: hold.read_into(np.empty_like(KV)), hold.view, lambda: list(hold.layers())):
            with pytest.raises(HoldBroken) as broken:
                read()
            assert broken.value.tokens_valid == 0
            assert hold.tokens == len(TOKENS)
        hold.release()
        assert cache.get(TOKENS)[0] == len(TOKENS), "the other worker serves the same chunks"


def test_no_worker_at_all_is_a_miss_for_reads_and_an_error_for_the_rest() -> None:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        pin = cache.pin(TOKENS)
        served.worker.stop()
        assert cache.match(TOKENS) == 0
        assert cache.get(TOKENS)[0] == 0
        assert cache.get(TOKENS, out=np.empty_like(KV)) == 0
        with cache.hold(TOKENS) as hold:
            assert hold.tokens == 0
        assert cache.blocks.match([bytes(16)]) == 0
        assert cache.blocks.get([bytes(16)], [bytearray(3)]) == [False]
        for call in (
            lambda: cache.put(TOKENS, KV),
            lambda: cache.pin(TOKENS),
            lambda: cache.refcount(TOKENS),
            pin.release,
            lambda: cache.blocks.put([bytes(16)], [b"abc"]),
            cache.clear,
            store.namespaces,
            store.pins,
            store.stats,
            lambda: store.namespace("another", SMALL),
        ):
            with pytest.raises(Unavailable):
                call()
        assert store._port.counters.snapshot()["client_misses_unreachable"] == 6  # type: ignore[attr-defined]


def test_a_store_may_be_connected_before_its_worker_runs(tmp_root: Path) -> None:
    address = f"unix:{tmp_root}/socket"
    with kvstore.connect(address, bulk="auto") as store:
        with pytest.raises(Unavailable):
            store.namespace("m", SMALL)
        with serving(listen=address):
            eventually(lambda: endpoints_of(store).every()[0].aside is None, "the worker is found")
            cache = store.namespace("m", SMALL)
            assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)


def test_a_worker_with_a_new_root_is_told_the_namespace_again(tmp_root: Path) -> None:
    address = f"unix:{tmp_root}/socket"
    with ExitStack() as stack, kvstore.connect(address, bulk="auto") as store:
        with serving(listen=address):
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
        stack.enter_context(serving(listen=address))  # on another, empty root
        eventually(lambda: endpoints_of(store).every()[0].aside is None or cache.match(TOKENS), "the worker is back")
        assert cache.match(TOKENS) == 0
        assert cache.put(TOKENS, KV).chunks_written == 4
        assert same(cache.get(TOKENS)[1], KV)
        assert store.stats()["client_namespaces_reopened"] == 1


@for_each("damage", ["flipped", "truncated"])
def test_a_damaged_namespace_record_is_no_error_for_who_opened_it(tmp_root: Path, damage: str) -> None:
    """A worker that never saw the namespace cannot read the root's record of it, and is told by the client."""
    address = f"unix:{tmp_root}/socket"
    with kvstore.connect(address, bulk="auto") as store:
        with serving(tmp_root / "root", listen=address):
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
        record = tmp_root / "root" / places.namespace_record(cache.namespace.digest)
        content = record.read_bytes()
        record.write_bytes(content.replace(b"fingerprint", b"finGerprint") if damage == "flipped" else content[:20])
        with serving(tmp_root / "root", listen=address):
            eventually(
                lambda: endpoints_of(store).every()[0].aside is None or cache.match(TOKENS), "the worker is back"
            )
            assert cache.match(TOKENS) == len(TOKENS)
            assert same(cache.get(TOKENS)[1], KV)


@for_each(
    "workers, options, says",
    [
        ((), {}, "give one of the two"),
        (("127.0.0.1:7070",), {"etcd": "127.0.0.1:2379"}, "give one of the two"),
        (("127.0.0.1",), {}, "expected host:port"),
        (("http://127.0.0.1:7070",), {}, "expected host:port"),
        ((), {"etcd": "127.0.0.1:2379", "root": "xyz"}, "32 hex digits"),
    ],
)
def test_wrong_ways_to_connect(workers: tuple[str, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        kvstore.connect(*workers, **options)


@pytest.mark.parametrize("bulk", ["auto", "grpc"])
def test_a_pin_for_which_its_caller_no_longer_waited_is_removed(bulk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, taken = np.arange(SMALL.chunk_tokens), list[Any]()
    with serving() as served, connected(served, limits=ClientLimits(pin_s=0.5), bulk=bulk) as store:
        cache = store.namespace("late", SMALL)
        cache.put(tokens, kv_of(SMALL, tokens))
        pin = served.member.pin

        def late(*arguments: Any) -> Any:
            taken.append(pin(*arguments))
            time.sleep(1.0)
            return taken[0]

        monkeypatch.setattr(type(served.member), "pin", lambda self, *arguments: late(*arguments))
        with pytest.raises(Unavailable):
            cache.pin(tokens)
        eventually(lambda: taken)
        eventually(lambda: served.member.pins() == [])
        assert taken[0].tokens
