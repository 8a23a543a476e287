"""A batch planned by trying everything: slow, and too simple to be wrong. For a few short prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Prompt = Sequence[int]


def common(one: Prompt, two: Prompt) -> int:
    """Leading tokens that are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@dataclass(frozen=True)
class Batch:
    """Prompts, the prompts that a store was given before, and the sizes of a block and of a chunk in tokens."""

    prompts: list[list[int]]
    known: list[list[int]]
    block: int = 1
    chunk: int = 1

    def stored(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that the store holds."""
        return max((common(prompt, each) // self.chunk * self.chunk for each in self.known), default=0)

    def behind(self, prompt: Prompt, found: int) -> int:
        """Tokens to compute if ``found`` leading ones are in memory."""
        return len(prompt) - max(found, self.stored(prompt))

    def optimum(self) -> int:
        """Tokens that are computed if each full block is computed once."""
        seen: set[tuple[int, ...]] = set()
        computed = 0
        for prompt in self.prompts:
            found = 0
            while (end := found + self.block) <= len(prompt) and tuple(prompt[:end]) in seen:
                found = end
            computed += self.behind(prompt, found)
            seen |= {tuple(prompt[:end]) for end in range(self.block, len(prompt) + 1, self.block)}
        return computed

    def one_level(self) -> int:
        """The least over all partitions, one shared prefix for each part."""
        return min(sum(map(self._cost, parts)) for parts in partitions(self.prompts))

    def _cost(self, part: list[list[int]]) -> int:
        alone = sum(self.behind(prompt, 0) for prompt in part)
        shared = min(common(part[0], prompt) for prompt in part) // self.block * self.block
        shared = min(shared, len(part[0]) // self.block * self.block)
        prefix = shared - min(shared, self.stored(part[0]))
        return min(alone, prefix + sum(self.behind(prompt, shared) for prompt in part))

    def in_order(self, order: Sequence[int], memory: int) -> int:
        """Tokens that are computed in an order, ``memory`` tokens of blocks kept, the least recently used evicted."""
        cached: OrderedDict[tuple[int, ...], None] = OrderedDict()
        computed = 0
        for index in order:
            prompt = self.prompts[index]
            blocks = [tuple(prompt[:end]) for end in range(self.block, len(prompt) + 1, self.block)]
            found = next((at for at, each in enumerate(blocks) if each not in cached), len(blocks))
            computed += self.behind(prompt, found * self.block)
            for each in reversed(blocks):
                cached[each] = None
                cached.move_to_end(each)
            while len(cached) > memory // self.block:
                cached.popitem(last=False)
        return computed


def partitions(items: list[list[int]]) -> Iterator[list[list[list[int]]]]:
    """All ways to put the items into parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for at, part in enumerate(parts):
            yield [*parts[:at], [items[0], *part], *parts[at + 1 :]]
