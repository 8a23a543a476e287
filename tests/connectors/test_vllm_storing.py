"""A worker's half of the vLLM connector stores blocks, and counts those that did not come into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.adapters import AdapterSnapshot
from kvstore.connectors.vllm.metrics import EngineCounts
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.recency import Hints
from kvstore.errors import Overloaded, Unavailable
from tests.kit.cases import for_each
from tests.kit.patience import NEVER_S, PATIENCE_S
from tests.kit.vllm_connector import BASE
from tests.kit.vllm_modules import vllm_modules


class Pages:
    """Blocks of 8 bytes that need no device."""

    block_bytes = 8

    def __init__(self, count: int) -> None:
        self.count = count

    def copy_out(self, blocks: Sequence[int]) -> Any:
        return SimpleNamespace(rows=lambda: [bytes(8)] * len(blocks))

    def parts(self, rows: list[bytes]) -> list[list[bytes]]:
        return [rows] * self.count


class Store:
    """Takes blocks but those whose key begins with ``refused``; fails if it is ``down``. The others are more parts."""

    def __init__(self, *others: Store, refused: bytes = b"no") -> None:
        self.parts = [self, *others]
        self.down = False
        self.said: dict[bytes, bytes] = {}
        self.more: dict[str, Any] = {}
        """The place and the hints of the last put."""
        self._refused = refused

    def caches(self) -> list[Store] | None:
        return self.parts

    def put(self, keys: list[bytes], rows: list[bytes], *, descents: list[bytes], **more: Any) -> list[bool]:
        if self.down:
            raise Unavailable("down")
        self.said.update(zip(keys, descents, strict=bool(descents)))
        self.more = more
        return [not key.startswith(self._refused) for key in keys]


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    torch = dict.fromkeys(("int64", "int32", "int16", "uint8"))
    with vllm_modules({BASE: {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object}, "torch": torch}):
        yield


def storer(store: Store) -> Any:
    from kvstore.connectors.vllm.worker import Storer

    settings = ConnectorSettings.of({"root": "memory://", "pause_s": NEVER_S})
    return Storer(settings, store, [Pages(len(store.parts))], EngineCounts())  # type: ignore[arg-type, list-item]


def counted(half: Any) -> tuple[int, int, int]:
    """Blocks stored, failed and shed since the last call, once none is on its way."""
    assert half._idle.wait(PATIENCE_S)
    counts = half._counts.take()
    stored, failed, shed = (counts.get(f"{name}_blocks", 0) for name in ("stored", "store_failed", "store_shed"))
    return stored, failed, shed


def run(*keys: bytes) -> Any:
    from kvstore.connectors.vllm.blocks import BlockRange

    return BlockRange(0, list(keys), [(block,) for block in range(len(keys))])


def test_each_block_that_was_to_be_stored_is_counted_once() -> None:
    store = Store()
    half = storer(store)
    half.store(run(b"one", b"not this", b"two"))
    assert counted(half) == (2, 1, 0)
    store.down = True
    half.store(run(b"three"))
    assert counted(half) == (0, 1, 0)
    half.store(run(b"four"))  # it is spared for a while
    assert counted(half) == (0, 0, 1)
    half.close(0.0)


def test_a_block_is_stored_if_all_of_its_parts_are() -> None:
    second = Store(refused=b"t")
    half = storer(Store(second))
    half.store(run(b"one", b"not this", b"two"))
    assert counted(half) == (1, 2, 0)
    second.down = True
    half.store(run(b"four"))
    assert counted(half) == (0, 1, 0)
    half.close(0.0)


def test_what_a_file_says_stays_with_its_block_when_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.connectors.vllm import worker

    monkeypatch.setattr(worker, "AT_ONCE_MAX", 2)
    store = Store(Store())
    half = storer(store)
    keys = [b"a", b"b", b"c", b"d", b"e"]
    half._on_the_way.update({b"a", b"d"})
    half.store(replace(run(*keys), descents=[b"of " + key for key in keys]))
    half._thread.close(PATIENCE_S)
    assert store.said == {key: b"of " + key for key in (b"b", b"c", b"e")}
    assert not any(each.said for each in store.parts[1:]), "the first part alone says it"


@for_each("error", [Overloaded("the GPU has no memory to spare"), RuntimeError("out of memory")])
def test_a_gpu_without_memory_to_spare_costs_only_what_is_not_stored(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = storer(Store())

    def full(_: object, blocks: Sequence[int]) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "copy_out", full)
        half.store(run(b"one", b"two"))
    assert counted(half) == (0, 2, 0)
    half.store(run(b"one"))
    assert counted(half) == (1, 0, 0)
    half.close(0.0)


def test_a_block_is_stored_while_its_adapter_is_unchanged(tmp_path: Path) -> None:
    store = Store()
    half = storer(store)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    sealed = replace(run(b"one"), first=4, seal=AdapterSnapshot.of(str(tmp_path)), hints=Hints(80, 300))
    half.store(sealed)
    assert counted(half) == (1, 0, 0)
    assert store.more == {"first": 4, "priority": 80, "ttl": 300}
    (tmp_path / "adapter_model.safetensors").write_bytes(b"22")
    half.store(sealed)
    assert counted(half) == (0, 1, 0)
    half.close(0.0)
