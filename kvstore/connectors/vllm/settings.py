"""The settings of the vLLM connector, checked when the engine starts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.connectors import common
from kvstore.connectors.common import Count, Seconds, TimeoutS


class SecondaryTierSettings(common.EngineSettings, frozen=True, kw_only=True):
    """The settings of an entry in ``secondary_tiers``, which those of the connector share."""

    lookup_timeout_s: TimeoutS = 1.0
    """A look-up that takes longer is a miss; the scheduler never waits for it."""
    fingerprint: str = ""
    """Digest of the weights; computed from the weight files if it is not given."""
    pause_s: Seconds = 10.0
    """For this long after a time-out, look-ups miss immediately."""
    load_threads: Count = 2
    """Requests that a worker loads concurrently."""


class ConnectorSettings(SecondaryTierSettings, frozen=True, kw_only=True):
    """The settings in ``kv_connector_extra_config``."""

    wait_s: Seconds = 0.0
    """The time that a look-up waits for missing blocks: for decode engines, while a prefill engine writes."""
    store_bytes_max: Count = 2 << 30
    """Host memory for blocks on their way to the store, on each worker; over it they are not stored."""
    tp_shards: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Parts by heads in which blocks are stored, for engines of any tensor-parallel size that divides it to share them;
    0: engines of one size share."""
    prompt_only: bool = False
    """Store the blocks of prompts only, not those of what was generated."""
    descents: bool = True
    """Write tokens and the block before into the file of each block, so that ``kvstore events`` can announce it."""

    def looking_only(self) -> ConnectorSettings:
        """For the scheduler, which reads and writes no block: memory would be taken for nothing there."""
        return msgspec.structs.replace(self, memory=None, write=None)
