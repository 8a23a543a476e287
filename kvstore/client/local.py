"""The port to a node in this process: the engine opens the root itself, and no byte is copied on the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvstore.background import Owner
from kvstore.buffers import Pieces, Sections
from kvstore.census.selection import Selection
from kvstore.client.operation import Operation
from kvstore.client.port import Prompt
from kvstore.counts import NodeCount
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, StoreClosed
from kvstore.format.header import Ancestry
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.node.clear_operation import begin_clear
from kvstore.node.holds import Hold
from kvstore.node.lanes import Deadline
from kvstore.node.layers import Bands
from kvstore.node.member import Member
from kvstore.node.node import Node, match_each
from kvstore.node.prefetch import TierName
from kvstore.node.wanted import keyed
from kvstore.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.text import brief, shown
from kvstore.tokens import TokenArray
from kvstore.writes import WriteMode

if TYPE_CHECKING:
    from kvstore.client.control import Control


class OpenMember:
    """The member of a store in this process, as a context around each call. Raises StoreClosed once it is closed.

    So does a call during which another thread closed the store, whatever came of it: what a node that is being closed
    finds may be a miss for that reason alone.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._owner = Owner()
        self.closed = False

    def __enter__(self) -> Member:
        # Before any lock is asked for: one that another thread held at the fork is never given back in the child, and
        # what the child wrote into the shared arena, which it would treat as its own, would change the parent's images.
        self._owner.check()
        if self.closed:
            raise StoreClosed
        return self.member

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.closed and (error is None or isinstance(error, Exception)):
            raise StoreClosed from error

    def close(self) -> None:
        """Closes the member; idempotent."""
        self.closed = True  # first: calls that fail because of what follows can tell why
        self.member.close()


class LocalGuard:
    """A hold of the node in this process."""

    def __init__(self, store: OpenMember, node: Node, hold: Hold) -> None:
        self._store = store
        self._node = node
        self._hold = hold
        self.chunks = hold.count
        """Leading chunks of one prompt that are held."""

    @property
    def protects(self) -> bool:
        holds_any = any(map(len, self._hold.on or ()))
        return holds_any and not self._store.closed and self._node.holds.find(self._hold.id) is not None

    def check(self) -> None:
        with self._store:
            self._node.holds.check(self._hold)

    def release(self) -> None:
        self._node.holds.release(self._hold)


class LocalHold(LocalGuard):
    """Held leading chunks of one prompt."""

    def read(self, sections: Sections) -> int:
        with self._store:
            return self._node.read(self._hold, sections)

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        with self._store:
            self._node.counters.add(NodeCount.REQUESTS_GET)
            yield from self._node.read_layers(self._hold, memory, bands=Bands(band))

    def view(self) -> list[npt.NDArray[Any]]:
        with self._store:
            return self._node.view(self._hold)


class LocalBlockHold(LocalGuard):
    """Held engine-hashed blocks."""

    def __init__(self, store: OpenMember, node: Node, namespace: Namespace, hold: Hold, present: list[bool]) -> None:
        super().__init__(store, node, hold)
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        with self._store:
            self._node.holds.check(self._hold)
            deadline = Deadline(self._node.clock, self._node.limits.read_deadline_s)
            self._node.counters.add(NodeCount.REQUESTS_GET)
            return self._node.blocks.get(self._namespace, keys, buffers, deadline, held=True)


