"""Plans of batches: what the planned order saves beside the order of arrival, and what planning costs.

Hypothesis: the planned order computes as little as any can (within 0.1 % of all tokens) as soon as memory holds the two
longest prompts; on Mooncake's conversation trace, with 400,000 tokens of memory, it saves at least 30 % of all tokens
more than arrival order with least-recently-used eviction. 100,000 prompts of 2,080 tokens are planned in 15 s of CPU
and 2.5 GB. The savings are counted, not measured: they are the same on every machine.

    python -m benchmarks planning [TRACE ...] [--memory 100000 400000 1600000] [--plot FILE.svg]
    python -m benchmarks planning --cost [COUNT] [--tokens N]
    python -m benchmarks prefetching [--root FOLDER] [--groups 8] [--prefix 4096] [--rounds 5]

``--cost`` measures CPU time and peak memory of planning one large batch, and nothing else; without it that is a process
of its own.

``prefetching`` measures the time to first token of a planned batch whose prefixes are stored: from memory, from the
root, and prefetched. An emulated engine runs the batch in planned order: compute is slept, KV is real. Its own cache
holds nothing between requests. Before each pass memory is empty, and the root's files are out of the page cache. The
figures are those of the first member of each group but the first, before which nothing runs.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.engine import CHUNK_TOKENS, Engine, Prompt, Push, Settings
from benchmarks.harness import baselines
from benchmarks.harness.load import QWEN_7B
from benchmarks.harness.machine import in_turns
from benchmarks.harness.report import svg
from benchmarks.harness.result import Cell, Plot, Table, markdown
from kvstore.batch import Group, Plan, PromptSet, Storage, make_plan
from kvstore.batch.prompts import ITEM
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.replay.trace import BLOCK_TOKENS, load_trace

Ids = npt.NDArray[np.uint32]

BLOCK = 16
CHUNK = 256
HELD_CHUNKS = 4
VOCABULARY = 128_000
COST_PROMPTS = 100_000
COST_TOKENS = 2080
COST_S_MAX = 3600
PLAN_COLUMNS = ("batch", "memory, tokens", "arrival, LRU %", "one level %", "planned %", "optimum %")


@dataclass(frozen=True)
class Load:
    """A batch."""

    name: str
    prompts: PromptSet

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.prompts.lengths.max())


def trace(path: Path) -> Load:
    """A trace, all its requests at once."""
    requests = [each for each in load_trace(path) if each.input_length]
    blocks = [np.array(each.hash_ids[: each.full_blocks], ITEM).tobytes() for each in requests]
    lengths = np.array([each.input_length for each in requests], np.int64)
    return Load(path.stem, PromptSet(blocks, lengths, BLOCK_TOKENS, BLOCK_TOKENS))


def loads(seed: int = 0) -> Iterator[Load]:
    """Batches made up from their shape."""
    chance = np.random.default_rng(seed)
    shapes = {
        "paper's micro": shared_by(chance, 400, 16, prefix=2000, own=200),
        "system, shots, document": applications(chance, 12_000),
        "one template": template(chance, documents=2000, questions=4),
    }
    for name, prompts in shapes.items():
        packed = PromptSet.of_tokens((prompts[at] for at in chance.permutation(len(prompts))), BLOCK)
        yield Load(name, packed)


def ids(chance: np.random.Generator, count: int) -> Ids:
    """Tokens that no other prompt has."""
    return chance.integers(0, VOCABULARY, count, dtype=np.uint32)


def shared_by(chance: np.random.Generator, prefixes: int, each: int, prefix: int, own: int) -> list[Ids]:
    """The microbenchmark of the paper: ``each`` prompts behind each prefix."""
    heads = [ids(chance, prefix) for _ in range(prefixes)]
    return [np.concatenate([head, ids(chance, own)]) for head in heads for _ in range(each)]


def applications(chance: np.random.Generator, count: int) -> list[Ids]:
    """Four system prompts, six sets of shots for each, documents that are asked for by Zipf's law, and a question."""
    systems = [ids(chance, 256) for _ in range(4)]
    shots = [[ids(chance, 512 + 16 * at) for at in range(6)] for _ in systems]
    documents = [ids(chance, int(length)) for length in chance.uniform(512, 1536, count // 8)]
    weights = 1 / np.arange(1, len(documents) + 1) ** 0.7
    found = []
    for document in chance.choice(len(documents), count, p=weights / weights.sum()):
        system = document % len(systems)
        shot = document % 6 if chance.random() < 0.8 else chance.integers(6)
        own = ids(chance, int(chance.integers(64, 448)))
        found.append(np.concatenate([systems[system], shots[system][shot], documents[document], own]))
    return found


def template(chance: np.random.Generator, documents: int, questions: int) -> list[Ids]:
    """One template for all, then a document, then a question."""
    head = ids(chance, 700)
    bodies = [ids(chance, int(length)) for length in chance.uniform(550, 1650, documents)]
    return [np.concatenate([head, body, ids(chance, 150)]) for body in bodies for _ in range(questions)]


def saved(load: Load, memories: Sequence[int]) -> Iterator[list[str | int | float | None]]:
    """One row for each size of memory, the first of which holds the two longest prompts and no more."""
    for memory in (2 * load.longest, *memories):
        plan = make_plan(load.prompts, memory_tokens=memory)
        counts = (plan.tokens_arrival, plan.tokens_one_level, plan.tokens_to_compute, plan.tokens_optimum)
        yield [load.name, memory, *(None if each is None else 100 * plan.share_saved(each) for each in counts)]


def with_store(seed: int = 3) -> list[str | int | float | None]:
    """A store that was given half of the prompts before, 1,024 tokens at most: a plan that looks, one that does not."""
    chance = np.random.default_rng(seed)
    given = applications(chance, 12_000)
    held = {
        each[: CHUNK * count].tobytes()
        for each in given
        if chance.random() < 0.5
        for count in range(1, HELD_CHUNKS + 1)
    }

    def plan(prompts: PromptSet, *, looks: bool) -> Plan:
        class Given(Storage):
            def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
                return [matched(prompts.tokens(index), chunks, held) for index, chunks in wanted]

        return make_plan(prompts, memory_tokens=400_000, chunk_tokens=CHUNK, storage=Given() if looks else None)

    shuffled = PromptSet.of_tokens((given[at] for at in chance.permutation(len(given))), CHUNK)
    looking, blind = plan(shuffled, looks=True), plan(shuffled, looks=False)
    # The order of the plan that did not look, run as it is over the same store.
    run = plan(PromptSet.of_tokens((shuffled.tokens(at) for at in blind.order), CHUNK), looks=True).tokens_arrival
    shares = (looking.tokens_stored, looking.tokens_to_compute, looking.tokens_optimum, run)
    return [
        "system, shots, document",
        *(None if each is None else 100 * each / looking.tokens_total for each in shares),
    ]


def matched(tokens: Ids, chunks: int, held: set[bytes]) -> int:
    """Leading chunks that are held."""
    most = min(chunks, HELD_CHUNKS)
    return next((at for at in range(most) if tokens[: CHUNK * (at + 1)].tobytes() not in held), most)


def cost(count: int, tokens: int) -> tuple[Plan, float, float, float]:
    """Plans prompts of ``tokens`` each; seconds of CPU to pack and to plan them, and peak memory in GB."""
    chance = np.random.default_rng(0)
    heads = [ids(chance, 3 * tokens // 4) for _ in range(max(1, count // 8))]

    def prompts() -> Iterator[Ids]:
        for at in range(count):
            yield np.concatenate([heads[at * 7919 % len(heads)], ids(chance, tokens - 3 * tokens // 4)])

    made = time.process_time()
    for _ in zip(range(1000), prompts(), strict=False):
        pass
    making_s = (time.process_time() - made) * count / 1000
    start = time.process_time()
    packed = PromptSet.of_tokens(prompts(), BLOCK)
    packed_s = time.process_time() - start - making_s
    start = time.process_time()
    plan = make_plan(packed, memory_tokens=400_000)
    planned_s = time.process_time() - start
    return plan, packed_s, planned_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def print_cost(count: int, tokens: int) -> None:
    """Measures in this process, whose peak memory is that of the plan."""
    plan, packed_s, planned_s, peak = cost(count, tokens)
    columns = ("prompts", "tokens", "packing, CPU s", "planning, CPU s", "peak memory, GB", "saved %")
    row = [len(plan.order), plan.tokens_total, packed_s, planned_s, peak, 100 * plan.saving]
    print(markdown(Table("cost", columns, [list(row)])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planning")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="a trace, as JSON lines")
    parser.add_argument("--memory", nargs="+", type=int, default=[100_000, 400_000, 1_600_000], metavar="TOKENS")
    parser.add_argument("--cost", nargs="?", type=int, const=COST_PROMPTS, metavar="COUNT", help="only the cost")
    parser.add_argument("--tokens", type=int, default=COST_TOKENS, metavar="N", help="tokens of each prompt (2080)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the savings")
    asked = parser.parse_args(arguments)
    if asked.cost is not None:
        print_cost(asked.cost, asked.tokens)
        return 0
    try:
        batches = [*map(trace, asked.traces), *loads()]
    except InvalidRequest as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    rows = [row for load in batches for row in saved(load, asked.memory)]
    table = Table(
        "Tokens saved, % of all",
        PLAN_COLUMNS,
        rows,
        plot=Plot("memory, tokens", PLAN_COLUMNS[2:5], "batch", "%", log_x=True),
    )
    stored = Table(
        "With a store: tokens, % of all",
        ("batch", "stored %", "to compute, planned %", "optimum %", "planned without looking %"),
        [with_store()],
    )
    for each in (table, stored):
        print(f"{each.title}\n\n{markdown(each)}\n", flush=True)
    if asked.plot is not None:
        asked.plot.write_text(svg(table))
    command = [sys.executable, "-m", "benchmarks.planning", "--cost"]
    subprocess.run(command, timeout=COST_S_MAX, check=True)
    return 0


# Prefetching


MODEL = QWEN_7B
PREFETCH_LAYOUT = MODEL.layout(CHUNK_TOKENS)
OWN_TOKENS, OUTPUT_TOKENS, MEMBERS = 64, 24, 3
CACHED_SHARE_MAX = 0.1


@dataclass(frozen=True)
class Batch:
    """A stored batch: its prompts in order of arrival, and where it lies."""

    folder: Path
    prompts: list[Prompt]
    tokens_max: int

    @classmethod
    def stored(cls, folder: Path, groups: int, prefix_tokens: int) -> Batch:
        """Makes questions about documents, in turns, and stores the documents."""
        chance = np.random.default_rng(1)

        def ids(count: int) -> np.ndarray:
            return chance.integers(0, 32_000, count, np.uint32)

        documents = [ids(prefix_tokens) for _ in range(groups)]
        prompts = [Prompt.of(np.concatenate([each, ids(OWN_TOKENS)])) for _ in range(MEMBERS) for each in documents]
        batch = cls(folder, prompts, prefix_tokens + OWN_TOKENS)
        with kvstore.open(folder, max_bytes=None, durability="fsync") as store:
            engine = Engine(batch.settings(prefill_tokens_per_s=1e9), cache_of(store))
            for document in documents:
                engine.serve(Prompt.of(document), 0)
            engine.close()
        return batch

    @property
    def memory_bytes(self) -> int:
        """Room for all prompts twice."""
        return 2 * len(self.prompts) * self.tokens_max * MODEL.bytes_per_token // MEMBERS

    def settings(self, prefill_tokens_per_s: float = 0.0) -> Settings:
        """An engine that stores nothing but the documents."""
        push: Push = "step" if prefill_tokens_per_s else "none"
        return Settings(MODEL, self.tokens_max, push=push, prefill_tokens_per_s=prefill_tokens_per_s)

    def first_s(self, *, in_memory: bool, ahead: int | None) -> float:
        """The median time to first token of the groups' first members, in one pass with empty caches."""
        share = baselines.emptied(self.folder, CACHED_SHARE_MAX)
        if share > CACHED_SHARE_MAX:
            raise SystemExit(f"benchmarks: {share:.0%} of the root stays in the page cache: give --root")
        with kvstore.open(self.folder, memory=self.memory_bytes, max_bytes=None) as store:
            cache = cache_of(store)
            plan = cache.plan([each.tokens for each in self.prompts], memory_tokens=3 * self.tokens_max)
            engine = Engine(self.settings(), cache)
            if in_memory:
                for group in plan.groups:
                    cache.prefetch(self.prompts[group.members[0]].tokens).wait(60.0)
            groups: Iterator[Group] = iter(plan.groups)
            with plan.run(ahead=ahead or 0) as run:
                found = []
                for group in groups if ahead is None else run:
                    answers = [engine.serve(self.prompts[at], OUTPUT_TOKENS) for at in group.members]
                    found.append(answers[0].first_byte_s)
            engine.close()
        return median(found[1:])


def cache_of(store: Store) -> Cache:
    return store.namespace("batch", PREFETCH_LAYOUT)


def prefetching_main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefetching")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="where to make the root; a folder on a disk")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=asked.root, prefix="kvstore-prefetching-") as folder:
        batch = Batch.stored(Path(folder) / "root", asked.groups, asked.prefix)
        ways = {
            "in memory": lambda: batch.first_s(in_memory=True, ahead=None),
            "from the root": lambda: batch.first_s(in_memory=False, ahead=None),
            "brought ahead": lambda: batch.first_s(in_memory=False, ahead=2),
        }
        rounds = in_turns(ways, asked.rounds)
    rows: list[list[Cell]] = []
    for way in ways:
        ratios = [each[way] / each["in memory"] for each in rounds]
        rows.append([way, 1000 * median(each[way] for each in rounds), median(ratios), min(ratios), max(ratios)])
    columns = ("KV of the prefix", "time to first token, ms", "ratio", "least", "most")
    size_mb = asked.prefix * MODEL.bytes_per_token / 1e6
    title = f"{MODEL.name}: prefixes of {asked.prefix:,} tokens ({size_mb:.0f} MB)"
    print(f"{title}, {len(rounds)} rounds\n\n{markdown(Table(title, columns, rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
