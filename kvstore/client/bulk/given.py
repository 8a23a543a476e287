"""What a worker on this host gives for a run of chunks: where they lie in its memory, or their open files.

Asked for one run ahead, so that the worker looks for the next chunks while these are being read.
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
"""What READ says first where slots are read on after it."""


@dataclass(frozen=True, slots=True)
class GivenSlots:
    """Chunks from index ``first`` on whose images are at these offsets of the worker's memory while ``lease`` lives."""

    first: int
    offsets: Sequence[int]
    lease: Lease

    @property
    def count(self) -> int:
        """How many."""
        return len(self.offsets)


@dataclass(slots=True)
class GivenFiles:
    """Chunks from index ``first`` on, by their open files, which are the taker's to close."""

    first: int
    files: list[int]

    @property
    def count(self) -> int:
        """How many."""
        return len(self.files)

    def close(self) -> None:
        """Closes those that are left. Idempotent."""
        while self.files:
            with suppress(OSError):
                os.close(self.files.pop())


@dataclass(frozen=True, slots=True)
class NotGiven:
    """Chunks from index ``first`` on that are not there, or ``is_elsewhere``: only to be had as bytes."""

    first: int
    count: int
    is_elsewhere: bool


Given = GivenSlots | GivenFiles


class Giving:
    """One request of mode FILES or SLOTS; a GET after its START. A context: what was given and not taken is closed at
    its end.
    """

    def __init__(self, link: Link, number: int, mode: Mode, *, has_gaps: bool = False) -> None:
        """With ``has_gaps`` it is about blocks: what is not there ends nothing."""
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
                self._want(*following)  # looked for while these are being read
            while self._ahead:
                yield self._ahead.pop(0)
            if not is_whole:
                return

    def finish(self, count: int, *, keep: bool = False) -> None:
        """Says how many leading chunks of the prompt were read, and whether slots are still being read after this."""
        if self._asked is not None:
            _close(self._answers()[0])
        self._link.channel.send(Kind.READ, self._number, [encode_span(KEEP if keep else 0, count)])
        if self._lease is not None and not keep:
            self._lease.close()

    def _want(self, start: int, stop: int) -> None:
        self._asked = (start, stop)
        self._link.channel.send(Kind.WANT, self._number, [encode_span(start, stop - start)])

    def _answers(self) -> tuple[list[Given | NotGiven], bool]:
        """All that is said of the run that was asked for, and whether more may be asked for."""
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
        """One frame: chunks from ``at`` on, not beyond ``stop``."""
        link = self._link
        head, payload = link.receive(*self._kinds)
        given: Given | NotGiven
        if head.kind is Kind.SLOTS:
            if link.memory is None:
                raise link.channel.break_off("slots came, and the worker said that it has no memory")
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
                f"{given.count} chunks from {first} on came: expected up to {stop - at} from {at} on"
            )
        return given


def _close(given: Sequence[Given | NotGiven]) -> None:
    for each in given:
        if isinstance(each, GivenFiles):
            each.close()
