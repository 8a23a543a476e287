"""The level of a root whose metadata are lost: what the processes of the host lend themselves meanwhile (rule S8).

Claims are transactions on the metadata. Without these a small file takes their place: it says what the root's files
took when they were counted, and what was lent since then. Each loan reads and writes it under a lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from kvstore.errors import Unavailable
from kvstore.format.places import LOANS
from kvstore.meta.bounds import CLAIMED_SHARE
from kvstore.meta.sqlite.host import boot_id
from kvstore.meta.sqlite.making import locked
from kvstore.sources import Clock

BEFORE_SHARE = 1 / 16
"""This share of the bound is lent to nobody: others may still write what they had claimed before the loss."""
COUNT_S = 60.0
"""The root is counted again after this, in which a put that had a loan has written it."""
LOCK_S = 1.0
_RECORD_BYTES = 128
"""Always as many, so that one write replaces all of it."""


class _Level(NamedTuple):
    """``lent_bytes`` are those since ``counted_s`` of a boot, when the files took ``used_bytes``."""

    boot: str
    counted_s: float
    used_bytes: int
    lent_bytes: int


class Loans:
    """The loans of all processes on one folder."""

    def __init__(
        self, folder: str, max_bytes: int, used_bytes: Callable[[], int], clock: Clock, boot: str | None = None
    ) -> None:
        """``used_bytes`` counts the root's files. ``max_bytes`` is the bound of this process.

        The times of ``clock`` are those of one ``boot``; by default it is the host's.
        """
        self._boot = boot_id() if boot is None else boot
        self._path = os.path.join(folder, LOANS)
        self._most_bytes = int((CLAIMED_SHARE - BEFORE_SHARE) * max_bytes)
        self._used_bytes = used_bytes
        self._clock = clock

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        """Lends both together, or ``size_bytes`` alone; returns how many more, None if the bound leaves no room.

        Raises Unavailable, and what the counting raises.
        """
        try:
            with locked(self._path, LOCK_S) as file:
                return self._lend(file, size_bytes, more_bytes)
        except OSError as cause:
            raise Unavailable(f"{self._path}: {cause.strerror}") from cause

    def _lend(self, file: int, size_bytes: int, more_bytes: int) -> int | None:
        level = _read(file)
        now_s = self._clock.monotonic_s()
        if level is None or level.boot != self._boot or not 0 <= now_s - level.counted_s < COUNT_S:
            # Puts that have a loan may be under way: what was lent since the last counting counts once more.
            before_bytes = 0 if level is None else level.lent_bytes
            level = _Level(self._boot, now_s, self._used_bytes() + before_bytes, 0)
        room_bytes = self._most_bytes - level.used_bytes - level.lent_bytes
        lent_bytes = next((each for each in (size_bytes + more_bytes, size_bytes) if each <= room_bytes), None)
        _write(file, level._replace(lent_bytes=level.lent_bytes + (lent_bytes or 0)))
        return None if lent_bytes is None else lent_bytes - size_bytes


def _read(file: int) -> _Level | None:
    """Returns the level; None if there is none, or what is there is none."""
    try:
        boot, counted_s, used_bytes, lent_bytes = os.pread(file, _RECORD_BYTES, 0).decode("ascii").split()
        level = _Level(boot, float(counted_s), int(used_bytes), int(lent_bytes))
    except ValueError:
        return None
    return level if min(level[1:]) >= 0 else None


def _write(file: int, level: _Level) -> None:
    record = f"{level.boot} {level.counted_s:.3f} {level.used_bytes} {level.lent_bytes}".encode()
    os.pwrite(file, record.ljust(_RECORD_BYTES), 0)


def are_left(folder: str) -> bool:
    """True if somebody borrowed, and nobody has ended that."""
    return os.path.isfile(os.path.join(folder, LOANS))


def end_loans(folder: str) -> None:
    """Removes the level, once the metadata can be relied on again. Raises Unavailable."""
    path = os.path.join(folder, LOANS)
    try:
        if os.path.lexists(path):
            os.unlink(path)  # who waits for its lock makes another
    except OSError as cause:
        raise Unavailable(
            f"{path} cannot be removed ({cause.strerror}): remove it, it is of no use any more"
        ) from cause
