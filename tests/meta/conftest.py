"""Stores for the metadata tests: memory and a real etcd, each with two clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMeta
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta, MemoryStore
from kvstore.meta.store import Event, Meta, Watch
from kvstore.sources import Clock, SystemClock
from tests.kit.etcd import PATIENCE_S, compact, running_etcd
from tests.kit.fake_meta import FakeClock


@dataclass(frozen=True)
class Store:
    """A store as two of its clients see it. ``pass_time`` ends leases of that many seconds."""

    meta: Meta
    other: Meta
    compact: Callable[[int], None]
    pass_time: Callable[[float], None]
    clock: Clock
    prefix: str
    keys: Keys


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    root_id = os.urandom(16)
    keys = Keys(root_id)
    if request.param == "etcd":
        server: EmbeddedEtcd = request.getfixturevalue("etcd_server")
        meta, other = EtcdMeta(server.endpoints, timeout_s=20), EtcdMeta(server.endpoints, timeout_s=20)
        # Real time passes while the test waits.
        yield Store(
            meta,
            other,
            lambda revision: compact(server.endpoints, revision),
            lambda _: None,
            SystemClock(),
            keys.prefix,
            keys,
        )
        meta.close()
        other.close()
        return
    clock = FakeClock()
    shared = MemoryStore(clock)
    first = MemoryMeta(shared)

    def pass_time(seconds: float) -> None:
        clock.advance(seconds)
        shared.expire()

    yield Store(first, MemoryMeta(shared), shared.compact, pass_time, clock, keys.prefix, keys)
    first.close()


def take(watch: Watch, events_count: int) -> list[Event]:
    """The next ``events_count`` events."""
    found: list[Event] = []
    while len(found) < events_count:
        batch = watch.next(PATIENCE_S)
        assert batch, f"only {len(found)} of {events_count} events came"
        found += batch
    return found
