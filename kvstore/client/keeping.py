"""The store's part in a run: it brings a group's prefix into memory, holds it, and lets it go.

All of it only saves time. What the store refuses is done without, so nothing here raises for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvstore.client.operation import Operation
from kvstore.client.port import Port
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.namespace import Namespace
from kvstore.planning import Group, Prompts
from kvstore.tokens import TokenArray

MEMBERS_MAX = 8
"""Members of a group that are brought into memory ahead; those behind them come as they are read."""


class Held(Protocol):
    """A hold."""

    def release(self) -> None:
        """Ends it; idempotent, never raises."""
        ...


class Keeping(Protocol):
    """The store, as a run sees it. Thread-safe; never raises KVStoreError."""

    def hold(self, group: Group) -> Held | None:
        """Holds what is stored of a group's prefix; None if there is nothing to hold."""
        ...

    def prefetch(self, group: Group) -> list[Operation]:
        """Begins to bring what is stored of a group's prefix, and of its first members, into memory."""
        ...

    def retire(self, group: Group, still_needed: int) -> None:
        """Lets a prefix be evicted first, but for its ``still_needed`` leading tokens."""
        ...


class TokenKeeping:
    """Prompts given as tokens."""

    def __init__(self, port: Port, namespace: Namespace, prompts: Prompts) -> None:
        self._port = port
        self._namespace = namespace
        self._prompts = prompts
        self._has_memory = True

    def hold(self, group: Group) -> Held | None:
        if not _leading(group):
            return None
        with suppress(KVStoreError):
            return self._port.hold(self._namespace, self._prefix(group), None)
        return None

    def prefetch(self, group: Group) -> list[Operation]:
        stored = dict(zip(group.members[:MEMBERS_MAX], group.stored, strict=False))
        wanted = {index: count for index, count in stored.items() if count > group.prefix_tokens}
        if not wanted and group.stored_tokens:
            wanted = {group.members[0]: group.stored_tokens}
        begun = (self._prefetch(self._prompts.tokens(index, count)) for index, count in wanted.items())
        return [operation for operation in begun if operation is not None]

    def retire(self, group: Group, still_needed: int) -> None:
        if not _leading(group):
            return
        prefix = self._prefix(group)
        with suppress(KVStoreError):
            self._port.evict_first(self._namespace, prefix)
            if still_needed:
                self._prefetch(prefix[:still_needed])  # a use, which ends the mark

    def _prefix(self, group: Group) -> TokenArray:
        return self._prompts.tokens(group.members[0], _leading(group))

    def _prefetch(self, tokens: TokenArray) -> Operation | None:
        try:
            return self._port.prefetch(self._namespace, tokens, "memory", None) if self._has_memory else None
        except InvalidRequest:
            self._has_memory = False  # a node without a memory tier: reads come from the root
        except KVStoreError:
            pass
        return None


class KeyKeeping:
    """Prompts given as the engine's keys. Blocks are held; they have no prefetch."""

    def __init__(self, port: Port, namespace: Namespace, prompts: Sequence[Sequence[bytes]]) -> None:
        self._port = port
        self._namespace = namespace
        self._prompts = prompts

    def hold(self, group: Group) -> Held | None:
        count = _leading(group) // self._namespace.layout.chunk_tokens
        if not count:
            return None
        with suppress(KVStoreError):
            return self._port.hold_blocks(self._namespace, self._prompts[group.members[0]][:count], None)
        return None

    def prefetch(self, group: Group) -> list[Operation]:
        return []

    def retire(self, group: Group, still_needed: int) -> None:
        pass


def _leading(group: Group) -> int:
    """Tokens of the first member to hold: the prefix, or of a prompt that shares nothing what the store has."""
    return group.prefix_tokens or group.stored[0]
