"""A process that runs out of file descriptors has misses, and no wrong bytes."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.kit.arenas import filled, serving_memory
from tests.kit.cases import for_each
from tests.kit.descriptors import open_now
from tests.kit.programs import ended
from tests.kit.stores import SMALL
from tests.kit.transports import same, tokens_and_kv
from tests.kit.workers import Served, connected, serving

CHUNKS = 100
"""More than the files that fit below the limit."""
_CLIENT = """
import json, os, resource, sys, threading, time
import numpy as np
import kvstore
from tests.kit.transports import same, tokens_and_kv
from tests.kit.stores import SMALL

tokens, kv = tokens_and_kv(int(sys.argv[2]), 3, SMALL)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[4]), hard))
hits, errors, fds = [], [], []

def work():
    for turn in range(3):
        try:
            count, array = cache.get(tokens)
            hits.append(count == len(tokens) and same(array, kv))
            with cache.hold(tokens) as hold:
                hits.append(len(hold.view()) == int(sys.argv[2]))
            new, new_kv = tokens_and_kv(1, threading.get_ident() + turn, SMALL)
            hits.append(cache.put(new, new_kv).tokens_present == len(new))
        except Exception as error:
            errors.append(repr(error))

with kvstore.connect(sys.argv[1], bulk=sys.argv[3]) as store:
    cache = store.namespace("m", SMALL)
    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for _ in range(400):  # until gRPC has closed a connection that it has just replaced
            links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
            found = [os.readlink(each) for each in links if os.path.islink(each)]
            if sum("socket:" in each for each in found) <= sum("kvstore-ledger" in each for each in found) + 2:
                break
            time.sleep(0.05)
        fds.append(found)
print(json.dumps([all(hits), errors, fds]))
"""


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Leaves this many descriptors to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now() + spare + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(min(spare, len(taken))):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@contextmanager
def holding_files(served_root: Path) -> Iterator[Served]:
    with serving(served_root) as served:
        with connected(served, bulk="grpc") as store:
            tokens, kv = tokens_and_kv(CHUNKS, 3, SMALL)
            store.namespace("m", SMALL).put(tokens, kv)
        yield served


@contextmanager
def holding_memory(served_root: Path) -> Iterator[Served]:
    with serving_memory(served_root) as served:
        filled(served, *tokens_and_kv(CHUNKS, 3, SMALL), SMALL)
        yield served


@for_each("holding", [holding_files, holding_memory])
def test_client_with_few_descriptors_keeps_its_hits(tmp_root: Path, holding: object) -> None:
    """What it has no descriptors for comes over gRPC, and none of them leaks."""
    limit = 24 if holding is holding_memory else 48
    with holding(tmp_root) as served:  # type: ignore[operator]
        child = ended(sys.executable, "-c", _CLIENT, served.address, str(CHUNKS), "shared", str(limit), check=True)
        hits, errors, fds = json.loads(child.stdout)
        assert hits and errors == []
        for turn in fds:
            connections = sum("kvstore-ledger" in each for each in turn)
            arenas, sockets = (sum(kind in each for each in turn) for kind in ("kvstore-arena", "socket:"))
            assert connections <= 6 and arenas <= 2 * connections and sockets <= connections + 2, turn
            assert not [each for each in turn if "/chunks/" in each], turn
        others = [[each for each in turn if "kvstore-" not in each and "socket:" not in each] for turn in fds]
        assert len(others[1]) <= len(others[0]), others
        damage = {name: count for name, count in served.member.stats().items() if "damage" in name and count}
        assert not damage


@for_each("memory", [False, True])
def test_a_worker_without_descriptors_has_misses_and_damages_nothing(tmp_root: Path, memory: bool) -> None:
    tokens, kv = tokens_and_kv(CHUNKS, 3, SMALL)
    with (holding_memory if memory else holding_files)(tmp_root) as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        assert cache.get(tokens)[0] == len(tokens)  # the connections are there
        for spare in (0, 3, 10):
            with few_descriptors(spare):
                count, array = cache.get(tokens)
                assert same(array, kv[:, :, :count])
        count, array = cache.get(tokens)
        assert count == len(tokens) and same(array, kv)
        assert not {name: each for name, each in served.member.stats().items() if "damage" in name and each}
    assert not (tmp_root / "quarantine").exists() or not list((tmp_root / "quarantine").iterdir())
