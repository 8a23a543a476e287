"""Promises to engines and routers: events (kvstore/events/EVENTS.md), connectors, segments, planning, batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

EVENTS = "kvstore.events"
INVENTORY = f"{EVENTS}.inventory:Inventory"
SESSIONS = "kvstore.connectors.common:Sessions"
VLLM = "kvstore.connectors.vllm"
SEGMENTS = "kvstore.segments"
GATE = f"{SEGMENTS}.gate"
INVENTORIES = "events/test_inventory.py"
TRUTH = "events/test_truth.py"
SPEAKER = "events/test_speaker.py"


def _every_range(real: Any, self: Any, ranges: Any, firsts: Any, lasts: Any) -> Any:
    return real(self, [(0, (1 << 64) - 1)], firsts, lasts)


def _nothing_removed(real: Any, self: Any) -> Any:
    found = real(self)
    return replace(found, removed=found.removed[:0])


def _restart(real: Any, term: int, limits: Any) -> Any:
    return real(0, limits)


def _with_a_hole(real: Any, self: Any, seq: int) -> Any:
    return real(self, seq) or []


def _ignore_running(real: Any, self: Any, name: str, branch: Any, supersede: Any = None, running: Any = ()) -> Any:
    return real(self, name, branch, supersede)


MUTANTS: list[Mutant] = [
    mutant(
        "events-publish-condemned",
        "EVENTS L2: condemned chunks are removed",
        at(INVENTORY, "condemn", giving(None)),
        INVENTORIES,
        TRUTH,
    ),
    mutant(
        "events-publish-parts",
        "EVENTS T5: a block needs all its parts",
        at(INVENTORY, "lack", giving(None)),
        "events/test_parts.py",
    ),
    mutant(
        "events-no-removals",
        "EVENTS T2: a removed block is published as removed",
        at(INVENTORY, "settle", _nothing_removed),
        INVENTORIES,
    ),
    mutant(
        "events-listing-clears-all",
        "EVENTS L1: a listing is of its folders",
        at(INVENTORY, "listed", _every_range),
        INVENTORIES,
    ),
    mutant(
        "events-topics-mix",
        "EVENTS S2: topics keep tenants apart",
        at(f"{EVENTS}.publisher:Told", "topic", giving("kv-events")),
        SPEAKER,
    ),
    mutant(
        "events-numbers-restart",
        "EVENTS S4: numbers grow from speaker to speaker",
        at(f"{EVENTS}.stream", "Stream", _restart),
        SPEAKER,
    ),
    mutant(
        "events-replay-with-a-hole",
        "EVENTS S7: a replay has no hole",
        at(f"{EVENTS}.stream:Stream", "since", _with_a_hole),
        SPEAKER,
    ),
    mutant(
        "events-two-speakers",
        "EVENTS F1: one publisher speaks",
        at(f"{EVENTS}.publisher:Fence", "term", lambda real, self: real(self) or 1),
        SPEAKER,
    ),
    mutant(
        "events-question-of-any-tenant",
        "EVENTS 7: an answer is of one tenant",
        at(f"{EVENTS}.http:Answers", "answer", lambda real, self, question: real(self, replace(question, tenant=""))),
        "events/test_query.py",
    ),
    mutant(
        "branch-of-a-running-request",
        "CONNECTORS sessions: running requests keep their blocks",
        at(SESSIONS, "ended", _ignore_running),
        "connectors/test_sessions.py",
    ),
    mutant(
        "branch-shares-nothing",
        "CONNECTORS sessions: other sessions keep their blocks",
        at("kvstore.connectors.common", "shared", giving(0)),
        "connectors/test_sessions.py",
    ),
    mutant(
        "adapter-seal-always-holds",
        "CONNECTORS LoRA: a changed adapter shares nothing",
        at(f"{VLLM}.adapters:Seal", "holds", giving(True)),
        "connectors/test_vllm_adapters.py",
    ),
    mutant(
        "window-one-block-short",
        "CONNECTORS windows: a hit has every block that it needs",
        at(f"{VLLM}.blocks:Cluster", "first_block", lambda real, self, boundary: real(self, boundary) + 1),
        "connectors/test_vllm_groups.py",
    ),
    mutant(
        "vllm-events-at-once",
        "CONNECTORS events: a block is published once every rank has stored it",
        at(f"{VLLM}.events:Events", "learn", giving(None)),
        "connectors/test_vllm_events.py",
    ),
    mutant(
        "segments-without-verdict",
        "SEGMENTS S11: no segment is read without a verdict",
        at(GATE, "check", giving(None)),
        "segments/test_segments.py",
    ),
    mutant(
        "segments-rotated-to-the-next-position",
        "SEGMENTS S12: keys are rotated to their position",
        at(f"{SEGMENTS}.rope:Rope", "tables", lambda real, self, first, count: real(self, first + 1, count)),
        "segments/test_rotation.py",
    ),
    mutant(
        "planning-group-is-lost",
        "PLANNING H4: a group that is given back is handed out again",
        at("kvstore.planning.run:Handing", "give_back", lambda real, self, index: self.done(index)),
        "planning/test_handing.py",
    ),
]
