"""Compress, decompress and re-encrypt as tickets of a real worker: the same bytes afterwards, only selected chunks."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore import Layout
from kvstore.census.selection import Selection
from kvstore.client.cache import Cache
from kvstore.client.control import Control
from kvstore.encodings.keys import KeyFile
from kvstore.format.header import Encoding
from kvstore.node.opening import open_member
from kvstore.tickets import State
from kvstore.v1 import control_pb2 as pb
from kvstore.v1.control_pb2_grpc import ControlStub
from kvstore.worker.worker import Worker
from tests.kit.stores import kv_of
from tests.kit.workers import WAIT_S, Served, connected, eventually, raw_channel, refused, serving

pytestmark = pytest.mark.slow

LAYOUT = Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
"""Chunks of 32 KiB: large enough to save a page."""
TOKENS = np.arange(4 * LAYOUT.chunk_tokens)
KV = np.zeros(LAYOUT.shape(len(TOKENS)), LAYOUT.numpy_dtype) + np.arange(len(TOKENS))[:, None, None].astype("float16")
"""As smooth as real KV is not: it must become smaller."""


def encodings(control: Control, cache: Cache) -> set[Encoding]:
    return {each.root.encoding for each in control.lookup(cache, TOKENS) if each.root is not None}


def test_chunks_of_a_tenant_are_compressed_and_decompressed_and_read_the_same(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        acme, beta = (store.namespace("m", LAYOUT, tenant=tenant) for tenant in ("acme", "beta"))
        for cache in (acme, beta):
            cache.put(TOKENS, KV)
        done = store.control.compress(Selection(tenant="acme")).wait(WAIT_S)
        assert (done.act, done.state, done.counts["chunks_rewritten"]) == ("compress", State.DONE, 4), done
        assert done.counts["bytes_after"] < done.counts["bytes_before"]
        assert encodings(store.control, acme) == {Encoding.COMPRESSED}
        assert encodings(store.control, beta) == {Encoding.PLAIN}
        for cache in (acme, beta):
            count, kv = cache.get(TOKENS)
            assert count == len(TOKENS) and kv.tobytes() == KV.tobytes()
        again = store.control.compress(Selection(tenant="acme")).wait(WAIT_S)
        assert again.counts["chunks_kept"] == 4 and "chunks_rewritten" not in again.counts
        back = store.control.decompress(Selection(namespace=acme.namespace.digest)).wait(WAIT_S)
        assert back.counts["chunks_rewritten"] == 4 and encodings(store.control, acme) == {Encoding.PLAIN}
        count, kv = acme.get(TOKENS)
        assert count == len(TOKENS) and kv.tobytes() == KV.tobytes()


def test_what_would_not_become_smaller_is_kept_as_it_is(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        cache = store.namespace("m", LAYOUT)
        cache.put(TOKENS, kv_of(LAYOUT, TOKENS))
        done = store.control.compress(Selection(tenant="")).wait(WAIT_S)
        assert done.state is State.DONE and done.counts["chunks_kept"] == 4
        assert encodings(store.control, cache) == {Encoding.PLAIN}


def write_keys(path: Path, current: str | None, *names: str) -> None:
    keys = {name: base64.b64encode(name.encode().ljust(32, b"!")).decode() for name in names}
    path.write_text(json.dumps({"tenants": {"acme": {"current": current, "keys": keys}}}))
    path.chmod(0o600)


@contextmanager
def keyed(root: Path, keys: Path) -> Iterator[Served]:
    member = open_member(f"file://{root}", keys=KeyFile(keys).load())
    worker = Worker(member, "127.0.0.1:0")
    try:
        worker.start()
        yield Served(worker, member)
    finally:
        worker.stop()
        member.close()


def test_a_tenant_gets_a_new_key_and_the_old_one_can_go(tmp_root: Path) -> None:
    keys = tmp_root / "keys.json"
    write_keys(keys, "old", "old")
    with keyed(tmp_root / "root", keys) as served, connected(served) as store:
        cache = store.namespace("m", LAYOUT, tenant="acme")
        cache.put(TOKENS, KV)
        assert encodings(store.control, cache) == {Encoding.ENCRYPTED}
        write_keys(keys, "new", "old", "new")
        time.sleep(1.1)  # it is looked at once a second
        done = store.control.reencrypt(Selection(tenant="acme")).wait(WAIT_S)
        assert done.state is State.DONE and done.counts["chunks_rewritten"] == 4
    write_keys(keys, "new", "new")
    with keyed(tmp_root / "root", keys) as served, connected(served) as store:
        count, kv = store.namespace("m", LAYOUT, tenant="acme").get(TOKENS)
        assert count == len(TOKENS) and kv.tobytes() == KV.tobytes()
    write_keys(keys, "other", "other")
    with keyed(tmp_root / "root", keys) as served, connected(served) as store:
        cache = store.namespace("m", LAYOUT, tenant="acme")
        refused = store.control.reencrypt(Selection(tenant="acme")).wait(WAIT_S)
        assert refused.counts["chunks_no_key"] == 4 and "--keys" in refused.message
        assert encodings(store.control, cache) == {Encoding.ENCRYPTED}, "a lookup needs no keys"
        assert cache.match(TOKENS) == len(TOKENS) or cache.get(TOKENS)[0] == 0


def test_the_pace_is_kept_and_changes_while_it_runs(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        store.namespace("m", LAYOUT).put(TOKENS, KV)
        control = store.control
        control.set_limits({"recode_bytes_per_s_max": 100})  # a chunk of 36 KiB takes some minutes
        ticket = control.compress(Selection(tenant=""))
        assert ticket.wait(0.5).state is State.RUNNING
        ticket.cancel()
        assert ticket.wait(WAIT_S).state is State.CANCELLED
        assert ticket.last.counts["chunks_rewritten"] == 1
        control.set_limits({"recode_bytes_per_s_max": 1e9})
        done = control.compress(Selection(tenant="")).wait(WAIT_S)
        assert (done.counts["chunks_rewritten"], done.counts["chunks_kept"]) == (3, 1), "the rest, by asking again"


def test_a_pace_that_was_a_mistake_is_put_right_while_one_waits(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        store.namespace("m", LAYOUT).put(TOKENS, KV)
        control = store.control
        control.set_limits({"recode_bytes_per_s_max": 1})  # hours for one chunk
        ticket = control.compress(Selection(tenant=""))
        eventually(lambda: ticket.wait(0.1).counts.get("chunks_rewritten") == 1, "it waits after the first chunk")
        control.set_limits({"recode_bytes_per_s_max": 1e9})
        assert ticket.wait(WAIT_S).state is State.DONE


def test_recoding_needs_a_kind_and_a_selection() -> None:
    with serving() as served, raw_channel(served) as channel:
        stub = ControlStub(channel)
        for request in (
            pb.RecodeRequest(selection=pb.Selection(tenant="acme")),
            pb.RecodeRequest(recoding=pb.RECODING_COMPRESS),
        ):
            code, _, _ = refused(lambda asked=request: stub.Recode(asked, timeout=WAIT_S))  # type: ignore[misc]
            assert code is grpc.StatusCode.INVALID_ARGUMENT
