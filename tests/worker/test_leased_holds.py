"""Rule H4: a client's hold is leased, so a killed client holds for no longer than its lease."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.remote import RemoteHold, RemoteTransport
from kvstore.client.store import Store
from kvstore.errors import HoldBroken
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits
from tests.kit.cases import for_each
from tests.kit.fake_meta import AheadClock
from tests.kit.stores import SMALL, kv_of
from tests.kit.wire import TOKENS, opened, packed, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

LEASE_S = 30.0
_CLIENT = """
import sys, time
import kvstore, numpy as np
from tests.kit.fake_meta import AheadClock
from tests.kit.stores import SMALL
store = kvstore.connect(sys.argv[1])
hold = store.namespace("m", SMALL).hold(np.arange(4 * SMALL.chunk_tokens))
print(hold.tokens, flush=True)
time.sleep(600)
"""


def renewals(served: Served) -> int:
    return sum(count for ended, count in served.worker.service.calls.ended().items() if ended.method == "Renew")


def lease_of(store: Store, hold: object) -> object:
    held = hold._held  # type: ignore[attr-defined]
    assert isinstance(held, RemoteHold) and isinstance(store._port, RemoteTransport)
    return held._lease


def test_a_killed_client_holds_nothing_after_its_lease() -> None:
    """Real processes, with the client's own renewals until then."""
    with serving(worker_limits=WorkerLimits(hold_lease_s=4.0)) as served, connected(served) as store:
        store.namespace("m", SMALL).put(TOKENS, kv_of(SMALL, TOKENS))
        child = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, served.address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == str(len(TOKENS))
            eventually(lambda: renewals(served) >= 2, "the client renews what it holds")
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        eventually(lambda: len(served.member.node.holds) == 0, "the worker lets go, long before hold_max_s")
        eventually(lambda: len(served.worker.service.holds) == 0, "and keeps no prompt for it")


def test_a_hold_lives_as_long_as_it_is_renewed_and_no_longer() -> None:
    """By the .proto alone, as a client in another language does."""
    clock = AheadClock()
    with serving(worker_limits=WorkerLimits(hold_lease_s=LEASE_S)) as served:
        served.member.node.holds._clock = served.worker.service.holds._clock = clock
        with connected(served) as store:
            store.namespace("m", SMALL).put(TOKENS, kv_of(SMALL, TOKENS))
        with raw_stub(served) as stub:
            digest = opened(stub, SMALL)
            ask = pb.HoldRequest(namespace=digest, tokens=packed(TOKENS), ttl_s=4 * LEASE_S)
            held, read, left = (stub.Hold(ask, timeout=WAIT_S) for _ in range(3))
            assert held.lease_s == LEASE_S
            for _ in range(3):
                clock.ahead_s += 0.9 * LEASE_S
                answer = stub.Renew(pb.RenewRequest(holds=[held.hold, bytes(16)]), timeout=WAIT_S)
                assert answer.ended == [bytes(16)]
                for each in (held, read):
                    assert list(stub.Get(pb.GetRequest(hold=each.hold), timeout=WAIT_S)), "a read renews too"
            served.worker.service.holds.expire()
            assert len(served.member.node.holds) == 2
            both = pb.RenewRequest(holds=[held.hold, left.hold])
            assert stub.Renew(both, timeout=WAIT_S).ended == [left.hold]
            for _ in range(2):
                clock.ahead_s += 0.9 * LEASE_S
                stub.Renew(both, timeout=WAIT_S)
            assert set(stub.Renew(both, timeout=WAIT_S).ended) == {held.hold, left.hold}, "ttl_s ends it all the same"
            served.worker.service.holds.expire()
            assert len(served.member.node.holds) == 0


def test_what_the_worker_has_let_go_says_so() -> None:
    with serving(worker_limits=WorkerLimits(hold_lease_s=LEASE_S)) as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        with cache.hold(TOKENS) as first, cache.hold(TOKENS) as second, cache.hold(TOKENS) as third:
            served.member.node.holds.drop_all()  # as after a stall that was longer than the lease
            port, leases = store._port, [lease_of(store, each) for each in (first, second)]
            assert isinstance(port, RemoteTransport)
            for lease in leases:
                lease.renewed_s -= LEASE_S  # type: ignore[attr-defined]
            with port._caller.renewing._changed:
                port._caller.renewing._changed.notify_all()
            eventually(lambda: all(each.ended for each in leases), "both are told")  # type: ignore[attr-defined]
            assert renewals(served) == 1, "one call for all that a worker has"
            for hold in (first, second, third):
                with pytest.raises(HoldBroken):
                    hold.read_into(np.empty(SMALL.shape(len(TOKENS)), SMALL.numpy_dtype))
                assert hold.tokens == len(TOKENS)


@for_each("bulk", ["grpc", "tcp", "shared"])
def test_a_store_that_is_closed_ends_its_holds(bulk: str) -> None:
    with serving() as served:
        with connected(served, bulk=bulk) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, kv_of(SMALL, TOKENS))
            cache.blocks.put([b"k" * 16], [b"abc"])
            holds = [*(cache.hold(TOKENS) for _ in range(20)), cache.blocks.hold([b"k" * 16])]
            assert len(served.member.node.holds) == 21
        eventually(lambda: len(served.member.node.holds) == 0, "long before their lease")
        del holds
