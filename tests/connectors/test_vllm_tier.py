"""Look-ups of vLLM's secondary tier. No vLLM is needed here."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.settings import Settings
from kvstore.errors import Unavailable
from tests.connectors.vllm_modules import vllm_modules

OFFLOAD = "vllm.v1.kv_offload"
MODULES: dict[str, dict[str, Any]] = {
    f"{OFFLOAD}.base": {
        "Medium": SimpleNamespace(STORAGE="storage"),
        "Locality": str,
        "LookupResult": str,
        "RequestOffloadingContext": object,
    },
    f"{OFFLOAD}.tiering.async_lookup": {"AsyncLookupManager": type("Base", (), {"__init__": lambda self, **_: None})},
    f"{OFFLOAD}.tiering.base": {"JobResult": object, "SecondaryTierManager": object, "TransferJob": object},
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


@pytest.mark.parametrize("error", [None, Unavailable("nobody answers")])
def test_after_one_look_up_past_the_deadline_the_next_ones_do_not_wait(error: Exception | None) -> None:
    slow = Slow(error)
    with vllm_modules(MODULES):
        from kvstore.connectors.vllm_tier import _Lookups

        settings = Settings.of({"root": "memory://", "lookup_timeout_s": 0.04, "pause_s": 60})
        lookups = _Lookups("tier", slow, settings)  # type: ignore[arg-type]
        if error is None:
            assert lookups.batch_lookup([b"key"], None) == [True]
        else:
            with pytest.raises(Unavailable):
                lookups.batch_lookup([b"key"], None)
        assert lookups.batch_lookup([b"key"], None) == [False]
        assert slow.asked == 1
