"""The places where a worker on this host offers chunks: offsets in its memory, or open files.

Asked for one run ahead, so the worker looks up the next chunks while these are being read.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import Lease
from kvstore.wire.bulk.frames import FILES_MAX, Kind, Mode, decode_slots, decode_span, encode_span

KEEP = 1
"""First byte of READ if slots are still being read after it."""


@dataclass(frozen=True, slots=True)
class GivenSlots:
    """Chunks from index ``first`` on, at these offsets of the worker's memory while ``lease`` lives."""

    first: int
    offsets: Sequence[int]
    lease: Lease

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.offsets)


@dataclass(slots=True)
class GivenFiles:
    """Chunks from index ``first`` on, as open files that the receiver must close."""

    first: int
    files: list[int]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.files)

    def close(self) -> None:
        """Closes the files that are left. Idempotent."""
        while self.files:
            with suppress(OSError):
                os.close(self.files.pop())


@dataclass(frozen=True, slots=True)
class NotGiven:
    """Chunks from index ``first`` on that are missing, or (``is_elsewhere``) can only be sent as bytes."""

    first: int
    count: int
    is_elsewhere: bool


Given = GivenSlots | GivenFiles


class Giving:
    """One request of mode FILES or SLOTS; a GET after its START. A context: its end closes files that nobody took."""

    def __init__(self, link: Link, number: int, mode: Mode, *, has_gaps: bool = False) -> None:
        """``has_gaps``: the request is about blocks, so a missing one does not end it."""
        self._has_gaps = has_gaps
        self._kinds = (Kind.FILES, Kind.ABSENT, Kind.ELSEWHERE, *([Kind.SLOTS] if mode is Mode.SLOTS else []))
        self._link = link
        self._number = number
        self._lease: Lease | None = None
        self._asked: tuple[int, int] | None = None
        self._ahead: list[Given | NotGiven] = []

    def __enter__(self) -> Giving:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._ahead)

    def each(self, first: int, stop: int) -> Generator[Given | NotGiven]:
        """Yields what is given for chunks ``first`` to ``stop - 1``, and what is not: the last of it without gaps.

        Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest.
        """
        runs = [(at, min(stop, at + FILES_MAX)) for at in range(first, stop, FILES_MAX)]
        if not runs:
            return
        self._want(*runs[0])
        for following in (*runs[1:], None):
            self._ahead, is_whole = self._answers()
            if is_whole and following is not None:
                self._want(*following)  # the worker looks these up while the others are being read
            while self._ahead:
                yield self._ahead.pop(0)
            if not is_whole:
                return

    def finish(self, count: int, *, keep: bool = False) -> None:
        """Tells the worker how many leading chunks were read, and whether slots are still being read after this."""
        if self._asked is not None:
            _close(self._answers()[0])
        self._link.channel.send(Kind.READ, self._number, [encode_span(KEEP if keep else 0, count)])
        if self._lease is not None and not keep:
            self._lease.close()

    def _want(self, start: int, stop: int) -> None:
        self._asked = (start, stop)
        self._link.channel.send(Kind.WANT, self._number, [encode_span(start, stop - start)])

    def _answers(self) -> tuple[list[Given | NotGiven], bool]:
        """Returns the worker's answers about the requested run, and whether more may be requested."""
        assert self._asked is not None
        (at, stop), self._asked = self._asked, None
        found: list[Given | NotGiven] = []
        try:
            while at < stop:
                found.append(self._answer(at, stop))
                at += found[-1].count
                if isinstance(found[-1], NotGiven) and not self._has_gaps:
                    return found, False
        except BaseException:
            _close(found)
            raise
        return found, True

    def _answer(self, at: int, stop: int) -> Given | NotGiven:
        """Reads one frame: chunks from ``at`` on, not beyond ``stop``."""
        link = self._link
        head, payload = link.receive(*self._kinds)
        given: Given | NotGiven
        if head.kind is Kind.SLOTS:
            if link.memory is None:
                raise link.channel.break_off("the worker offered slots, but has no memory tier")
            if self._lease is None:
                self._lease = Lease(link.channel.take_files(1)[0], link.memory.leases)
            said = decode_slots(payload)
            first, given = said.first, GivenSlots(said.first, said.offsets, self._lease)
        elif head.kind is not Kind.FILES:
            first, count = decode_span(payload)
            given = NotGiven(first, count, head.kind is Kind.ELSEWHERE)
        else:
            first, count = decode_span(payload)
            given = GivenFiles(first, link.channel.take_files(count))
        if first != at or not 1 <= given.count <= stop - at:
            _close([given])
            raise link.channel.break_off(
                f"{given.count} chunks from {first} on were offered: expected up to {stop - at} from {at} on"
            )
        return given


def _close(given: Sequence[Given | NotGiven]) -> None:
    for each in given:
        if isinstance(each, GivenFiles):
            each.close()
