"""Look-ups of vLLM's secondary tier. No vLLM is needed here."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.results import StoredBlocks
from kvstore.errors import Unavailable
from tests.kit.cases import for_each
from tests.kit.vllm_modules import vllm_modules

OFFLOAD = "vllm.v1.kv_offload"
MODULES: dict[str, dict[str, Any]] = {
    f"{OFFLOAD}.base": {
        "Medium": SimpleNamespace(STORAGE="storage"),
        "Locality": str,
        "LookupResult": str,
        "RequestOffloadingContext": object,
        "OffloadingEvent": SimpleNamespace,
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    },
    f"{OFFLOAD}.tiering.async_lookup": {"AsyncLookupManager": type("Base", (), {"__init__": lambda self, **_: None})},
    f"{OFFLOAD}.tiering.base": {"JobResult": SimpleNamespace, "SecondaryTierManager": object, "TransferJob": object},
}


class Slow:
    """A store that takes its time and then fails, or not."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0

    def caches(self) -> list[Slow]:
        return [self]

    def present(self, keys: list[bytes]) -> list[bool]:
        self.asked += 1
        time.sleep(0.05)
        if self.error is not None:
            raise self.error
        return [True] * len(keys)


@for_each("error", [None, Unavailable("nobody answers")])
def test_after_one_look_up_past_the_deadline_the_next_ones_do_not_wait(error: Exception | None) -> None:
    slow = Slow(error)
    with vllm_modules(MODULES):
        from kvstore.connectors.vllm_tier import TierLookups

        settings = ConnectorSettings.of({"root": "memory://", "lookup_timeout_s": 0.04, "pause_s": 60})
        lookups = TierLookups("tier", slow, settings)  # type: ignore[arg-type]
        if error is None:
            assert lookups.batch_lookup([b"key"], None) == [True]
        else:
            with pytest.raises(Unavailable):
                lookups.batch_lookup([b"key"], None)
        assert lookups.batch_lookup([b"key"], None) == [False]
        assert slow.asked == 1


class Noting:
    """A store that notes what is put, and has room for all but one key. After ``puts_max`` puts it is away."""

    def __init__(self, refused: bytes, puts_max: int = 100) -> None:
        self.refused = refused
        self._puts_max = puts_max
        self.puts: list[tuple[int, list[tuple[bytes, bytes]]]] = []

    def caches(self) -> list[Noting]:
        return [self]

    def put(self, keys: list[bytes], rows: list[bytes], *, first: int) -> StoredBlocks:
        if len(self.puts) == self._puts_max:
            raise Unavailable("nobody answers")
        self.puts.append((first, list(zip(keys, rows, strict=True))))
        return StoredBlocks([key != self.refused for key in keys])


def key(group: int, end: int) -> bytes:
    return b"%04d" % end + group.to_bytes(4, "big")


def stored(store: Noting, ends: dict[bytes, int]) -> list[bool]:
    """Has the tier store chunks that end at these tokens: attention in chunks of 64, a window in chunks of 32."""
    with vllm_modules(MODULES):
        from kvstore.connectors.vllm_tier import KVStoreTier

        tier = KVStoreTier.__new__(KVStoreTier)
        tier._store, tier._chunk_tokens = store, {0: 64, 1: 32}  # type: ignore[assignment]
        tier._chunks = [b"%d" % number for number in range(10)]  # type: ignore[assignment]
        context, chunks = SimpleNamespace(get_offload_key_position=ends.get), list(range(len(ends)))[::-1]
        job = SimpleNamespace(keys=ends.keys(), chunk_ids=chunks, is_promotion=False, req_context=context)
        return tier._transfer(job, list(ends))


def test_chunks_are_stored_at_their_places_in_the_prompt_though_vllm_gives_them_in_no_order() -> None:
    # The last chunk of attention is not whole.
    ends = {key(0, 192): 192, key(1, 64): 64, key(0, 64): 64, key(0, 200): 200, key(1, 192): 192, key(0, 128): 128}
    store = Noting(refused=key(1, 64))
    assert stored(store, ends) == [each != key(1, 64) for each in ends]
    assert store.puts == [
        (0, [(key(0, 64), b"3"), (key(0, 128), b"0"), (key(0, 192), b"5"), (key(0, 200), b"2")]),
        (1, [(key(1, 64), b"4")]),
        (5, [(key(1, 192), b"1")]),
    ]
