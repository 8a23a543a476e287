"""Ways to run a node's tiers compared: production traces through memory, disk and root, without bytes.

Hypothesis: of all that a node can decide (what is promoted from the root, what is demoted
to the disk), the defaults find the most in memory and on the disk, at sizes from 5 to 50 % of all that is asked for.
Replays the requests in order of their times through the inventories and admission that nodes run
(``benchmarks/tiered.py``), with blocks of 512 tokens that are only counted.  The root has all that was ever written, so
what it alone has counts as found, at its price.  No bytes, no clock: the figures are the same on every machine.

    python -m benchmarks.tiers TRACE [TRACE ...] [--memory 5,10,20] [--disk 0,20,50] [--json]

Sizes are per cent of all different blocks of the trace, ``--nodes`` share them equally.  Traces are those that
``python -m benchmarks.policies`` reads; ``PATH:PRESET`` says what its writers hint, and with ``--mixed`` all traces are
replayed together in one store, where alone hints can matter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import product
from statistics import fmean

from benchmarks.policies import Replay, read
from benchmarks.tiered import DEMOTIONS, WRITES, Counts, Setup, SimulatedNode
from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.errors import InvalidRequest
from kvstore.hints import Hints
from kvstore.memory.inventory import Place
from kvstore.namespace import NamespaceDigest
from kvstore.node.settings import Limits
from kvstore.replay.trace import BLOCK_TOKENS

KV_BYTES_PER_TOKEN = 131_072
"""Llama 3.1 8B in 16 bit: 64 MiB a block."""
GIB_PER_BLOCK = BLOCK_TOKENS * KV_BYTES_PER_TOKEN / (1 << 30)
DRAIN = 2.0
"""Times the mean rate of new blocks is what the root takes of those written behind."""
WITHIN_POINTS = 0.2
"""Hit ratios this near to the best count as equal; of those the one that writes least is the best."""
WRITTEN_MAX = 1.5
"""Bytes written to root and disk for each of new KV; beyond it, disks wear out for what is never asked for again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setup on one trace. Sizes in per cent of all different blocks; shares of all tokens asked for."""

    trace: str
    memory: float
    disk: float
    write: str
    admission: bool
    demotion: str
    counts: Counts
    tokens: int

    def found(self, *tiers: str) -> float:
        """Tokens found in these tiers, in per cent of those of all prompts."""
        blocks_count: int = sum(getattr(self.counts, tier) for tier in tiers)
        return 100 * BLOCK_TOKENS * blocks_count / self.tokens

    @property
    def amplification(self) -> float:
        """Bytes written to the root and to the disk, for each byte of new KV."""
        return (self.counts.to_root + self.counts.demoted) / max(1, self.counts.put)


def main() -> int:
    """Prints the tables; returns 0 if it ran, 2 for a trace that it cannot replay."""
    arguments = _parser().parse_args()
    groups = [arguments.traces] if arguments.mixed else [[one] for one in arguments.traces]
    try:
        replays = [read(group, 0.0, 1.0) for group in groups]
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for replay in replays for row in measure(replay, arguments)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    for replay in replays:
        show(replay, [row for row in rows if row.trace == replay.title])
    if len(rows) > len(replays):
        show_means(rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE[:PRESET]")
    parser.add_argument("--memory", type=_percents, default=(5, 10, 20, 50), help="per cent (default 5,10,20,50)")
    parser.add_argument("--disk", type=_percents, default=(0, 20, 50), help="per cent; 0: none (default 0,20,50)")
    parser.add_argument("--write", type=_some_of(WRITES), default=("through",), help="default: through")
    parser.add_argument("--admission", type=_some_of(("on", "off")), default=("on",), help="default: on")
    parser.add_argument("--demotion", type=_some_of(DEMOTIONS), default=("again",), help="default: again")
    parser.add_argument(
        "--nodes", type=int, choices=range(1, 65), default=1, metavar="COUNT", help="peers that take requests in turn"
    )
    parser.add_argument("--mixed", action="store_true", help="all traces together in one store")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _percents(text: str) -> tuple[float, ...]:
    found = tuple(float(each) for each in text.split(","))
    if not all(0 <= each <= 100 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 0 to 100, separated by commas")
    return found


def _some_of(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    known = tuple(names)

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(known)}, separated by commas")
        return found

    return parse


def measure(replay: Replay, arguments: argparse.Namespace) -> Iterator[Row]:
    """Returns a row for every combination of the options."""
    places = places_of(replay)
    hints = [Hints(int(priority)) for priority in replay.blocks.priorities]
    for memory, disk, write, admission in product(
        arguments.memory, arguments.disk, arguments.write, arguments.admission
    ):
        counts = Counts()
        for number, demotion in enumerate(arguments.demotion):
            # Without a disk all of them are equal.
            if disk or not number:
                setup = setup_of(
                    replay,
                    memory,
                    disk,
                    write=write,
                    admission=admission == "on",
                    demotion=demotion,
                    nodes_count=arguments.nodes,
                )
                counts = run(replay, setup, places, hints, arguments.nodes)
            yield Row(replay.title, memory, disk, write, admission == "on", demotion, counts, replay.tokens)


def places_of(replay: Replay) -> list[Place]:
    """The place of each block of a trace: chunks of one token, so that its number is its content."""
    digest = NamespaceDigest(bytes(16))
    addresses = [
        Address(blake2b(number.to_bytes(8, "little"), digest_size=ADDRESS_BYTES).digest())
        for number in range(len(replay.blocks))
    ]
    return [
        Place(digest, address, addresses[parent] if parent >= 0 else NO_PARENT, number.to_bytes(4, "little"))
        for number, (address, parent) in enumerate(zip(addresses, replay.blocks.parents.tolist(), strict=True))
    ]


def setup_of(
    replay: Replay,
    memory: float,
    disk: float,
    *,
    write: str = "through",
    admission: bool = True,
    demotion: str = "again",
    nodes_count: int = 1,
) -> Setup:
    """One node's part of ``memory`` and ``disk`` per cent of all different blocks of a trace."""
    blocks_count = len(replay.blocks) / nodes_count
    memory_count = max(1, int(memory / 100 * blocks_count))
    return Setup(
        memory=memory_count,
        disk=int(disk / 100 * blocks_count),
        write=write,
        admission=admission,
        demotion=demotion,
        dirty_max=max(1, int(Limits().behind_share * memory_count)),
        drain=DRAIN * blocks_count / max(1.0, replay.times_s[-1] - replay.times_s[0]),
    )


