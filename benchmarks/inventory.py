"""The cost of an inventory of many entries: `python -m benchmarks.inventory`. Bytes an entry, matches, evictions.

Hypothesis: with 1,000,000 entries a prompt of 131,072 tokens is matched by its tokens in a tenth of a millisecond,
because runs are compared and nothing is hashed; an entry takes under 400 bytes besides its tokens. Baselines, each on
the same machine at the same moment: copying the prompt's tokens, and hashing them to addresses.

Prompts of 131,072 tokens share a beginning of 4,096, and a third of them branch off an earlier one. Prompts to match
take turns, so that their tokens come from main memory; each is a separate buffer, as in an engine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks import machine
from benchmarks.rounds import percentile
from kvstore.address import NO_PARENT, Address, chained_addresses
from kvstore.layout import Layout
from kvstore.memory.inventory import Inventory, Place
from kvstore.namespace import Namespace

PROMPT_TOKENS, SHARED_TOKENS = 131_072, 4_096
KEPT, ROUNDS = 64, 5
IMAGE_BYTES = 1 << 20


class Endless:
    """Room for whatever comes."""

    size_bytes = free_bytes = 1 << 62

    def take(self, size_bytes: int) -> int:
        self.free_bytes -= size_bytes
        return self.free_bytes

    def give(self, offset: int) -> None:
        pass


@dataclass(frozen=True)
class Prompt:
    """Tokens as u32, and an address for each chunk; random ones, which costs no hashing and changes nothing."""

    packed: bytes
    addresses: list[Address]

    @cached_property
    def packed_addresses(self) -> bytes:
        """The addresses, one after the other."""
        return b"".join(self.addresses)


def prompts(chunk_tokens: int) -> Iterator[Prompt]:
    """Prompts without end."""
    numbers, choose = np.random.default_rng(1), random.Random(1)
    size, count = 4 * chunk_tokens, PROMPT_TOKENS // chunk_tokens

    def some(chunks: int) -> Prompt:
        raw = numbers.bytes(16 * chunks)
        packed = numbers.integers(0, 128_000, chunks * chunk_tokens, np.uint32).tobytes()
        return Prompt(packed, [Address(raw[at : at + 16]) for at in range(0, len(raw), 16)])

    shared = some(SHARED_TOKENS // chunk_tokens)
    earlier: list[Prompt] = []
    while True:
        base, cut = shared, len(shared.addresses)
        if earlier and choose.random() < 1 / 3:
            base = choose.choice(earlier)
            cut = choose.randrange(cut, count)
        own = some(count - cut)
        made = Prompt(base.packed[: cut * size] + own.packed, base.addresses[:cut] + own.addresses)
        if len(earlier) < KEPT:
            earlier.append(made)
        yield made


def put(inventory: Inventory, prompt: Prompt, size: int, now_s: float) -> int:
    """Claims what is not there; how many chunks."""
    addresses, entries = prompt.addresses, []
    for index in range(inventory.leading(prompt.packed_addresses), len(addresses)):
        tokens = prompt.packed[index * size : (index + 1) * size]
        parent = addresses[index - 1] if index else NO_PARENT
        entry = inventory.claim(Place(NAMESPACE, addresses[index], parent, tokens), IMAGE_BYTES, now_s)
        assert entry is not None
        entries.append(entry)
    for entry in entries:
        inventory.ready(entry)
    for entry in entries:
        inventory.unrefer(entry)
    return len(entries)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def microseconds(work: Callable[[Prompt], object], asked: list[Prompt]) -> dict[str, float]:
    """Time of one call, over all prompts in turns."""
    taken = []
    for _ in range(ROUNDS):
        for prompt in asked:
            began_s = time.perf_counter()
            work(prompt)
            taken.append(1e6 * (time.perf_counter() - began_s))
    return {"p50_us": round(percentile(taken, 0.5), 1), "p99_us": round(percentile(taken, 0.99), 1)}


def measure(chunk_tokens: int, entries: int) -> dict[str, object]:
    """All figures for chunks of one length."""
    size = 4 * chunk_tokens
    inventory = Inventory(Endless())
    asked: list[Prompt] = []
    before_bytes, asked_bytes, putting_s, now_s = resident_bytes(), 0, 0.0, 0.0
    for prompt in prompts(chunk_tokens):
        now_s += 1.0
        began_s = time.perf_counter()
        put(inventory, prompt, size, now_s)
        putting_s += time.perf_counter() - began_s
        if len(asked) < KEPT:
            asked.append(prompt)
            asked_bytes += len(prompt.packed)
        if inventory.entries_count >= entries:
            break
    grown_bytes = resident_bytes() - before_bytes - asked_bytes
    asked = [Prompt(bytes(bytearray(prompt.packed)), prompt.addresses) for prompt in asked]
    count = inventory.entries_count
    namespace = Namespace("model", Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=chunk_tokens))
    last = asked[-1]
    assert len(inventory.match(NAMESPACE, memoryview(last.packed))) == len(last.addresses)
    assert all(inventory.leading(prompt.packed_addresses) == len(prompt.addresses) for prompt in asked[-8:])
    found: dict[str, object] = {
        "chunk_tokens": chunk_tokens,
        "entries": count,
        "entry_bytes": round(grown_bytes / count),
        "of_which_tokens_bytes": size,
        "claim_ready_unrefer_us": round(1e6 * putting_s / count, 1),
        "match": microseconds(lambda prompt: inventory.match(NAMESPACE, memoryview(prompt.packed)), asked),
        "leading": microseconds(lambda prompt: inventory.leading(prompt.packed_addresses), asked),
        "copy_of_tokens": microseconds(lambda prompt: bytearray(prompt.packed), asked),
        "hashing_in_python": microseconds(lambda prompt: chained_addresses(namespace, prompt.packed), asked[:4]),
    }
    victims = inventory.victims(1_000 * IMAGE_BYTES)
    began_s = time.perf_counter()
    for entry in victims:
        inventory.drop(entry)
    found["drop_us"] = round(1e6 * (time.perf_counter() - began_s) / len(victims), 1)
    return found


def main() -> int:
    """All figures, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[256, 16])
    arguments = parser.parse_args()
    print(json.dumps({"machine": machine.describe()}))
    for chunk_tokens in arguments.chunk_tokens:
        # Each in a process of its own: what one has freed, the next would not have to ask for.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(json.dumps(pool.apply(measure, (chunk_tokens, arguments.entries))))
    return 0


NAMESPACE = Namespace("inventory", Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)).digest

if __name__ == "__main__":
    raise SystemExit(main())
