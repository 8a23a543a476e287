"""The replay through tiers: its table shows what happened, and the node's defaults find the most."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tiers
from benchmarks.caches import Blocks, Lru
from benchmarks.policies import Replay, read
from benchmarks.tiered import DEMOTIONS, Counts, Setup, SimulatedNode
from benchmarks.tiers import places_of, run, setup_of
from kvstore.hints import DEFAULT
from kvstore.memory.policy import DEFAULT_POLICY, POLICIES
from kvstore.replay.generate import KINDS, generate
from kvstore.replay.trace import write_trace
from kvstore.writes import WriteModeName
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


def chain_of(count: int) -> Replay:
    """A prompt of ``count`` blocks, as a trace of one request."""
    parents = np.arange(-1, count - 1)
    blocks = Blocks(parents, np.arange(count), np.full(count, DEFAULT.priority))
    return Replay("one", blocks, [0.0], [np.arange(count)], count * 512)


def singles(count: int) -> Replay:
    """Prompts of one block each."""
    blocks = Blocks(np.full(count, -1), np.zeros(count, np.int64), np.full(count, DEFAULT.priority))
    return Replay("many", blocks, [0.0], [np.array([each]) for each in range(count)], count * 512)


def counted(replay: Replay, setup: Setup, prompts: Sequence[Sequence[int]]) -> Counts:
    """Counts tokens by tier for prompts that arrive a second apart at one node."""
    node = SimulatedNode(setup, places_of(replay), [DEFAULT] * len(replay.blocks), set())
    for now_s, prompt in enumerate(prompts):
        node.request(float(now_s), prompt)
    return node.counts


def setup(memory: int, disk: int = 0, **others: object) -> Setup:
    chosen: dict[str, object] = {
        "policy": "lru",
        "write": "through",
        "admission": False,
        "demotion": "always",
        "dirty_max": 1,
        "drain": 0.0,
    }
    return Setup(memory=memory, disk=disk, **{**chosen, **others})  # type: ignore[arg-type]


@for_each("share", [1, 10, 40])
@for_each("kind", list(KINDS))
def test_lru_in_memory_finds_what_a_plain_lru_finds(tmp_path: Path, kind: str, share: float) -> None:
    replay = generated(tmp_path, 300, kind)
    ours = setup_of(replay, share, 0, policy="lru", admission=False)
    lru = Lru(replay.blocks, ours.memory)
    found = sum(lru.request(now_s, chain) for now_s, chain in zip(replay.times_s, replay.chains, strict=True))
    counts = run(replay, ours, places_of(replay), [DEFAULT] * len(replay.blocks))
    assert counts.memory == found > 0


@for_each("write", ["behind", "through", "around"])
@for_each("policy", list(POLICIES))
def test_every_block_asked_for_is_counted_once(tmp_path: Path, policy: str, write: WriteModeName) -> None:
    replay = generated(tmp_path, 200)
    ours = setup_of(replay, 8, 4, policy=policy, write=write, demotion="always", nodes_count=2)
    counts = run(replay, ours, places_of(replay), [DEFAULT] * len(replay.blocks), 2)
    assert counts.asked == sum(len(chain) for chain in replay.chains)
    assert counts.memory + counts.peer + counts.disk + counts.root + counts.put == counts.asked
    assert counts.promoted <= counts.root
    assert counts.disk_evicted <= counts.demoted <= counts.memory_evicted
    if write != "behind":
        assert (counts.to_root, counts.shed) == (counts.put, 0)
    else:
        assert counts.put - counts.shed - 2 * ours.dirty_max <= counts.to_root <= counts.put - counts.shed


def test_without_pressure_on_its_queue_behind_is_through(tmp_path: Path) -> None:
    replay = generated(tmp_path, 200)
    places, hints = places_of(replay), [DEFAULT] * len(replay.blocks)
    through = run(replay, setup_of(replay, 100, 0, write="through"), places, hints)
    behind = run(replay, setup_of(replay, 100, 0, write="behind"), places, hints)
    assert (through.memory, through.put) == (behind.memory, behind.put)
    assert behind.shed == 0 < behind.to_root <= through.to_root


def test_what_memory_evicts_comes_back_from_the_disk() -> None:
    counts = counted(singles(3), setup(1, 2), [[0], [1], [2], [0]])
    assert (counts.memory, counts.disk, counts.root, counts.put) == (0, 1, 0, 3)
    assert (counts.memory_evicted, counts.demoted, counts.disk_evicted) == (3, 3, 1)


@for_each("demotion, uses", DEMOTIONS.items())
def test_the_disk_gets_what_was_used_often_enough(demotion: str, uses: int | None) -> None:
    prompts = [[0], [0], [1], [1], [1], [2], [3]]
    counts = counted(singles(4), setup(1, 10, demotion=demotion), prompts)
    assert counts.memory_evicted == 3
    assert counts.demoted == {0: 3, 1: 2, 2: 1, None: 0}[uses]


def test_admission_lets_in_what_was_asked_for_or_in_memory_before() -> None:
    strange = [[0], [0], [0], [0]]
    admitting = counted(singles(1), setup(1, write="around", admission=True), strange)
    open_to_all = counted(singles(1), setup(1, write="around"), strange)
    assert (admitting.root, admitting.promoted, admitting.memory) == (2, 1, 1)
    assert (open_to_all.root, open_to_all.promoted, open_to_all.memory) == (1, 1, 2)
    evicted = counted(singles(2), setup(1, admission=True), [[0], [1], [0], [0]])
    assert (evicted.root, evicted.promoted, evicted.memory) == (1, 1, 1)


def test_around_leaves_memory_alone_until_it_is_asked_again() -> None:
    counts = counted(chain_of(4), setup(4, write="around"), [[0, 1, 2, 3]] * 3)
    assert (counts.put, counts.root, counts.promoted, counts.memory) == (4, 4, 4, 4)


def test_what_finds_the_queue_full_is_shed_from_there_on() -> None:
    counts = counted(chain_of(5), setup(10, write="behind", dirty_max=3), [[0, 1, 2, 3, 4]])
    assert (counts.put, counts.shed, counts.to_root) == (5, 2, 0)
    again = counted(chain_of(5), setup(10, write="behind", dirty_max=3, drain=2.0), [[0, 1, 2, 3, 4]] * 2)
    assert (again.memory, again.put, again.shed, again.to_root) == (3, 7, 2, 2)


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


def test_the_tables_and_the_json_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "small.jsonl", generate(100))
    options = "--memory 10 --disk 0,50 --demotion again,always --policy lru"
    command = ["tiers", str(tmp_path / "small.jsonl"), *options.split()]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    assert tiers.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["disk"], row["demotion"]) for row in rows] == [
        (0, "again"),
        (0, "always"),
        (50, "again"),
        (50, "always"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    assert tiers.main() == 0
    printed = capsys.readouterr().out
    share = 100 * 512 * rows[3]["counts"]["disk"] / rows[3]["tokens"]
    assert "| 10, 50 | lru | through | on | always | " in printed and f" | {share:.2f} | " in printed
    assert printed.count("| 10, 0 |") == 1
    monkeypatch.setattr(sys, "argv", [*command, "--write", "sideways"])
    with pytest.raises(SystemExit):
        tiers.main()
    assert "expected some of behind, through, around" in capsys.readouterr().err


def test_the_best_finds_the_most_within_what_may_be_written() -> None:
    def row(policy: str, memory: int, disk: int, demoted: int) -> tiers.Row:
        counts = Counts(asked=10_000, memory=memory, disk=disk, put=1_000, to_root=1_000, demoted=demoted)
        return tiers.Row("one", 10, 50, policy, "through", True, "again", counts, 512 * 10_000)

    rows = [
        row("most written", 5_000, 3_000, 600),
        row("most found", 5_000, 1_000, 400),
        row("nearly as much", 4_000, 1_990, 300),
        row("less", 4_900, 1_000, 100),
    ]
    order = [mean.way[0] for mean in tiers.ranked(rows)]
    assert order == ["nearly as much", "most found", "less", "most written"]


@pytest.mark.slow
def test_no_policy_finds_more_than_the_default(tmp_path: Path) -> None:
    """The default policy is the measured best, to half a point."""
    paths = TRACES
    if not paths:
        paths = [str(tmp_path / kind) for kind in KINDS]
        for kind, path in zip(KINDS, paths, strict=True):
            write_trace(path, generate(700, kind=kind))
    found: dict[str, float] = dict.fromkeys(POLICIES, 0.0)
    cases = 0
    for path in paths:
        replay = read([path], 0, 1)
        places = places_of(replay)
        for memory, disk in ((10, 0), (10, 20), (20, 50)):
            cases += 1
            for policy in POLICIES:
                counts = run(
                    replay, setup_of(replay, memory, disk, policy=policy), places, [DEFAULT] * len(replay.blocks)
                )
                found[policy] += 100 * 512 * (counts.memory + counts.disk) / replay.tokens
    best = max(found.values())
    assert best - found[DEFAULT_POLICY] <= 0.5 * cases, {policy: sum_ / cases for policy, sum_ in found.items()}
