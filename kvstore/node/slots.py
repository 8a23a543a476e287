"""The memory tier's slots and references: room being filled, and chunks that stay in place while they are used.

Separate from the tier, which decides; its callers hold these meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvstore.memory.inventory import Entry
from kvstore.node.images import Images, ImagesIn
from kvstore.node.wanted import Wanted


class Slot:
    """Room for one chunk that is being filled; nobody else sees it before it is ready."""

    __slots__ = ("entry", "memory")

    def __init__(self, entry: Entry, memory: memoryview) -> None:
        self.entry = entry
        self.memory = memory
        """Writable, of the image's size; must not be touched once the slot was given to ``ready`` or ``drop``."""


class References:
    """References to entries, which keep their bytes in place and unchanged until ``release``. A context.

    ``memory`` is the arena, for reading; it stays readable as long as this object lives, whoever closes the tier.
    """

    __slots__ = ("_let_go", "is_leased", "memory", "referred")

    def __init__(self, memory: memoryview, referred: list[Entry], let_go: Callable[[References], None]) -> None:
        self.memory = memory
        self.referred = referred
        self.is_leased = False
        self._let_go: Callable[[References], None] | None = let_go

    def release(self) -> None:
        """Lets the entries be evicted again, unless somebody else refers to them, and ends their lease. Idempotent.

        Never waits for a lock, so that a finalizer may call it, in any thread at any point.
        """
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slots(References):
    """The chunks from ``first`` on that are in memory."""

    __slots__ = ("entries", "first", "wanted")

    def __init__(
        self,
        memory: memoryview,
        wanted: Wanted,
        first: int,
        entries: list[Entry | None],
        let_go: Callable[[References], None],
    ) -> None:
        super().__init__(memory, [entry for entry in entries if entry is not None], let_go)
        self.wanted = wanted
        self.first = first
        self.entries = entries
        """One entry for each chunk; None for chunks that are not in memory."""

    @property
    def leading_count(self) -> int:
        """Number of leading chunks that are in memory without a gap."""
        return next((at for at, entry in enumerate(self.entries) if entry is None), len(self.entries))

    def images(self, start: int, stop: int) -> Sequence[memoryview]:
        """Returns the images of chunks ``start`` to ``stop - 1``, all of which must be there; unverified (rule I1)."""
        entries = [entry for entry in self.entries[start - self.first : stop - self.first] if entry is not None]
        assert start >= self.first and len(entries) == stop - start
        return images_of(self.memory, entries)

    def image(self, index: int) -> memoryview:
        """Returns the image of chunk ``index``, which must be there; unverified (rule I1)."""
        entry = self.entries[index - self.first]
        assert index >= self.first and entry is not None
        return self.memory[entry.offset : entry.offset + entry.size_bytes]

    def picked(self, indexes: Sequence[int]) -> Slots:
        """Returns the chunks at ``indexes``, as slots that refer to nothing: use them while these do."""
        entries = [self.entries[index - self.first] for index in indexes]
        return Slots(self.memory, self.wanted.picked(indexes), 0, entries, lambda _: None)

    def present_images(self) -> Sequence[memoryview]:
        """The images of chunks that are there, in order; unverified (rule I1)."""
        return images_of(self.memory, self.referred)

    def sections(self, start: int, stop: int) -> Images:
        """Returns the sections of chunks ``start`` to ``stop - 1``, as a put takes them; unverified too."""
        return Images(self.wanted, start, self.images(start, stop))


class Victims(References):
    """The next entries to be evicted, kept for a caller that puts them elsewhere first."""

    __slots__ = ()

    @property
    def entries(self) -> list[Entry]:
        """The entries in the order of the policy, children before parents."""
        return self.referred

    def images(self) -> list[tuple[Entry, memoryview]]:
        """Returns each entry with its image; unverified."""
        return list(zip(self.referred, images_of(self.memory, self.referred), strict=True))


def images_of(memory: memoryview, entries: Sequence[Entry]) -> Sequence[memoryview]:
    """Returns the images of entries in the arena."""
    return ImagesIn(memory, [entry.offset for entry in entries], [entry.size_bytes for entry in entries])
