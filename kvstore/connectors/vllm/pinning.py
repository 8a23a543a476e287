"""Prompts that requests pin by name: pinned on threads of their own, once their blocks are in the store.

A request never fails or waits for it. What cannot be pinned is left to the collector, with a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from kvstore.background import Tasks
from kvstore.client.cache import BlockCache, Pin
from kvstore.connectors.vllm.groups import Kind
from kvstore.connectors.vllm.link import Link
from kvstore.connectors.vllm.runs import Named, Runs
from kvstore.connectors.vllm.tracked import Tracked
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

THREADS = 2
WAITING_MAX = 128
"""Words about pins that wait for one thread."""
NAMES_MAX = 1_024
"""Names whose pins this engine can end. Pins of names beyond that end by themselves, or by ``kvstore unpin``."""
LOOK_S = 0.1
"""Interval between two looks for blocks that are still on their way to the store."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request's order to pin the blocks of its prompt."""

    name: str
    ttl_s: float
    named: Named
    prompt_tokens: int
    until_s: float
    """When to pin what is there, even if some is missing."""


class Pinning:
    """The pins of one engine. ``ended`` is called by the scheduler's thread alone."""

    def __init__(self, link: Link, runs: Runs, wait_s: float) -> None:
        """``wait_s``: how long after a request's end its blocks may come into the store."""
        self._link = link
        self._runs = runs
        self._wait_s = wait_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the pins
        self._pins: OrderedDict[str, list[Pin]] = OrderedDict()
        # One thread for all that is said of a name, in order: an unpin must not overtake a pin that waits for blocks.
        self._threads = [Tasks("kvstore-vllm-pins", 1, WAITING_MAX) for _ in range(THREADS)]

    def ended(self, tracked: Tracked, named: Named) -> None:
        """Does at the end of a request what it says about pins."""
        said = tracked.said
        if said.unpin:
            self._submit(said.unpin, partial(self._unpin, said.unpin))
        if said.pin:
            chain = Named(tuple(named.hashes), named.ending)
            until_s = time.monotonic() + self._wait_s
            wish = _Wish(said.pin, said.pin_ttl_s, chain, tracked.request.num_prompt_tokens, until_s)
            self._submit(said.pin, partial(self._pin, wish))

    def close(self) -> None:
        """Ends the threads. What is pinned stays so until its time is over."""
        self._closing.set()
        for thread in self._threads:
            thread.close(0.0)

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was said is done; False if that takes longer."""
        ends_s = time.monotonic() + timeout_s
        return all(thread.drain(max(0.0, ends_s - time.monotonic())) for thread in self._threads)

    def _submit(self, name: str, task: partial[None]) -> None:
        if not self._threads[crc32(name.encode()) % THREADS].submit(task):
            log.warning("kvstore: too many pins wait: what a request says of %r is left out", name)

    def _pin(self, wish: _Wish) -> None:
        caches = self._link.caches()
        if caches is None:
            log.warning("kvstore: %r is not pinned: the store does not answer", wish.name)
            return
        pins: list[Pin] = []
        try:
            for number, cluster in enumerate(self._runs.clusters):
                keys = self._runs.keys(wish.named, number, 0, wish.prompt_tokens)
                for cache in caches if keys else ():
                    if cluster.kind is Kind.FULL:
                        self._await_stored(cache, keys, wish.until_s)
                    pins.append(cache.pin(keys, ttl=wish.ttl_s, owner=wish.name))
        except KVStoreError as error:
            log.warning("kvstore: %r is not pinned in full: %s", wish.name, error)
        self._keep(wish.name, [each for each in pins if each.id])

    def _await_stored(self, cache: BlockCache, keys: list[bytes], until_s: float) -> None:
        while cache.match(keys) < len(keys) and time.monotonic() < until_s:
            if self._closing.wait(LOOK_S):
                return

    def _keep(self, name: str, pins: list[Pin]) -> None:
        """Remembers the pins of a name in place of those before, which end: the new ones hold already."""
        if not pins:
            return
        with self._lock:
            before = self._pins.pop(name, [])
            self._pins[name] = pins
            if len(self._pins) > NAMES_MAX:
                self._pins.popitem(last=False)
        _release(name, before)

    def _unpin(self, name: str) -> None:
        with self._lock:
            pins = self._pins.pop(name, [])
        _release(name, pins)


def _release(name: str, pins: list[Pin]) -> None:
    for pin in pins:
        try:
            pin.release()
        except KVStoreError as error:
            log.warning("kvstore: a pin of %r ends by itself only, unless `kvstore unpin %s`: %s", name, pin.id, error)
