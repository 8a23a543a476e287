"""The store's part in a plan and its runs: what it has of prompts, and a group's prefix brought into memory and held.

All of it only saves time. What the store refuses is done without, so nothing that a run calls raises for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from kvstore.core.address import TokenArray
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.planning.prompts import Group, PromptSet

if TYPE_CHECKING:
    from kvstore.client.cache import BlockCache, Cache

MEMBERS_MAX = 8
"""Members of a group that are brought into memory ahead; those behind them come as they are read."""
KEYS_MAX = 16_384
"""Keys of one call."""
KEYS_S = 60.0
"""Limit for all calls about keys; past it, the others count as not stored."""


class GroupHold(Protocol):
    """A hold."""

    def release(self) -> None:
        """Ends it; idempotent, never raises."""
        ...


class Prefetch(Protocol):
    """A prefetch in progress."""

    def cancel(self) -> None:
        """Cancels it; idempotent, never waits."""
        ...


class Storage:
    """No store: it has nothing. Thread-safe, as those that follow."""

    def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
        """Returns how many of the leading chunks it has, of each prompt by index and number of chunks."""
        return [0] * len(wanted)

    def hold(self, group: Group) -> GroupHold | None:
        """Holds what is stored of a group's prefix; None if there is nothing to hold."""
        return None

    def prefetch(self, group: Group) -> Sequence[Prefetch]:
        """Begins to bring what is stored of a group's prefix, and of its first members, into memory."""
        return ()

    def retire(self, group: Group, still_needed: int) -> None:
        """Marks a prefix to be evicted first, except for its ``still_needed`` leading tokens."""


class TokenStorage(Storage):
    """Prompts given as tokens."""

    def __init__(self, cache: Cache, prompts: PromptSet) -> None:
        self._cache = cache
        self._prompts = prompts
        self._has_memory = True

    def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
        size = self._cache.layout.chunk_tokens
        counts = self._cache.match_each(self._prompts.tokens(at, chunks * size) for at, chunks in wanted)
        return [count // size for count in counts]

    def hold(self, group: Group) -> GroupHold | None:
        with suppress(KVStoreError):
            return self._cache.hold(self._prefix(group)) if _leading(group) else None
        return None

    def prefetch(self, group: Group) -> Sequence[Prefetch]:
        stored = dict(zip(group.members[:MEMBERS_MAX], group.stored, strict=False))
        wanted = {index: count for index, count in stored.items() if count > group.prefix_tokens}
        if not wanted and group.stored_tokens:
            wanted = {group.members[0]: group.stored_tokens}
        begun = (self._prefetch(self._prompts.tokens(index, count)) for index, count in wanted.items())
        return [each for each in begun if each is not None]

    def retire(self, group: Group, still_needed: int) -> None:
        if not _leading(group) or not self._has_memory:
            return
        prefix = self._prefix(group)
        with suppress(KVStoreError):
            self._cache.evict_first(prefix)
            if still_needed:
                self._prefetch(prefix[:still_needed])  # a use, which ends the mark

    def _prefix(self, group: Group) -> TokenArray:
        return self._prompts.tokens(group.members[0], _leading(group))

    def _prefetch(self, tokens: TokenArray) -> Prefetch | None:
        try:
            return self._cache.prefetch(tokens) if self._has_memory else None
        except InvalidRequest:
            self._has_memory = False  # a node without a memory tier: reads come from the root
        except KVStoreError:
            pass
        return None


class KeyStorage(Storage):
    """Prompts given as keys of an engine's blocks of ``chunk_tokens`` tokens. They are held, and have no prefetch."""

    def __init__(self, blocks: BlockCache, prompts: Sequence[Sequence[bytes]], chunk_tokens: int) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._chunk_tokens = chunk_tokens

    def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
        keys = list(dict.fromkeys(key for at, count in wanted for key in self._prompts[at][:count]))
        present, ends_s = set[bytes](), time.monotonic() + KEYS_S
        for start in range(0, len(keys), KEYS_MAX):
            if time.monotonic() >= ends_s:
                break
            some = keys[start : start + KEYS_MAX]
            present.update(key for key, found in zip(some, self._blocks.present(some), strict=True) if found)
        return [sum(1 for _ in takewhile(present.__contains__, self._prompts[at][:count])) for at, count in wanted]

    def hold(self, group: Group) -> GroupHold | None:
        count = _leading(group) // self._chunk_tokens
        with suppress(KVStoreError):
            return self._blocks.hold(self._prompts[group.members[0]][:count]) if count else None
        return None


def _leading(group: Group) -> int:
    """Tokens of the first member to hold: the prefix, or of a prompt that shares nothing what the store has."""
    return group.prefix_tokens or group.stored[0]
