"""Stores for the metadata tests: memory and a real etcd, each with two clients."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.core.clock import SystemClock
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.testing import MetadataClients
from tests.kit.etcd import compact, running_etcd
from tests.kit.fake_meta import FakeClock


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


KINDS = ("memory", pytest.param("etcd", marks=pytest.mark.slow))


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[MetadataClients]:
    yield from clients(request)


def clients(request: pytest.FixtureRequest) -> Iterator[MetadataClients]:
    """A store of the kind that a fixture was given, as two of its clients see it."""
    root_id = os.urandom(16)
    keys = Keys(root_id)
    if request.param == "etcd":
        server: EmbeddedEtcd = request.getfixturevalue("etcd_server")
        meta, other = EtcdMetadata(server.endpoints, timeout_s=20), EtcdMetadata(server.endpoints, timeout_s=20)
        # Real time passes while the test waits.
        yield MetadataClients(
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
    first = MemoryMetadata(shared)

    def pass_time(seconds: float) -> None:
        clock.advance(seconds)
        shared.expire()

    yield MetadataClients(first, MemoryMetadata(shared), shared.compact, pass_time, clock, keys.prefix, keys)
    first.close()
