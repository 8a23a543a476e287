"""Limits and health through the control service of a real worker."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format import places
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.transport.status import Busy
from kvstore.v1 import control_pb2 as pb
from tests.kit.administration import TOKENS, raw_control, steering
from tests.kit.cases import for_each
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.memory_workers import working
from tests.kit.patience import returns
from tests.kit.stores import SMALL
from tests.kit.tiers import faulty
from tests.kit.workers import WAIT_S, connected, eventually, packed, refused, serving

pytestmark = pytest.mark.slow


# Limits


def test_limits_change_while_a_worker_runs() -> None:
    logger = logging.getLogger("kvstore")
    level = logger.level
    try:
        with serving() as served, steering(served) as control:
            (found,) = control.set_limits({"calls_max": 100, "read_deadline_s": "7.5", "log_level": "error"}).values()
            assert not isinstance(found, KVStoreError)
            assert (found["calls_max"], found["read_deadline_s"], found["log_level"]) == ("100", "7.5", "error")
            assert logger.level == logging.ERROR
            assert served.member.node.limits.read_deadline_s == 7.5
            assert list(control.limits().values()) == [found]
    finally:
        logger.setLevel(level)


@for_each(
    "changes, said",
    [
        ({"calls_max": "100", "spare_calls_max": "9"}, "limit spare_calls_max: not one that can change"),
        ({"calls_max": "100", "holds_max": "many"}, "limit holds_max='many': expected a whole number"),
        ({"calls_max": "100", "holds_max": "0"}, "limit holds_max=0: expected a whole number, more than 0"),
        ({"calls_max": "100", "read_deadline_s": "nan"}, "limit read_deadline_s=nan"),
        ({"calls_max": "100", "read_deadline_s": "301"}, "a hold must outlast the read it protects"),
        ({"calls_max": "100", "write_deadline_s": "1e300"}, "at most 1,000,000"),
        ({"calls_max": "257"}, "threads for at most 256"),
        ({"calls_max": "100", "log_level": "loud"}, "log_level='loud': expected one of debug"),
    ],
)
def test_limits_change_all_or_none(changes: dict[str, str], said: str) -> None:
    with serving() as served, steering(served) as control:
        (before,) = control.limits().values()
        (refusal,) = control.set_limits(changes).values()
        assert isinstance(refusal, InvalidRequest) and said in str(refusal)
        (after,) = control.limits().values()
        assert after == before


def test_a_changed_limit_holds_for_the_next_call() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with serving(root) as served, connected(served) as store, ThreadPoolExecutor(2) as threads:
        cache = store.namespace("m", SMALL)
        control = store.control
        control.set_limits({"calls_max": 1})
        hang = Hang()
        root.set_rules([Rule("stat", hang)])
        inside = threads.submit(lambda: cache.match(TOKENS))
        eventually(lambda: served.worker.service.gate.inside_count == 1, "a call is inside")
        with raw_control(served) as stub:
            request = pb.LookupRequest(namespace=cache.namespace.digest, tokens=packed(TOKENS))
            code, _, kind = refused(lambda: list(stub.Lookup(request, timeout=WAIT_S)))
            assert (code, kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Busy.__name__)
        control.set_limits({"calls_max": 2})
        other = threads.submit(lambda: cache.match(TOKENS))
        eventually(lambda: served.worker.service.gate.inside_count == 2, "two are")
        root.set_rules([])
        hang.release.set()
        assert inside.result() == other.result() == 0


# Health


def test_health_says_in_one_answer_how_it_is() -> None:
    with working(faulty()) as (acting, served), steering(served) as control:
        (health,) = control.health().values()
        assert not isinstance(health, KVStoreError)
        assert health["healthy"] and health["problems"] == []
        assert health["worker"]["serving"] and not health["worker"]["draining"]
        assert health["root"]["answers"] and health["root"]["id"] == acting.identity.root.hex()
        assert not health["etcd"]["used"] and health["memory"]["size_bytes"] == acting.memory.size_bytes
        assert health["queues"]["calls_max"] == 64


def test_health_answers_while_the_root_hangs_and_says_so() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with serving(root, limits=Limits(stall_s=0.5)) as served, steering(served) as control:
        hang = Hang()
        root.set_rules([Rule("space", hang)])
        (health,) = returns(control.health).values()  # the space is told never
        root.set_rules([])
        hang.release.set()
        assert not isinstance(health, KVStoreError)
        assert not health["healthy"] and not health["root"]["answers"]
        assert "the root is gone, or silent for 2 s" in health["problems"][0]


def test_health_reports_a_root_that_is_gone() -> None:
    files = MemoryFiles()
    with serving(MemoryRoot(files)) as served, steering(served) as control:
        MemoryRoot(files).remove(places.FORMAT)
        (health,) = control.health().values()
        assert not isinstance(health, KVStoreError)
        assert not health["healthy"] and "the root is gone" in health["problems"][0]
