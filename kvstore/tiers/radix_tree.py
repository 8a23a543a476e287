"""The radix tree: chunks by address, and by the tokens of their chain, compared as tokens and not hashed.

An edge is a *run*: consecutive chunks without a branch between them, their tokens packed into one string. A match
compares whole runs at the speed of memcmp; only at the beginning of a run does it look up a chunk by its tokens. A run
is bounded, so that no insertion, split or removal copies much more than ``RUN_BYTES_MAX``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from kvstore.core.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.core.namespace import NamespaceDigest

RUN_BYTES_MAX = 65_536
"""Tokens of a run after its first chunk: 64 chunks of 256 tokens, 1,024 of 16."""


class Chunk:
    """The tree's part of a chunk; users of the tree derive their entries from it."""

    __slots__ = ("address", "children_count", "is_ready", "parent", "run")

    def __init__(self, address: Address, parent: Address) -> None:
        self.address = address
        self.parent = parent
        self.children_count = 0
        """Number of chunks in the tree whose parent this is, ready or not."""
        self.is_ready = False
        """True if matches show it. ``Tree.show`` sets it."""
        self.run: RadixNode[Any]
        """``Tree.add`` sets it; a removed chunk has a run of its own."""


C = TypeVar("C", bound=Chunk)


class RadixNode(Generic[C]):
    """Consecutive chunks of one chain; only the last has children outside of it.

    ``chunks`` is empty for the run that a namespace's blocks without tokens share, and for the run of a removed chunk,
    which keeps its tokens.
    """

    __slots__ = ("children", "chunks", "head", "rest", "space", "unready_count")

    def __init__(self, space: NamespaceTree[C], chunks: list[C], head: bytes = b"", rest: bytes = b"") -> None:
        self.space = space
        self.chunks = chunks
        self.head = head
        """Tokens of the first chunk, which are also its key among its siblings."""
        self.rest = rest
        self.children: dict[bytes, RadixNode[C]] | None = None
        self.unready_count = 0

    def tokens(self, index: int) -> bytes:
        """Returns the packed tokens of chunk ``index``."""
        size = len(self.head)
        return self.rest[(index - 1) * size : index * size] if index else self.head

    def tokens_of(self, chunk: C) -> bytes:
        """Returns the packed tokens of a chunk whose run this is."""
        return self.tokens(self.chunks.index(chunk)) if self.chunks else self.head


class NamespaceTree(Generic[C]):
    """The tree of one namespace; all its chunks have the same number of tokens."""

    __slots__ = ("children", "chunk_bytes", "chunks_count", "loose", "namespace")

    def __init__(self, namespace: NamespaceDigest) -> None:
        self.namespace = namespace
        self.chunks_count = 0
        self.chunk_bytes = 0
        """0 until the first chunk with tokens comes."""
        self.children: dict[bytes, RadixNode[C]] = {}
        self.loose: RadixNode[C] = RadixNode(self, [])


