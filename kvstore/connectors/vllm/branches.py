"""Branches that sessions have abandoned: told to the store on a thread of its own, so that the scheduler never waits.

A hint alone: what fails here, or comes while too many wait, leaves a branch to age as any other KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from kvstore.background import Tasks
from kvstore.connectors.common import Abandoned, Branch, Sessions
from kvstore.connectors.vllm.counts import EngineCount, EngineCounts
from kvstore.connectors.vllm.link import Link
from kvstore.connectors.vllm.runs import Named, Runs
from kvstore.connectors.vllm.tracked import Tracked
from kvstore.errors import KVStoreError
from kvstore.wire.limits import BLOCKS_MAX

log = logging.getLogger(__name__)

WAITING_MAX = 256
SETTLE_S = 10.0
"""A request's last blocks come into the store up to this long after its end. Who used a branch later still uses it."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """The blocks of a request by name. What vLLM hashed alike has other names under another ending."""

    named: Named

    def __len__(self) -> int:
        return len(self.named.hashes)

    def __getitem__(self, at: int, /) -> tuple[bytes, bytes]:
        return self.named.hashes[at], self.named.ending


class Branches:
    """Superseding for one engine. Called by the scheduler's thread alone."""

    def __init__(self, link: Link, runs: Runs, counts: EngineCounts) -> None:
        self._link = link
        self._runs = runs
        self._counts = counts
        self._sessions = Sessions()
        self._thread = Tasks("kvstore-vllm-branches", 1, WAITING_MAX)

    def ended(self, tracked: Tracked, named: Named, running: Iterable[Named]) -> None:
        """Notes the end of a request, while ``running`` go on."""
        if not tracked.said.session:
            return
        prompt = tracked.request.num_prompt_tokens // self._runs.hash_tokens
        branch = Branch(_Chain(Named(tuple(named.hashes), named.ending)), prompt, time.monotonic())
        found = self._sessions.ended(tracked.said.session, branch, tracked.said.supersede, map(_Chain, running))
        for each in found:
            self._thread.submit(partial(self._supersede, each))

    def close(self) -> None:
        """Drops what waits."""
        self._thread.close(0.0)

    def _supersede(self, branch: Abandoned) -> None:
        caches = self._link.caches()
        if caches is None:
            return
        assert isinstance(branch.names, _Chain)
        named, first = branch.names.named, branch.first * self._runs.hash_tokens
        unused_s = max(0.0, time.monotonic() - branch.used_s - SETTLE_S)
        try:
            for number, cluster in enumerate(self._runs.clusters):
                whole = -(-first // cluster.block_tokens) * cluster.block_tokens
                keys = self._runs.keys(named, number, whole, self._runs.known_tokens(named))
                for stop in range(len(keys), 0, -BLOCKS_MAX):
                    for cache in caches:
                        cache.supersede(keys[max(0, stop - BLOCKS_MAX) : stop], unused=unused_s)
                self._counts.add(EngineCount.SUPERSEDED_BLOCKS, len(keys))
        except KVStoreError as error:
            log.info("kvstore: an abandoned branch stays as it is: %s", error)
