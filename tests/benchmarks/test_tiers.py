"""The replay through tiers: its table shows what happened, and the node's defaults find the most."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from benchmarks.caches import Blocks
from benchmarks.policies import Replay, read
from benchmarks.tiered import Setup, SimulatedNode
from benchmarks.tiers import places_of, run, setup_of
from kvstore.hints import DEFAULT
from kvstore.replay.generate import generate
from kvstore.replay.trace import write_trace
from tests.kit.cases import for_each

TRACES = [part for part in os.environ.get("KVSTORE_TEST_TRACES", "").split(":") if part]
"""Paths of production traces, separated by colons; without any, generated ones are judged."""


def generated(folder: Path, requests: int, kind: str = "conversation") -> Replay:
    path = folder / f"{kind}.jsonl"
    write_trace(path, generate(requests, kind=kind))
    found = read([str(path)], 0, 1)
    # No two at one moment: what is older among those is nobody's business.
    found.times_s[:] = [float(number) for number in range(len(found.times_s))]
    return found


def singles(count: int) -> Replay:
    """Prompts of one block each."""
    blocks = Blocks(np.full(count, -1), np.zeros(count, np.int64), np.full(count, DEFAULT.priority))
    return Replay("many", blocks, [0.0], [np.array([each]) for each in range(count)], count * 512)


def setup(memory: int, disk: int = 0, **others: object) -> Setup:
    chosen: dict[str, object] = {
        "write": "through",
        "admission": False,
        "demotion": "always",
        "dirty_max": 1,
        "drain": 0.0,
    }
    return Setup(memory=memory, disk=disk, **{**chosen, **others})  # type: ignore[arg-type]


@for_each("write", ["behind", "through", "uncached"])
def test_every_block_asked_for_is_counted_once(tmp_path: Path, write: str) -> None:
    replay = generated(tmp_path, 200)
    ours = setup_of(replay, 8, 4, write=write, demotion="always", nodes_count=2)
    counts = run(replay, ours, places_of(replay), [DEFAULT] * len(replay.blocks), 2)
    assert counts.asked == sum(len(chain) for chain in replay.chains)
    assert counts.memory + counts.peer + counts.disk + counts.root + counts.put == counts.asked
    assert counts.promoted <= counts.root
    assert counts.disk_evicted <= counts.demoted <= counts.memory_evicted
    if write != "behind":
        assert (counts.to_root, counts.shed) == (counts.put, 0)
    else:
        assert counts.put - counts.shed - 2 * ours.dirty_max <= counts.to_root <= counts.put - counts.shed


def test_a_peer_is_asked_before_the_disk_and_its_copy_is_kept() -> None:
    replay, root = singles(3), set[int]()
    here, there = (
        SimulatedNode(setup(1, 2), places_of(replay), [DEFAULT] * len(replay.blocks), root) for _ in range(2)
    )
    here.peers = [there]
    for now_s, (node, block) in enumerate([(here, 0), (here, 1), (there, 0), (here, 0), (here, 0)]):
        node.request(float(now_s), [block])
    assert there.counts.root == 1
    assert (here.counts.put, here.counts.demoted, here.counts.disk) == (2, 2, 0)
    assert (here.counts.peer, here.counts.memory) == (1, 1)
