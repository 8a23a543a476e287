"""Time to first token of a planned batch whose prefixes are stored: from memory, from the root, and brought ahead.

    python -m benchmarks.prefetching [--root FOLDER] [--groups 8] [--prefix 4096] [--rounds 5]

An emulated engine runs the batch in planned order: compute is slept, KV is real. Its own cache holds nothing between
requests. Before each pass memory is empty, and the root's files are out of the page cache. The figures are those of
the first member of each group but the first, which nothing runs before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

import kvstore
from benchmarks import caching
from benchmarks.emulated import CHUNK_TOKENS, Engine, Prompt, Push, Settings
from benchmarks.models import QWEN_7B
from benchmarks.result import Cell, Table, markdown
from benchmarks.rounds import in_turns
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.planning import Group

MODEL = QWEN_7B
LAYOUT = MODEL.layout(CHUNK_TOKENS)
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
        share = caching.emptied(self.folder, CACHED_SHARE_MAX)
        if share > CACHED_SHARE_MAX:
            raise SystemExit(f"benchmarks.prefetching: {share:.0%} of the root stays in the page cache: give --root")
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
    return store.namespace("batch", LAYOUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.prefetching", description=(__doc__ or "").split("\n\n")[0])
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