def run(replay: Replay, setup: Setup, places: Sequence[Place], hints: Sequence[Hints], nodes_count: int = 1) -> Counts:
    """Replays a trace through ``nodes_count`` nodes, which take its requests in turn; what happened at all of them."""
    root: set[int] = set()
    nodes = [SimulatedNode(setup, places, hints, root) for _ in range(nodes_count)]
    for node in nodes:
        node.peers = [peer for peer in nodes if peer is not node]
    for number, (now_s, chain) in enumerate(zip(replay.times_s, replay.chains, strict=True)):
        nodes[number % nodes_count].request(now_s, chain.tolist())
    return sum((node.counts for node in nodes), Counts())


def show(replay: Replay, rows: Sequence[Row]) -> None:
    """A markdown table: shares of all tokens in per cent, bytes by path in GiB, evictions in blocks."""
    print(f"**{replay.title}**: {len(replay.chains)} prompts, {len(replay.blocks)} different full blocks\n")
    _head(
        "memory, disk %|write|admission|demotion|in memory|at a peer|on disk|on the root|missed|root to memory"
        "|root to caller|disk to memory|memory to disk|to the root|written per new|evicted|from disk|shed",
        texts=4,
    )
    for row in rows:
        if not row.disk and row.demotion != rows[0].demotion:
            continue
        counts = row.counts
        print(
            f"| {row.memory:g}, {row.disk:g} | {row.write} | {_on(row.admission)} | {row.demotion} | "
            + " | ".join(f"{row.found(tier):.2f}" for tier in ("memory", "peer", "disk", "root", "put"))
            + " | "
            + " | ".join(
                f"{blocks * GIB_PER_BLOCK:.0f}"
                for blocks in (
                    counts.promoted,
                    counts.root - counts.promoted,
                    counts.disk,
                    counts.demoted,
                    counts.to_root,
                )
            )
            + f" | {row.amplification:.2f} | {counts.memory_evicted} | {counts.disk_evicted} | {counts.shed} |"
        )
    print()


def show_means(rows: Sequence[Row]) -> None:
    """A markdown table: each way to run a node, as means over all traces and sizes, the best first."""
    print("**All, as means over traces and sizes**\n")
    _head("write|admission|demotion|in memory|in memory or on disk|written per new", texts=3)
    for mean in ranked(rows):
        write, admission, demotion = mean.way
        print(
            f"| {write} | {_on(admission)} | {demotion} "
            f"| {mean.memory:.2f} | {mean.found:.2f} | {mean.amplification:.2f} |"
        )


Way = tuple[str, bool, str]
"""Write mode, admission and demotion."""


@dataclass(frozen=True, slots=True)
class Mean:
    """One way to run a node, as means over traces and sizes: per cent found in memory, and in memory or on disk."""

    way: Way
    memory: float
    found: float
    amplification: float


def ranked(rows: Sequence[Row]) -> list[Mean]:
    """The rule of choice, the best first: the most found in memory or on disk, without writing more than WRITTEN_MAX;
    of those within WITHIN_POINTS of the best, the one that writes least.
    """
    ways: dict[Way, list[Row]] = {}
    for row in rows:
        ways.setdefault((row.write, row.admission, row.demotion), []).append(row)
    means = [
        Mean(
            way,
            fmean(row.found("memory") for row in members),
            fmean(row.found("memory", "disk") for row in members),
            # Without a disk nothing is written twice, whatever else is chosen.
            fmean([row.amplification for row in members if row.disk] or [1.0]),
        )
        for way, members in ways.items()
    ]
    best = max((mean.found for mean in means if mean.amplification <= WRITTEN_MAX), default=0.0)

    def order(mean: Mean) -> tuple[bool, bool, float, float]:
        is_near = best - mean.found <= WITHIN_POINTS
        return (
            mean.amplification > WRITTEN_MAX,
            not is_near,
            mean.amplification if is_near else -mean.found,
            -mean.found,
        )

    return sorted(means, key=order)


def _head(titles: str, texts: int) -> None:
    columns = titles.split("|")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * texts + "---:|" * (len(columns) - texts))


def _on(value: bool) -> str:
    return "on" if value else "off"


if __name__ == "__main__":
    sys.exit(main())
