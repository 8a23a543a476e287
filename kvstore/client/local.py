"""The port to a node in this process: the engine opens the root itself, and no byte is copied on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvstore.buffers import Pieces
from kvstore.census.selection import Selection
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.member import Member
from kvstore.node.moves import Act, Level, Move
from kvstore.node.node import Node
from kvstore.progress import Progress
from kvstore.results import Cleared, LayerMemory, PinRecord, PutResult
from kvstore.sections import Sections
from kvstore.tokens import TokenArray
from kvstore.writes import WriteMode

if TYPE_CHECKING:
    from kvstore.client.control import Control


class LocalHold:
    """A hold of the node in this process."""

    def __init__(self, node: Node, hold: Hold) -> None:
        self._node = node
        self._hold = hold
        self.chunks = hold.count

    def read(self, sections: Sections) -> int:
        return self._node.read(self._hold, sections)

    def layers(self, memory: Callable[[int], LayerMemory]) -> Iterator[tuple[int, LayerMemory]]:
        return self._node.read_layers(self._hold, memory)

    def view(self) -> list[npt.NDArray[Any]]:
        return self._node.view(self._hold)

    def release(self) -> None:
        self._node.release(self._hold)


class LocalBlockHold:
    """Held blocks of the node in this process. Like a hold of chunks, it protects all chunks from collection."""

    def __init__(self, node: Node, namespace: Namespace, hold: Hold, present: list[bool]) -> None:
        self._node = node
        self._namespace = namespace
        self._hold = hold
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        self._node.holds.check(self._hold)
        deadline = Deadline(self._node.clock, self._node.limits.read_deadline_s)
        return self._node.blocks.get(self._namespace, keys, buffers, deadline, held=True)

    def release(self) -> None:
        self._node.release(self._hold)


class LocalPort:
    """The port to a node in this process, in a cluster or alone."""

    def __init__(self, member: Member) -> None:
        self._opened = member
        self._pid = os.getpid()

    @property
    def _member(self) -> Member:
        # Before any lock: a lock that another thread held at the fork is never released in the child, and writes of the
        # child into the shared arena, which it would treat as its own, would change the parent's images.
        if self._pid != os.getpid():
            raise InvalidRequest(
                "this store was opened before a fork, and a forked child has none of its threads: open it in the child"
            )
        return self._opened

    @property
    def _node(self) -> Node:
        return self._member.node

    def open_namespace(self, namespace: Namespace) -> None:
        self._member.claim_namespace(namespace)

    def namespaces(self) -> list[Namespace]:
        return self._node.namespaces()

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        return self._node.match(self._node.chains.of(namespace, tokens))

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Sections,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        return self._node.put(self._node.chains.of(namespace, tokens), first, sections, hints=hints, write=write)

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], Sections]) -> int:
        size = namespace.layout.chunk_tokens
        hold = self._node.hold(self._node.chains.of(namespace, tokens[: chunks_max * size]))
        try:
            return self._node.read(hold, memory(hold.count))
        except HoldBroken:
            return 0  # the session was lost since the match: a miss, like everything a read cannot get
        finally:
            self._node.release(hold)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None) -> LocalHold:
        return LocalHold(self._node, self._node.hold(self._node.chains.of(namespace, tokens), ttl_s))

    def pin(self, namespace: Namespace, tokens: TokenArray, ttl_s: float, owner: str) -> PinRecord:
        return self._member.pin(self._node.chains.of(namespace, tokens), ttl_s, owner)

    def unpin(self, pin_id: str) -> bool:
        return self._member.unpin(pin_id)

    def pins(self) -> list[PinRecord]:
        return self._member.pins()

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        return self._member.refcount(self._node.chains.of(namespace, tokens))

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> list[bool]:
        return self._node.put_blocks(namespace, keys, buffers, hints=hints, write=write)

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        deadline = Deadline(self._node.clock, self._node.limits.match_deadline_s)
        return self._node.blocks.match(namespace, keys, deadline)

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        deadline = Deadline(self._node.clock, self._node.limits.match_deadline_s)
        return self._node.blocks.present(namespace, keys, deadline)

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> LocalBlockHold:
        hold, present = self._node.hold_blocks(namespace, keys, ttl_s)
        return LocalBlockHold(self._node, namespace, hold, present)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        deadline = Deadline(self._node.clock, self._node.limits.read_deadline_s)
        return self._node.blocks.get(namespace, keys, buffers, deadline)

    def move(self, namespace: Namespace, tokens: TokenArray, act: Act, level: Level) -> Move:
        return self._node.begin_move(self._node.chains.of(namespace, tokens), act, level)

    def clear(self, namespace: Namespace) -> Cleared:
        return self._member.clear(namespace)

    def clear_selected(self, selection: Selection, progress: Progress, *, dry_run: bool, pinned: bool) -> Cleared:
        return self._member.clear_selected(selection, progress, dry_run=dry_run, pinned=pinned)

    def stats(self) -> dict[str, int | float]:
        return self._member.stats()

    def control(self) -> Control:
        raise InvalidRequest(
            "this store was opened in this process, which has no control service: connect to a worker "
            "(kvstore.connect, --connect HOST:PORT)"
        )

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        return {"": self.stats()}

    def close(self) -> None:
        self._opened.close()
