"""The settings of the vLLM connector, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvstore.connectors.opening import MEMORY_KEYS, PLACE_KEYS, check_keys
from kvstore.errors import InvalidRequest

LOADS = ("async", "sync")


@dataclass(frozen=True, slots=True)
class Settings:
    """``kv_connector_extra_config``: where the store is (``root`` and ``etcd``, or ``connect``), and what follows."""

    place: Mapping[str, Any] = field(default_factory=dict)
    """The keys that say where the store is."""
    fingerprint: str = ""
    """Digest of the weights; computed from the weight files where it is not given."""
    tenant: str = ""
    """Whose KV it is: tenants share nothing."""
    load: str = "async"
    """``async``: a request waits aside for its KV while others run. ``sync``: it is loaded within its first step."""
    layerwise: bool = False
    """With ``sync``: copy layer by layer while the model runs; vLLM then keeps its CUDA graphs piecewise."""
    lookup_timeout_s: float = 1.0
    """A look-up that takes longer is a miss; the scheduler goes on meanwhile."""
    load_timeout_s: float = 10.0
    """What has not been read after this time is computed."""
    store_timeout_s: float = 30.0
    """A store that takes longer is given up."""
    wait_s: float = 0.0
    """How long a look-up waits for blocks that are not there yet: for decode engines, while a prefill engine writes."""
    pause_s: float = 10.0
    """After a time-out, look-ups are misses at once for this long."""
    store_bytes_max: int = 2 << 30
    """Host memory for blocks on their way to the store, on each worker; over it they are not stored."""
    load_bytes_max: int = 64 << 20
    """Host memory of one of the threads that load."""
    load_threads: int = 2
    """Requests that a worker loads at once."""
    prompt_only: bool = False
    """Store the blocks of prompts only, not those of what was generated."""
    drain_s: float = 5.0
    """How long a worker that shuts down goes on storing."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, default = getattr(self, each.name), each.default
            if isinstance(default, bool | str):
                wanted, fits = type(default).__name__, isinstance(value, type(default))
            elif isinstance(default, int | float):
                least = 0 if each.name in ("wait_s", "drain_s", "pause_s") else 1e-3
                wanted = f"a {type(default).__name__} of at least {least}"
                fits = isinstance(value, (int, float) if isinstance(default, float) else int)
                fits = fits and not isinstance(value, bool) and value >= least
            else:
                continue
            if not fits:
                raise InvalidRequest(f"kv_connector_extra_config {each.name}={value!r}: expected {wanted}")
        if self.load not in LOADS:
            raise InvalidRequest(f"kv_connector_extra_config load={self.load!r}: expected one of {', '.join(LOADS)}")

    def looking_only(self) -> Settings:
        """For the scheduler, which reads and writes no block: memory would be taken for nothing there."""
        return replace(self, place={key: value for key, value in self.place.items() if key not in MEMORY_KEYS})

    def check_loads(self, *, batches: int, drafts: bool) -> None:
        """Raises InvalidRequest for synchronous loads where vLLM could not make up for one that failed.

        ``batches`` is how many steps it has under way at once, ``drafts`` whether it decodes speculatively.
        """
        if self.load == "sync" and batches > 1:
            # The next step is computed on KV that did not come before this one is known to have failed.
            raise InvalidRequest(
                f"load='sync', and vLLM runs {batches} steps at once: after a load that failed, requests would go on "
                'with wrong KV; use "load": "async", or start with --no-async-scheduling and no pipeline parallelism'
            )
        if self.layerwise and drafts:
            # vLLM then asks for failed loads before the draft model has asked for its layers.
            raise InvalidRequest("layerwise loads do not go with speculative decoding: set layerwise to false")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """From ``kv_connector_extra_config``. Raises InvalidRequest for keys or values that make no sense."""
        own = {each.name for each in fields(cls)} - {"place"}
        check_keys(given, PLACE_KEYS | own, "kv_connector_extra_config")
        place = {key: value for key, value in given.items() if key in PLACE_KEYS}
        return cls(place, **{key: value for key, value in given.items() if key in own})
