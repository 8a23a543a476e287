"""The scheduler's half: what is in the store, what to load for a request, which blocks to store in a step.

It runs in the engine's scheduling loop, so nothing here waits while the engine has something to compute.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.connectors.common import LazyStore, RecentMap
from kvstore.connectors.vllm.adapters import Adapters, Check
from kvstore.connectors.vllm.blocks import BlockHashes, BlockRange, GroupKind, ReuseBoundaries, Runs, State, Tail
from kvstore.connectors.vllm.lookups import Lookup, Lookups
from kvstore.connectors.vllm.messages import IDLE_S, Load, Orders, WorkerReport
from kvstore.connectors.vllm.metrics import EngineCount, EngineCounts
from kvstore.connectors.vllm.namespaces import KVTopology
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.namespace import Namespace
from kvstore.core.recency import DEFAULT, PRIORITY_DEFAULT, Hints, Preset
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.connectors.vllm.descents import Describer

log = logging.getLogger(__name__)

# Hints of a request: how long its KV is worth keeping.
#
# vLLM passes on two things that it does not look into: ``kv_transfer_params`` of a request, and ``kv_hints`` of an
# orchestrator (``vllm/v1/kv_hints``). What it schedules by, a request's ``priority``, counts where these do not say
# more.


NAME = "kvstore"
"""The entry of ``kv_transfer_params``, and the ``action_type`` of a hint."""
URGENCY_MAX = 25
"""The most that vLLM's own priority raises or lowers ours."""


class RequestHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hints that a request may have."""

    priority: int | None = None
    ttl: float | None = None
    preset: Preset | None = None


def hints_of(request: Any) -> Hints:
    """Returns the hints of a request; if those for kvstore are invalid, only those for vLLM itself."""
    own: dict[str, Any] = {"priority": _priority_of(request)}
    said = _said(request)
    try:
        if isinstance(said, Mapping):
            said = {name: value for name, value in said.items() if value is not None}
            said = said if "preset" in said else own | said
        found = msgspec.convert(own if said is None else said, RequestHints)
        return Hints.of(found.priority, found.ttl, found.preset)
    except (msgspec.ValidationError, InvalidRequest) as error:
        log.warning("kvstore: the hints of request %s are ignored: %s", request.request_id, error)
        return Hints.of(**own)


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
    hints: Hints = DEFAULT
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
    is_mixed: bool = False
    """True if weights were replaced while it ran: its KV is of both, until vLLM computes it anew."""

    def abandon(self) -> None:
        """Drops the look-up, and spares the threads the rest of it."""
        if self.lookup is not None:
            self.lookup.abandoned = True
        self.lookup = self.answered_s = None


# The scheduler's half itself.


AVOID_S = 60.0
"""A block that could not be loaded is not looked up again for this long, or until it is stored again."""
AVOIDED_MAX = 65_536
ORDERED_MAX = 65_536
"""Blocks ordered to be stored that are remembered, for look-ups that were answered before."""
RENEW_S = 30.0
"""A request that still stores blocks looks its first ones up this often, so that they count as used like the last ones:
half of the quantum of recency (kvstore/core/recency.py)."""


class SchedulerHalf:
    """The connector's state in the scheduler. Used by its thread alone."""

    def __init__(
        self,
        settings: ConnectorSettings,
        shape: KVTopology,
        namespaces: Sequence[Namespace],
        *,
        loads: bool,
        stores: bool,
        describer: Describer | None = None,
        waits: bool = True,
    ) -> None:
        """``describer`` describes stored blocks in their files; None: they say nothing.

        ``waits`` is False if an idle step must not wait: other data-parallel ranks are in the same step.
        """
        self._settings = settings
        self._describer = describer
        self._shape = shape
        self._loads = loads
        self._stores = stores
        self._waits = waits
        self._namespaces = dict(enumerate(namespaces))
        self._runs = Runs(shape.clusters, shape.hash_tokens)
        self._unit = self._runs.unit
        self._whole = [number for number, each in enumerate(shape.clusters) if each.kind is GroupKind.FULL]
        """The clusters whose blocks a hit needs all."""
        self.counts = EngineCounts()
        self._store = LazyStore(settings.looking_only(), namespaces)
        self._lookups = Lookups(settings, self._store, self.counts)
        self._tracked: dict[str, RequestState] = {}
        self._new_loads: list[Load] = []
        self._avoided: RecentMap[bytes, float] = RecentMap(AVOIDED_MAX)
        """Until when blocks that could not be loaded are not looked up."""
        self._ordered: RecentMap[bytes, float] = RecentMap(ORDERED_MAX)
        """When blocks were last ordered to be stored."""
        self._loading: dict[bytes, tuple[RequestState, float]] = {}
        """The requests that load now, and until when others wait for them, by the first key of what they load."""
        self._asked: threading.Event | None = None
        """Set when something ends that vLLM asked for since the last step in vain."""
        self._adapters = Adapters(shape.adapters)
        self._era = b""
        self.manager: Any = None

    # Before a request runs

    def arrived(self, request: Any) -> None:
        """Implements ``on_new_request``."""
        tracked = self._tracked[request.request_id] = RequestState(request, hints_of(request))
        if request.lora_request is not None:
            tracked.adapter = self._adapters.begin(request.lora_request)
            tracked.arrived_s = time.monotonic()

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Implements ``get_num_new_matched_tokens``."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        if tracked.adapter is not None and tracked.adapter.seal is None:
            return self._waits_for(tracked, tracked.adapter), False
        tracked.is_mixed = False
        # An engine that only stores looks whether the store still has what its own cache has.
        is_asked = self._loads or (self._stores and computed_tokens > 0)
        if not is_asked or getattr(request, "skip_reading_prefix_cache", False):
            tracked.stored_tokens = computed_tokens
            return 0, False
        lookup = tracked.lookup
        # A look-up without an answer has its own deadline.
        is_stale = tracked.answered_s is not None and time.monotonic() > tracked.answered_s + STALE_S
        if tracked.asked_tokens != computed_tokens or is_stale or self._is_outdated(lookup):
            tracked.abandon()
            lookup = None
        if lookup is None:
            tracked.asked_tokens = computed_tokens
            tracked.renewed_s = time.monotonic()
            keys = self._unit_keys(tracked)
            tails = self._tails(tracked, len(keys) * self._unit)
            lookup = tracked.lookup = self._lookups.begin(keys, computed_tokens // self._unit, tails, self._unit)
            self.counts.add(EngineCount.LOOKUPS)
        found = self._lookups.result(lookup)
        if found is None:
            self._asked = lookup.done
            return None, False
        if tracked.answered_s is None:
            tracked.answered_s = time.monotonic()
        new = max(0, found.from_asked * self._unit - computed_tokens)
        if lookup.tails and computed_tokens % self._unit:
            new = 0  # vLLM has the state within a block, and others of its blocks may end elsewhere
        # A block that the engine still has and the store lost is stored again.
        tracked.stored_tokens = (
            min(found.from_start * self._unit, computed_tokens) if found.is_known else computed_tokens
        )
        if not self._loads:
            return 0, False
        self._part(tracked, found.shared * self._unit)
        if new and self._loads_already(lookup.first_key(lookup.asked), tracked):
            return None, False  # vLLM asks again, and then has them in its own cache
        return new, bool(new)

    def _part(self, tracked: RequestState, tokens: int) -> None:
        """Notes how much the prompt shares with a stored one beyond what can be loaded; 0 for nothing."""
        tracked.parting, tracked.is_parting = tokens, tokens > 0
        seen = getattr(tracked.request, "shared_prefix_boundary", None)
        if tokens and seen is not None:
            # vLLM ends a step there, as where its own cache shows the same, so that there is a state to store.
            tracked.request.shared_prefix_boundary = max(seen, tokens)

    def _waits_for(self, tracked: RequestState, check: Check) -> int | None:
        """Returns None while the files of the request's adapter are looked at; then it shares nothing: 0 tokens."""
        if not check.done.is_set() and time.monotonic() < tracked.arrived_s + self._settings.lookup_timeout_s:
            self._asked = check.done
            return None
        self.counts.add(EngineCount.SKIPPED_LORA_REQUESTS)
        del self._tracked[tracked.request.request_id]
        return 0

    def _is_outdated(self, lookup: Lookup | None) -> bool:
        """True if the first unit that was not found was ordered to be stored since.

        vLLM asks for all requests that wait while none of them has an answer, and then uses the answers one by one.
        """
        if lookup is None or lookup.found is None or lookup.found.from_asked >= len(lookup.keys):
            return False
        return self._ordered.get(lookup.first_key(lookup.found.from_asked), 0.0) > lookup.started_s

    def _loads_already(self, key: bytes, tracked: RequestState) -> bool:
        """True if another request is loading this block: samples of one prompt, or requests that came together."""
        other, until_s = self._loading.get(key, (tracked, 0.0))
        return other is not tracked and time.monotonic() < until_s

    def _loaded(self, tracked: RequestState) -> None:
        """Ends the wait of others for what this request loads."""
        for key in [key for key, (other, _) in self._loading.items() if other is tracked]:
            del self._loading[key]

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Implements ``update_state_after_alloc``."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        lookup = tracked.lookup
        tracked.abandon()
        if not external_tokens:
            return
        if lookup is not None and (key := lookup.first_key(lookup.asked)):
            self._loading[key] = tracked, time.monotonic() + self._settings.load_timeout_s
        first, end = tracked.asked_tokens, tracked.asked_tokens + external_tokens
        if tracked.stored_tokens == first:
            # If the load fails fewer are computed, which stores them again.
            tracked.stored_tokens = end
        runs = self._runs.loads(self._named(tracked), blocks.get_block_ids(), first, end)
        self._new_loads.append(Load(request.request_id, runs))
        self.counts.add(EngineCount.LOOKUP_HIT_TOKENS, external_tokens)

    # Each step

    def orders(self, scheduled: Any) -> Orders:
        """Implements ``build_connector_meta``."""
        loads, self._new_loads = self._new_loads, []
        asked, self._asked = self._asked, None
        orders = Orders(loads, [], is_idle=self._waits and not scheduled.total_num_scheduled_tokens)
        if orders.is_idle and asked is not None:
            asked.wait(IDLE_S)
        cached = scheduled.scheduled_cached_reqs
        steps = [(each.req_id, each.num_computed_tokens) for each in scheduled.scheduled_new_reqs]
        steps += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        offered = getattr(scheduled, "kv_connector_block_state", None)
        states = {} if offered is None else offered.boundary_state_offloads
        for request_id, _ in steps:
            if (tracked := self._tracked.get(request_id)) is not None:
                self._loaded(tracked)
        if not self._stores:
            return orders
        for request_id, computed in steps:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            done = computed + scheduled.num_scheduled_tokens[request_id] - drafts
            orders.stores += self._to_store(tracked, computed, done, states.get(request_id, ()))
        return orders

    def _to_store(self, tracked: RequestState, computed: int, done: int, states: Sequence[State]) -> list[BlockRange]:
        """Returns the blocks that are full once ``done`` tokens are computed. Drafted tokens may not stay: left out."""
        request, seal = tracked.request, tracked.adapter.seal if tracked.adapter is not None else None
        if tracked.is_mixed or (tracked.adapter is not None and seal is None):
            return []
        named = self._named(tracked)
        done = min(done, self._runs.known_tokens(named))
        if self._settings.prompt_only:
            done = min(done, request.num_prompt_tokens)
        # Below what was ordered only if a load failed or the request lost its blocks: stored once more.
        first = min(tracked.stored_tokens, computed)
        if all(done // size <= first // size for size in self._shape.block_tokens):
            return []
        ends = ReuseBoundaries(request.num_prompt_tokens, tracked.parting, tracked.is_parting)
        runs = self._runs.stores(named, self.manager.get_block_ids(request.request_id), first, done, ends)
        runs += self._runs.states(named, states, first, done)
        says = None if self._era else self._describer  # other engines cannot load blocks with this one's keys
        said = [says.descents(request, run) if says else [] for run in runs]
        pairs = zip(runs, said, strict=True)
        runs = [replace(run, hints=tracked.hints, seal=seal, descents=each) for run, each in pairs]
        tracked.is_parting = False
        tracked.stored_tokens = done
        if first and time.monotonic() > tracked.renewed_s + RENEW_S:
            tracked.renewed_s = time.monotonic()
            self._lookups.renew(self._unit_keys(tracked))
        now = time.monotonic()
        for run in runs:
            for key in run.keys:
                self._avoided.pop(key, None)
                self._ordered[key] = now
        return runs

    def learn(self, report: WorkerReport) -> None:
        """Implements ``update_connector_output``."""
        if report.timed_out:
            self._lookups.pause()
        self._avoided.update(dict.fromkeys(report.failed, time.monotonic() + AVOID_S))
        if not report.namespaces.items() <= self._namespaces.items():
            # Models change the configuration that they are built from, on the workers' copies alone.
            self._namespaces |= report.namespaces
            self._store.rename(self._namespaces.values())

    def finished(self, request: Any) -> None:
        """Ends a request; its blocks may be reused."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            tracked.abandon()
            self._loaded(tracked)

    def reset(self) -> None:
        """Implements ``reset_cache``, which vLLM calls when weights were replaced in memory.

        From now on keys are this engine's alone, since nothing says whether another engine has the same weights.
        """
        self._era = os.urandom(16)
        for tracked in self._tracked.values():
            tracked.abandon()
            tracked.stored_tokens = 0
            tracked.is_mixed = tracked.request.num_computed_tokens > 0

    def close(self) -> None:
        """Ends the threads and closes the store."""
        self._lookups.close()
        self._adapters.close()
        self._store.close()

    def _named(self, tracked: RequestState) -> BlockHashes:
        """Returns what the keys of a request's blocks are made of."""
        ending = self._era
        if tracked.adapter is not None:
            ending = blake2b(self._era + tracked.adapter.digest, digest_size=16).digest()
        return BlockHashes(tracked.request.block_hashes, ending)

    def _unit_keys(self, tracked: RequestState) -> list[list[bytes]]:
        """Returns the keys of each unit of the prompt, up to the first avoided one; one token is left to compute."""
        named, unit, units = self._named(tracked), self._runs.unit, []
        now = time.monotonic()
        ends = min(tracked.request.num_tokens - 1, self._runs.known_tokens(named))
        for start in range(0, ends - unit + 1, unit):
            keys = [key for number in self._whole for key in self._runs.keys(named, number, start, start + unit)]
            if any(self._avoided.get(key, 0.0) > now for key in keys):
                break
            units.append(keys)
        return units

    def _tails(self, tracked: RequestState, end: int) -> list[Tail]:
        """Returns the keys in ``end`` tokens of clusters whose last blocks alone a hit needs; None for avoided ones."""
        now, tails = time.monotonic(), []
        for number, cluster in enumerate(self._runs.clusters):
            if number not in self._whole:
                keys = self._runs.keys(self._named(tracked), number, 0, end)
                tails.append(Tail(cluster, [None if self._avoided.get(key, 0.0) > now else key for key in keys]))
        return tails
