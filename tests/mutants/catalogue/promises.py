"""Promises to engines and routers: events (kvstore/events/EVENTS.md), connectors, segments, planning, batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

EVENTS = "kvstore.events"
INVENTORY = f"{EVENTS}.inventory:NamespaceIndex"
VLLM = "kvstore.connectors.vllm"
SEGMENTS = "kvstore.segments"
GATE = f"{SEGMENTS}.gate"


def _every_shard(real: Any, self: Any, shard: int, addresses: Any) -> None:
    for each in range(1 << self._shard_bits):
        real(self, each, addresses if each == shard else ())


def _nothing_removed(real: Any, self: Any) -> Any:
    found = real(self)
    return replace(found, removed=[])


def _restart(real: Any, term: int, limits: Any) -> Any:
    return real(0, limits)


def _with_a_hole(real: Any, self: Any, seq: int) -> Any:
    return real(self, seq) or []


MUTANTS: list[Mutant] = [
    mutant(
        "events-publish-condemned",
        at(INVENTORY, "condemn", giving(None)),
        "events/test_inventory.py events/test_truth.py",
    ),
    mutant("events-no-removals", at(INVENTORY, "settle", _nothing_removed), "events/test_inventory.py"),
    mutant("events-listing-clears-all", at(INVENTORY, "listed", _every_shard), "events/test_inventory.py"),
    mutant(
        "events-topics-mix",
        at(f"{EVENTS}.publisher:PublishScope", "topic", giving("kv-events")),
        "events/test_speaker.py",
    ),
    mutant("events-numbers-restart", at(f"{EVENTS}.stream", "TopicLog", _restart), "events/test_speaker.py"),
    mutant(
        "events-replay-with-a-hole", at(f"{EVENTS}.stream:TopicLog", "since", _with_a_hole), "events/test_speaker.py"
    ),
    mutant(
        "events-two-speakers",
        at(f"{EVENTS}.publisher:Fence", "term", lambda real, self: real(self) or 1),
        "events/test_speaker.py",
    ),
    mutant(
        "events-question-of-any-tenant",
        at(f"{EVENTS}.query:Answers", "answer", lambda real, self, question: real(self, replace(question, tenant=""))),
        "events/test_query.py",
    ),
    mutant(
        "adapter-seal-always-holds",
        at(f"{VLLM}.adapters:AdapterSnapshot", "holds", giving(True)),
        "connectors/test_vllm_adapters.py",
    ),
    mutant(
        "window-one-block-short",
        at(f"{VLLM}.blocks:LayerGroups", "first_block", lambda real, self, boundary: real(self, boundary) + 1),
        "connectors/test_vllm_groups.py",
    ),
    mutant("segments-without-verdict", at(GATE, "check", giving(None)), "segments/test_segments.py"),
    mutant(
        "segments-rotated-to-the-next-position",
        at(f"{SEGMENTS}.rope:Rope", "tables", lambda real, self, first, count: real(self, first + 1, count)),
        "segments/test_rotation.py",
    ),
    mutant(
        "planning-group-is-lost",
        at("kvstore.batch.run:GroupStates", "give_back", lambda real, self, index: self.done(index)),
        "batch/test_handing.py",
    ),
]
