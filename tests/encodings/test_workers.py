"""Encoded chunks through a worker: each path gives the bytes, and no descriptor of such a file ever leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.core.write_mode import WriteMode
from kvstore.engine.settings import NO_TIERS, TierSettings
from kvstore.transport.channel import Channel, FrameKind
from kvstore.worker.server import Worker
from tests.encodings.test_node import namespace, opened, put_all, reads_right
from tests.kit.cases import for_each
from tests.kit.keyed import key_file
from tests.kit.workers import Served, connected

pytestmark = pytest.mark.slow


@contextmanager
def worker_on(root: Path, keys: Path, settings: TierSettings, *, compress: bool) -> Iterator[Served]:
    with opened(root, key_file(keys, "a"), settings, compress=compress) as (member, _):
        worker = Worker(member, "127.0.0.1:0", None)
        try:
            worker.start()
            yield Served(worker, member)
        finally:
            worker.stop()


@for_each("bulk", ["shared", "tcp", "grpc"])
@for_each("memory", [0, 16 << 20])
@for_each("how", ["encrypted", "compressed"])
def test_every_way_reads_what_was_put(
    tmp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, memory: int, bulk: str
) -> None:
    tenant = "acme" if how == "encrypted" else "other"
    handed: list[int] = []
    send = Channel.send

    def noting(self: Channel, kind: FrameKind, number: int, *rest: object, **given: object) -> None:
        handed.extend(rest[1] if kind is FrameKind.FILES and len(rest) > 1 else [])  # type: ignore[arg-type]
        send(self, kind, number, *rest, **given)  # type: ignore[arg-type]

    settings = TierSettings.of(memory, None, WriteMode.UNCACHED) if memory else NO_TIERS
    with worker_on(tmp_root, tmp_path / "keys.json", settings, compress=how == "compressed") as served:
        with connected(served, bulk=bulk) as store:
            put_all(store, tenant)
        served.member.node.forget()
        monkeypatch.setattr(Channel, "send", noting)
        with connected(served, bulk=bulk) as store:
            for _ in range(3):  # by the third time memory has them
                reads_right(namespace(store, tenant))
            stats = store.stats()
            assert stats["miss_damaged"] == stats["miss_key"] == 0
    if how == "encrypted":
        assert not handed