class Tree(Generic[C]):
    """Chunks of several namespaces. Not thread-safe.

    A chunk whose parent is missing is found by its address, and by its tokens once the parent has come.
    """

    def __init__(self, run_bytes_max: int = RUN_BYTES_MAX) -> None:
        self._run_bytes_max = run_bytes_max
        self._chunks: dict[Address, C] = {}
        self._spaces: dict[NamespaceDigest, NamespaceTree[C]] = {}
        self._waiting: dict[Address, dict[bytes, RadixNode[C]]] = {}
        """Runs by their missing parent."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[C]:
        return iter(self._chunks.values())

    def find(self, address: Address) -> C | None:
        """Returns the chunk of this address, ready or not."""
        return self._chunks.get(address)

    def match(self, namespace: NamespaceDigest, packed: memoryview) -> list[C]:
        """Returns the leading chunks of ``packed`` (tokens as u32, bytes) that are here and ready, parents first."""
        found: list[C] = []
        space = self._spaces.get(namespace)
        if space is None:
            return found
        size, at, children = space.chunk_bytes, 0, space.children or None
        while children is not None and (run := children.get(bytes(packed[at : at + size]))) is not None:
            at += size
            count = 1 + _shared_count(run.rest, packed[at : at + len(run.rest)], size)
            if run.unready_count:
                count = _ready_count(run.chunks, count)
            if count < len(run.chunks):
                found += run.chunks[:count]
                break
            found += run.chunks
            at += len(run.rest)
            children = run.children
        return found

    def leading(self, packed_addresses: bytes, first: int = 0) -> int:
        """Returns how many consecutive chunks from index ``first`` on are here and ready; a chain's, or any blocks.

        Their addresses lie one after the other.
        """
        at, size = first, ADDRESS_BYTES
        while (
            chunk := self._chunks.get(Address(packed_addresses[at * size : (at + 1) * size]))
        ) is not None and chunk.is_ready:
            run: RadixNode[C] = chunk.run
            if not run.chunks:
                at += 1
                continue
            chunks = run.chunks if run.chunks[0] is chunk else run.chunks[run.chunks.index(chunk) :]
            count = _equal_count(chunks, packed_addresses, at)
            if run.unready_count:
                count = _ready_count(chunks, count)
            at += count
            if count < len(chunks):
                break  # the chain leaves the run here: if it went on, the run would have a branch here
        return at - first

    def add(self, namespace: NamespaceDigest, chunk: C, tokens: bytes) -> None:
        """Adds a chunk that no match shows yet. ``tokens`` are its own, packed; b"" for a block without tokens."""
        assert chunk.address not in self._chunks, "first writer wins: the address is in the tree"
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = NamespaceTree(namespace)
        space.chunks_count += 1
        self._chunks[chunk.address] = chunk
        if not tokens:
            chunk.run = space.loose
            return
        space.chunk_bytes = space.chunk_bytes or len(tokens)
        assert len(tokens) == space.chunk_bytes, "chunks of one namespace have the same number of tokens"
        run = self._link(space, chunk, tokens)
        run.unready_count += 1
        waiting = self._waiting.pop(chunk.address, None)
        if waiting is not None:
            chunk.children_count = len(waiting)
            run.children = waiting
            self._join_only_child(run)

    def show(self, chunk: C) -> None:
        """Lets matches show the chunk from now on."""
        assert not chunk.is_ready
        chunk.is_ready = True
        if chunk.run.chunks:
            chunk.run.unready_count -= 1

    def remove(self, chunk: C) -> None:
        """Takes a chunk out. Its descendants wait for it to come back, and are found by address until then."""
        assert self._chunks.get(chunk.address) is chunk, "not in the tree"
        del self._chunks[chunk.address]
        run: RadixNode[C] = chunk.run
        space = run.space
        if run.chunks:
            self._unlink(space, chunk)
        chunk.children_count = 0
        space.chunks_count -= 1
        if not space.chunks_count:
            del self._spaces[space.namespace]

    def _link(self, space: NamespaceTree[C], chunk: C, tokens: bytes) -> RadixNode[C]:
        """Puts a chunk behind its parent; returns the run whose last chunk it then is."""
        parent = self._chunks.get(chunk.parent)
        if parent is None:
            siblings = space.children if chunk.parent == NO_PARENT else self._waiting.setdefault(chunk.parent, {})
        else:
            parent.children_count += 1
            chunk.parent = parent.address  # share one object, for a million of them
            above: RadixNode[C] = parent.run
            if above.chunks[-1] is not parent:
                _split(above, above.chunks.index(parent) + 1)
            if above.children is None:
                if len(above.rest) + len(tokens) <= self._run_bytes_max:
                    above.rest += tokens
                    above.chunks.append(chunk)
                    chunk.run = above
                    return above
                above.children = {}
            siblings = above.children
        assert tokens not in siblings, "two addresses for the same tokens behind the same parent"
        run = siblings[tokens] = chunk.run = RadixNode(space, [chunk], tokens)
        return run

    def _unlink(self, space: NamespaceTree[C], chunk: C) -> None:
        run: RadixNode[C] = chunk.run
        index = len(run.chunks) - 1 if run.chunks[-1] is chunk else run.chunks.index(chunk)
        tokens = run.tokens(index)
        if index + 1 < len(run.chunks):
            _split(run, index + 1)
        if run.children is not None:
            self._waiting[chunk.address] = run.children
            run.children = None
        run.unready_count -= not chunk.is_ready
        parent = self._chunks.get(chunk.parent)
        if parent is not None:
            parent.children_count -= 1
        if index:
            run.chunks.pop()
            run.rest = run.rest[: (index - 1) * len(tokens)]
        elif parent is not None:
            above: RadixNode[C] = parent.run
            assert above.children is not None
            del above.children[tokens]
            if not above.children:
                above.children = None
        elif chunk.parent == NO_PARENT:
            del space.children[tokens]
        else:
            siblings = self._waiting[chunk.parent]
            del siblings[tokens]
            if not siblings:
                del self._waiting[chunk.parent]
        # A removed chunk can still tell its tokens. Without a reference cycle, which would wait for the garbage
        # collector.
        chunk.run = RadixNode(space, [], tokens)

    def _join_only_child(self, run: RadixNode[C]) -> None:
        """Joins a run and its only child if the result is not too long.

        A tier that is filled again from files meets chunks in any order, and would keep a run for each.
        """
        if run.children is None or len(run.children) != 1:
            return
        (child,) = run.children.values()
        if len(run.rest) + len(child.head) + len(child.rest) > self._run_bytes_max:
            return
        for chunk in child.chunks:
            chunk.run = run
        run.chunks += child.chunks
        run.rest = b"".join((run.rest, child.head, child.rest))
        run.unready_count += child.unready_count
        run.children = child.children


def _split(run: RadixNode[C], index: int) -> None:
    """Moves the chunks from ``index`` on into a run of their own, behind the others."""
    size = len(run.head)
    tail = RadixNode(run.space, run.chunks[index:], run.tokens(index), run.rest[index * size :])
    tail.children, tail.unready_count = run.children, 0
    for chunk in tail.chunks:
        chunk.run = tail
        tail.unready_count += not chunk.is_ready
    del run.chunks[index:]
    run.rest = run.rest[: (index - 1) * size]
    run.unready_count -= tail.unready_count
    run.children = {tail.head: tail}


def _ready_count(chunks: list[C], count: int) -> int:
    """Counts the ready ones among the first ``count`` chunks, up to the first that is not ready."""
    return next((index for index in range(count) if not chunks[index].is_ready), count)


def _equal_count(chunks: list[C], packed_addresses: bytes, at: int) -> int:
    """Counts the leading chunks that have the addresses from index ``at`` on.

    An address stands for its whole chain: if one is equal, all before it are. So most runs cost one comparison.
    """
    size = ADDRESS_BYTES
    count = min(len(chunks), len(packed_addresses) // size - at)
    if packed_addresses.startswith(chunks[count - 1].address, (at + count - 1) * size):
        return count
    return bisect_left(
        range(count),
        True,
        key=lambda index: not packed_addresses.startswith(chunks[index].address, (at + index) * size),
    )


def _shared_count(rest: bytes, given: memoryview, size: int) -> int:
    """Counts the equal leading chunks of ``size`` bytes."""
    if rest.startswith(given):
        return len(given) // size  # the common case, at no further cost
    low, high = 0, len(given) // size
    middle = high
    # Each step compares up to the first difference at most, and skips what an earlier step found equal.
    while low < high:
        if rest.startswith(given[low * size : middle * size], low * size):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
