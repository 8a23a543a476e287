"""The settings of the vLLM connector, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvstore.connectors import opening
from kvstore.connectors.opening import MEMORY_KEYS, setting
from kvstore.errors import InvalidRequest

LOADS = ("async", "sync")
WHERE = "kv_connector_extra_config"


@dataclass(frozen=True)
class Settings(opening.Settings):
    """``kv_connector_extra_config``: where the store is (``root`` and ``etcd``, or ``connect``), and these fields."""

    lookup_timeout_s: float = setting(1.0)
    """A look-up that takes longer is a miss; the scheduler goes on meanwhile."""
    fingerprint: str = ""
    """Digest of the weights; computed from the weight files by default."""
    load: str = setting("async", choices=LOADS)
    """``async``: a request waits for its KV while others run. ``sync``: it is loaded within its first step."""
    layerwise: bool = False
    """With ``sync``: copy layer by layer while the model runs; vLLM then keeps its CUDA graphs piecewise."""
    wait_s: float = setting(0.0, least=0)
    """How long a look-up waits for missing blocks: for decode engines, while a prefill engine writes."""
    pause_s: float = setting(10.0, least=0)
    """After a time-out, look-ups are misses for this long."""
    store_bytes_max: int = setting(2 << 30, least=1)
    """Host memory for blocks being stored, on each worker; beyond it blocks are not stored."""
    load_bytes_max: int = setting(64 << 20, least=1)
    """Host memory of each loading thread."""
    load_threads: int = setting(2, least=1)
    """Requests that a worker loads at once."""
    prompt_only: bool = False
    """Store only the blocks of prompts, not those of generated tokens."""
    drain_s: float = setting(5.0, least=0)
    """How long a worker goes on storing when it shuts down."""

    def looking_only(self) -> Settings:
        """Returns the scheduler's settings: it reads and writes no block, so it gets no memory for them."""
        return replace(self, place={key: value for key, value in self.place.items() if key not in MEMORY_KEYS})

    def check_loads(self, *, batches: int, drafts: bool) -> None:
        """Raises InvalidRequest for synchronous loads if vLLM could not make up for a failed one.

        ``batches`` is how many steps vLLM runs at once, ``drafts`` whether it decodes speculatively.
        """
        if self.load == "sync" and batches > 1:
            # The next step would compute on missing KV before this one is known to have failed.
            raise InvalidRequest(
                f"load='sync', and vLLM runs {batches} steps at once: after a load that failed, requests would go on "
                'with wrong KV; use "load": "async", or start with --no-async-scheduling and no pipeline parallelism'
            )
        if self.layerwise and drafts:
            # vLLM then asks for failed loads before the draft model has asked for its layers.
            raise InvalidRequest("layerwise loads do not go with speculative decoding: set layerwise to false")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = WHERE) -> Self:
        """Makes settings as the base class does. Raises InvalidRequest."""
        return super().of(given, where)
