"""Hints of a request: how long its KV is worth keeping, and pins.

vLLM passes on two things that it does not look into: ``kv_transfer_params`` of a request, and ``kv_hints`` of an
orchestrator (``vllm/v1/kv_hints``). What it schedules by, a request's ``priority``, counts where these do not say more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from zlib import crc32

import msgspec

from kvstore.client.cache import BlockCache, Pin, check_pin
from kvstore.connectors.common import LazyStore, RecentMap
from kvstore.connectors.vllm.adapters import Check
from kvstore.connectors.vllm.blocks import BlockHashes, GroupKind, Runs
from kvstore.connectors.vllm.lookups import Lookup
from kvstore.core.executor import Tasks
from kvstore.core.recency import PRIORITY_DEFAULT, Hints, Preset
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

NAME = "kvstore"
"""The entry of ``kv_transfer_params``, and the ``action_type`` of a hint."""
URGENCY_MAX = 25
"""The most that vLLM's own priority raises or lowers ours."""
PIN_TTL_S = 3600.0
PinName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]


class RequestHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hints of one request. Raises InvalidRequest for invalid ones."""

    priority: int | None = None
    ttl: float | None = None
    preset: Preset | None = None
    pin: PinName = ""
    """The name under which its prompt is pinned; empty: it is not."""
    pin_ttl: float = PIN_TTL_S
    unpin: PinName = ""
    """The name whose pins end with this request; empty: none."""

    def __post_init__(self) -> None:
        check_pin(self.pin_ttl, self.pin)
        Hints.of(self.priority, self.ttl, self.preset)

    @property
    def hints(self) -> Hints:
        """How long the blocks that it stores are worth keeping."""
        return Hints.of(self.priority, self.ttl, self.preset)


NOTHING = RequestHints()


def said_of(request: Any) -> RequestHints:
    """Returns the hints of a request; if those for kvstore are invalid, only those for vLLM itself."""
    own: dict[str, Any] = {"priority": _priority_of(request)}
    said = _said(request)
    try:
        if isinstance(said, Mapping):
            said = {name: value for name, value in said.items() if value is not None}
            said = own | {"priority": None} | said if "preset" in said else own | said
        return msgspec.convert(own if said is None else said, RequestHints)
    except msgspec.ValidationError as error:
        log.warning("kvstore: the hints of request %s are ignored: %s", request.request_id, error)
        return RequestHints(**own)


def _priority_of(request: Any) -> int:
    """Returns our priority for vLLM's own, whose default is 0; a lower one is more urgent."""
    urgency = getattr(request, "priority", 0)
    if not isinstance(urgency, int):
        return PRIORITY_DEFAULT
    return PRIORITY_DEFAULT - max(-URGENCY_MAX, min(URGENCY_MAX, urgency))


def _said(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and NAME in params:
        return params[NAME]
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    return next((each.payload for each in actions if each.action_type == NAME), None)


# One unfinished request of the engine, as the scheduler's half knows it.


STALE_S = 5.0
"""A result that the request has not used by then is looked up again."""


@dataclass(slots=True)
class RequestState:
    """Its state from its arrival to its end."""

    request: Any
    said: RequestHints = NOTHING
    lookup: Lookup | None = None
    answered_s: float | None = None
    """Time of the look-up's answer."""
    asked_tokens: int = 0
    """Tokens in the engine's own cache at the last look-up."""
    stored_tokens: int = 0
    """Leading tokens that are stored already, or ordered to be."""
    renewed_s: float = 0.0
    """Time of the last look-up of its blocks from the first on."""
    adapter: Check | None = None
    arrived_s: float = 0.0
    parting: int = 0
    """Tokens that the prompt shares with a stored one, if a hit could not have all: others may share them too."""
    is_parting: bool = False
    """True until the blocks before ``parting`` that the engine has itself were ordered to be stored."""
    loading: bytes = b""
    """The first key of those that it loads now, for others to wait for; empty if it loads nothing."""
    loading_until_s: float = 0.0

    def is_stale(self, now_s: float) -> bool:
        """True if the answer is too old. A look-up without an answer has its own deadline."""
        return self.answered_s is not None and now_s > self.answered_s + STALE_S

    def abandon(self) -> None:
        """Drops the look-up, and spares the threads the rest of it."""
        if self.lookup is not None:
            self.lookup.abandoned = True
        self.lookup = self.answered_s = None


# Prompts that requests pin by name: pinned on threads of their own, once their blocks are in the store.
#
# A request never fails or waits for it. What cannot be pinned is left to the collector, with a warning.


PIN_THREADS = 2
PINS_WAITING_MAX = 128
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
    named: BlockHashes
    prompt_tokens: int
    until_s: float
    """When to pin what is there, even if some is missing."""


class Pinning:
    """The pins of one engine. ``ended`` is called by the scheduler's thread alone."""

    def __init__(self, store: LazyStore, runs: Runs, wait_s: float) -> None:
        """``wait_s``: how long after a request's end its blocks may come into the store."""
        self._store = store
        self._runs = runs
        self._wait_s = wait_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the pins
        self._pins: RecentMap[str, list[Pin]] = RecentMap(NAMES_MAX)
        # One thread for all that is said of a name, in order: an unpin must not overtake a pin that waits for blocks.
        self._threads = [Tasks("kvstore-vllm-pins", 1, PINS_WAITING_MAX) for _ in range(PIN_THREADS)]

    def ended(self, tracked: RequestState, named: BlockHashes) -> None:
        """Does at the end of a request what it says about pins."""
        said = tracked.said
        if said.unpin:
            self._submit(said.unpin, partial(self._unpin, said.unpin))
        if said.pin:
            chain = BlockHashes(tuple(named.hashes), named.ending)
            until_s = time.monotonic() + self._wait_s
            wish = _Wish(said.pin, said.pin_ttl, chain, tracked.request.num_prompt_tokens, until_s)
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
        if not self._threads[crc32(name.encode()) % PIN_THREADS].submit(task):
            log.warning("kvstore: too many pins wait: what a request says of %r is left out", name)

    def _pin(self, wish: _Wish) -> None:
        caches = self._store.caches()
        if caches is None:
            log.warning("kvstore: %r is not pinned: the store does not answer", wish.name)
            return
        pins: list[Pin] = []
        try:
            for number, cluster in enumerate(self._runs.clusters):
                keys = self._runs.keys(wish.named, number, 0, wish.prompt_tokens)
                for cache in caches if keys else ():
                    if cluster.kind is GroupKind.FULL:
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