class LocalPort:
    """The port to a node in this process, in a cluster or alone."""

    tells_fresh = True

    def __init__(self, member: Member) -> None:
        self._store = OpenMember(member)
        self.shared: dict[Hashable, Any] = {}

    @property
    def place(self) -> str:
        return f"root {shown(self._store.member.node.root.url)}" + self._store.closed * ", closed"

    def open_namespace(self, namespace: Namespace) -> None:
        with self._store as member:
            member.claim_namespace(namespace)

    def namespaces(self) -> list[Namespace]:
        with self._store as member:
            return member.node.namespaces()

    def match(self, namespace: Namespace, tokens: TokenArray, *, counts: bool = True) -> int:
        with self._store as member:
            return member.node.match(member.node.chains.of(namespace, tokens), counts=counts)

    def match_each(self, namespace: Namespace, prompts: Sequence[TokenArray]) -> list[int]:
        with self._store as member:
            return match_each(member.node, namespace, prompts, member.node.limits.match_deadline_s)

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Sections,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        with self._store as member:
            return member.node.put(member.node.chains.of(namespace, tokens), first, sections, hints=hints, write=write)

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], Sections]) -> int:
        with self._store as member:
            size = namespace.layout.chunk_tokens
            hold = member.node.hold(member.node.chains.of(namespace, tokens[: chunks_max * size]))
            try:
                return member.node.read(hold, memory(hold.count))
            except HoldBroken:
                return 0  # the session was lost since the match: a miss, as everything that a read cannot have
            finally:
                member.node.holds.release(hold)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> LocalHold:
        with self._store as member:
            hold = member.node.hold(member.node.chains.of(namespace, tokens), ttl_s, counts=counts)
            return LocalHold(self._store, member.node, hold)

    def pin(self, namespace: Namespace, prompt: TokenArray | list[bytes], ttl_s: float, owner: str) -> PinRecord:
        with self._store as member:
            if isinstance(prompt, list):
                return member.pin_blocks(namespace, prompt, ttl_s, owner)
            return member.pin(member.node.chains.of(namespace, prompt), ttl_s, owner)

    def unpin(self, pin_id: str) -> bool:
        with self._store as member:
            return member.unpin(pin_id)

    def pins(self) -> list[PinRecord]:
        with self._store as member:
            return member.pins()

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        with self._store as member:
            return member.refcount(member.node.chains.of(namespace, tokens))

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> StoredBlocks:
        with self._store as member:
            written = member.node.put_blocks(namespace, keys, buffers, hints=hints, write=write, ancestry=ancestry)
            return written.of_blocks()

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.match_deadline_s)
            return member.node.blocks.match(namespace, keys, deadline)

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.match_deadline_s)
            return member.node.blocks.present(namespace, keys, deadline)

    def block_sizes(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.match_deadline_s)
            return member.node.blocks.sizes(namespace, keys, deadline)

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> LocalBlockHold:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.match_deadline_s)
            hold, present = member.node.blocks.hold(namespace, keys, ttl_s, deadline)
            return LocalBlockHold(self._store, member.node, namespace, hold, present)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.read_deadline_s)
            member.node.counters.add(NodeCount.REQUESTS_GET)
            return member.node.blocks.get(namespace, keys, buffers, deadline)

    def supersede(self, namespace: Namespace, prompt: Prompt, first: int, unused_s: float) -> None:
        with self._store as member:
            wanted = (
                keyed(namespace, prompt, ()) if isinstance(prompt, list) else member.node.chains.of(namespace, prompt)
            )
            member.node.reads.superseded(wanted, first, unused_s)

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        with self._store as member:
            _check_no_worker(worker)
            return Operation(member.node.begin_prefetch(member.node.chains.of(namespace, tokens), tier))

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        with self._store as member:
            member.node.evict_first(member.node.chains.of(namespace, tokens))

    def operations(self) -> list[Operation]:
        with self._store as member:
            return [Operation(run) for run in member.node.operations.every()]

    def clear(self, namespace: Namespace) -> Cleared:
        with self._store as member:
            return member.clear(namespace)

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        with self._store as member:
            _check_no_worker(worker)
            return Operation(begin_clear(member, selection, dry_run=dry_run, pinned=pinned))

    def stats(self) -> dict[str, int | float]:
        with self._store as member:
            return member.stats()

    def control(self) -> Control:
        with self._store:
            raise InvalidRequest(
                "this store was opened in this process, which has no control service: connect to a worker "
                "(kvstore.connect, --connect HOST:PORT)"
            )

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        return {"": self.stats()}

    def close(self) -> None:
        self._store.close()


def _check_no_worker(worker: str | None) -> None:
    if worker is not None:
        raise InvalidRequest(f"worker={brief(worker)}: this store is in this process and has no workers; leave it out")
