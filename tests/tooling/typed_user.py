"""A user's program, annotated in full: type checkers accept every line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
import kvstore.aio
from kvstore import Cache, Hold, Layout, Pin, PutResult, Store
from kvstore.core.layout import checked_dtype
from kvstore.errors import KVStoreError, Overloaded, Unavailable

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=4)


def opened(folder: Path) -> Store:
    return kvstore.open(str(folder), memory=1 << 20, limits=kvstore.Limits(io_threads=2))


def typed(arguments: dict[str, str]) -> Layout:
    """Arguments of a program are checked first: the error says what was expected."""
    return Layout(2, 1, 8, checked_dtype(arguments["dtype"]), 4)


def bounded(folder: Path, size: int | None) -> tuple[Store, Store]:
    return kvstore.open(folder, max_bytes=size, ttl=7 * 86_400.0), kvstore.open(folder, max_bytes="auto")


async def bounded_async(folder: Path) -> float:
    async with kvstore.aio.open(folder, max_bytes=64 << 30, ttl=3600) as store:
        return (await store.stats())["bound_bytes"]


def connected(address: str, tls: kvstore.ClientTls | None) -> Store:
    return kvstore.connect(address, bulk="grpc", tls=tls, limits=kvstore.ClientLimits(match_s=1.0))


def through_etcd(endpoints: str) -> Store:
    return kvstore.connect(etcd=endpoints, etcd_tls=kvstore.EtcdTls("ca.crt"), etcd_user=kvstore.EtcdUser("me", "word"))


def stored(cache: Cache, tokens: list[int], kv: npt.NDArray[Any]) -> PutResult:
    try:
        result = cache.put(tokens, kv, preset="chat", write=kvstore.WriteMode.THROUGH)  # or its name
        return cache.put(tokens, kv, required=True) if result.reason == "overload" else result
    except Overloaded as error:
        return PutResult(0, 0, 0, 0, error.reason)
    except KVStoreError as error:
        raise Unavailable("later") from error


def read(cache: Cache, tokens: list[int]) -> tuple[int, npt.NDArray[Any]]:
    out = np.empty(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype)
    count: int = cache.get(tokens, out=out)
    return max(count, cache.match(tokens)), cache.get(tokens)[1]


def held(hold: Hold) -> int:
    with hold:
        layers = [layer for layer, k, v in hold.layers() if k.shape == v.shape]
        views: list[npt.NDArray[Any]] = hold.view()
        return hold.tokens + len(layers) + len(views)


def pinned(cache: Cache, tokens: list[int]) -> kvstore.PinRecord:
    pin: Pin = cache.pin(tokens, ttl=60.0)
    if not pin.release():
        print(pin.id, pin.tokens)
    return pin.record


def prefetched(cache: Cache, tokens: list[int]) -> int:
    operation: kvstore.Operation = cache.prefetch(tokens)
    cache.prefetch(tokens, tier="disk", worker="10.0.0.7:7070").cancel()
    cache.evict_first(tokens)
    is_ended: bool = operation.wait(1.0)
    return operation.done if is_ended and operation.state == "done" else operation.total


def planned(cache: Cache, prompts: list[list[int]]) -> list[int]:
    plan: kvstore.Plan = cache.plan(prompts, memory_tokens=1000)
    found: list[int] = []
    with plan.run(ahead=1) as run:
        for group in run:
            members: tuple[int, ...] = group.members
            found += members
    return found if plan.tokens_to_compute < plan.tokens_total else plan.order


def blocks(blocks: kvstore.BlockCache, key: bytes) -> list[bool]:
    stored: list[bool] = blocks.put([key], [b"abc"])
    with blocks.hold([key]) as hold:
        kept: kvstore.BlockHold = hold
        return stored + kept.get([key], [bytearray(3)])


def main() -> None:
    with opened(Path("kv")) as store:
        cache = store.namespace("model", LAYOUT, attributes={"tp": "1"})
        about: kvstore.Namespace = cache.namespace
        clearing: kvstore.Operation = store.clear(kvstore.Selection(namespace=about.digest), dry_run=True)
        cleared: kvstore.Cleared = cache.clear()
        hints: kvstore.Hints = kvstore.Hints.of(preset="rag")
        counts: dict[str, int | float] = store.stats()
        print(clearing.counts, cleared.chunks, hints.priority, counts, kvstore.__version__)
