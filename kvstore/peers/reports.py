"""Reports of what peers have in memory: digests, their directory, and this node's own report."""

from __future__ import annotations

import logging
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.clock import Clock
from kvstore.core.executor import Decision, Loop
from kvstore.core.metrics import Counters, NodeCount
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.header import checksum
from kvstore.meta.keys import SessionId
from kvstore.meta.session import Session
from kvstore.meta.workers import SHARDS, AddressTold, Digests, DigestTold, WorkerRecord
from kvstore.peers.limits import STEP_BYTES_MAX, PeerLimits

# A digest: the sorted 32-bit prints of a peer's chunks in memory, for one shard of the addresses, as one key's value.
#
#   offset  size
#        0     2  version: 1
#        2     2  zero
#        4     4  count of prints in this digest
#        8     4  count of chunks in the shard, which may be more
#       12        zlib of four planes: byte 0 of the gap before each print, then byte 1 of each, byte 2, byte 3
#
# All little-endian. The print of an address is its bytes 4 to 7, its shard the first six bits. The planes of the gaps
# take 2.5 to 3.4 bytes a print; the prints as they are, 4.


VERSION = 1
DIGEST_BYTES_MAX = 64 << 10
PRINTS_MAX = 16_000
"""Prints in one digest: even random planes then stay under DIGEST_BYTES_MAX. Chunks beyond it are not reported."""
_HEADER = struct.Struct("<HHII")
_LEVEL = 1

Prints = npt.NDArray[np.uint32]
Spots = npt.NDArray[np.uint64]
"""Shard (6 bits) and print (32 bits) of addresses, as one number: ``shard << 32 | print``."""


def encode(prints: Prints) -> bytes:
    """Encodes sorted prints as a digest, at most DIGEST_BYTES_MAX; empty for none."""
    if not len(prints):
        return b""
    encoded = prints[:PRINTS_MAX].astype("<u4", copy=False)
    gaps = np.diff(encoded, prepend=np.uint32(0)).astype("<u4", copy=False)
    planes = gaps.view(np.uint8).reshape(-1, 4).T.tobytes()
    return _HEADER.pack(VERSION, 0, len(encoded), len(prints)) + zlib.compress(planes, _LEVEL)


def decode(value: bytes) -> Prints:
    """Decodes a digest. Raises InvalidRequest for anything else, before it takes more memory than a digest may."""
    if not _HEADER.size <= len(value) <= DIGEST_BYTES_MAX:
        raise InvalidRequest(f"a digest has {len(value)} bytes: expected {_HEADER.size} to {DIGEST_BYTES_MAX}")
    version, _, count, _ = _HEADER.unpack_from(value)
    if version != VERSION or not 0 < count <= PRINTS_MAX:
        raise InvalidRequest(
            f"a digest of version {version} has {count} prints: expected version 1, at most {PRINTS_MAX}"
        )
    inflating = zlib.decompressobj()
    try:
        planes = inflating.decompress(memoryview(value)[_HEADER.size :], 4 * count + 1)
    except zlib.error as cause:
        raise InvalidRequest(f"a digest cannot be read: {cause}") from cause
    if len(planes) != 4 * count:
        raise InvalidRequest(f"a digest has {len(planes)} bytes of gaps: expected {4 * count}")
    gaps = np.frombuffer(planes, np.uint8).reshape(4, count).T.copy().view("<u4")[:, 0]
    prints = np.cumsum(gaps, dtype=np.uint64)
    if int(prints[-1]) >> 32:
        raise InvalidRequest("the prints of a digest are over 32 bits")
    return prints.astype(np.uint32)


def spots_of(addresses: Sequence[Address]) -> Spots:
    """Returns shard and print of each address."""
    raw = np.frombuffer(b"".join(addresses), np.uint8).reshape(-1, ADDRESS_BYTES)
    shards: Spots = (raw[:, 0] >> 2).astype(np.uint64)
    prints: Spots = raw.view("<u4")[:, 1].astype(np.uint64)
    return shards << np.uint64(32) | prints


# The reports of all peers: a sorted array that never changes, so that look-ups need no lock while a thread builds the
# next.
#
# One number for each print of each peer: shard (6 bits), print (32 bits) and peer (16 bits), the most significant
# first.


PEER_BITS = 16
PEERS_MAX = (1 << PEER_BITS) - 1
STEP_FIRST = 64
"""Chunks that are looked up first: most prompts end there, and the rest need no look-up."""
STEP = 4096
_PEER_BITS = np.uint64(PEER_BITS)
_PEER = np.uint64(PEERS_MAX)

Entries = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Directory:
    """Immutable. ``addresses`` maps each peer's number to the address where it serves."""

    entries: Entries
    addresses: Mapping[int, str]
    numbers: Mapping[str, int]

    def leading(self, chunks: Sequence[Address], first: int, aside: Collection[str] = ()) -> int:
        """Returns how many consecutive chunks from ``first`` on are reported by some peer that is not ``aside``."""
        if not len(self.entries):
            return 0
        without = np.array([self.numbers[each] for each in aside if each in self.numbers], np.uint64)
        at, step = first, STEP_FIRST
        while at < len(chunks):
            spots = spots_of(chunks[at : at + step])
            said = self._any_but(without, *self._spans(spots)) if len(without) else self._any(spots)
            if not said.all():
                return at + int(said.argmin()) - first
            at, step = at + step, STEP
        return len(chunks) - first

    def coverage(self, chunks: Sequence[Address]) -> dict[str, int]:
        """Returns the peers that report the first of ``chunks``, each with how many leading chunks it reports."""
        if not chunks or not self._any(spots_of(chunks[:1])).all():
            return {}
        starts, stops = self._spans(spots_of(chunks))
        covered: dict[int, int] = {}
        left: set[int] = set()
        for at, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            here = {int(entry & _PEER) for entry in self.entries[start:stop]}
            left = left & here if at else here
            if not left:
                break
            covered.update(dict.fromkeys(left, at + 1))
        return {self.addresses[number]: count for number, count in covered.items()}

    def _spans(self, spots: Spots) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        starts = np.searchsorted(self.entries, spots << _PEER_BITS)
        return starts, np.searchsorted(self.entries, (spots << _PEER_BITS) + _PEER, "right")

    def _any(self, spots: Spots) -> npt.NDArray[np.bool_]:
        """Returns for each spot whether it has a peer. Looks them up in order, so that most entries are cached."""
        if not len(self.entries):
            return np.zeros(len(spots), np.bool_)
        order = np.argsort(spots)
        ordered = spots[order]
        starts = np.searchsorted(self.entries, ordered << _PEER_BITS)
        found = np.empty(len(spots), np.bool_)
        found[order] = self.entries.take(starts, mode="clip") >> _PEER_BITS == ordered
        return found

    def _any_but(
        self, without: Entries, starts: npt.NDArray[np.intp], stops: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.bool_]:
        """Returns for each span whether it has a peer that is not among ``without``."""
        found = np.zeros(len(starts), np.bool_)
        for offset in range(int((stops - starts).max())):
            ats = starts + offset
            open_ = np.flatnonzero(~found & (ats < stops))
            if not len(open_):
                break
            found[open_] = ~np.isin(self.entries[ats[open_]] & _PEER, without)
        return found


EMPTY = Directory(np.zeros(0, np.uint64), {}, {})


# The peers' reports so far, kept by session: the directory is made from them.
#
# Used by one thread.


_SHARD_AT = np.uint64(32 + PEER_BITS)
_PRINT_AT = np.uint64(PEER_BITS)


@dataclass(slots=True)
class _Speaker:
    """One session of a peer."""

    address: str | None = None
    since: int = 0
    digests: dict[int, Prints] = field(default_factory=dict)


class PeerReports:
    """``own`` is this node's address. Reports from there are left out, also those of an earlier process."""

    def __init__(self, own: str | None, prints_max: int) -> None:
        self._own = own
        self._shard_max = max(1, prints_max // SHARDS)
        self._speakers: dict[SessionId, _Speaker] = {}
        self._elected: dict[str, _Speaker] = {}
        self._numbers: dict[str, int] = {}
        self._free = list(range(PEERS_MAX, -1, -1))
        self._shards: list[Entries] = [EMPTY.entries] * SHARDS
        self._changed: set[int] = set()
        self._moved = False

    @property
    def is_changed(self) -> bool:
        """True if the last directory is out of date."""
        return self._moved or bool(self._changed)

    def hear(self, news: AddressTold | DigestTold) -> None:
        """Takes in the value of a key. A digest that cannot be read counts as empty."""
        speaker = self._speakers.setdefault(news.session, _Speaker())
        if isinstance(news, AddressTold):
            speaker.address, speaker.since = news.address, news.since
            self._moved = True
        else:
            speaker.digests.pop(news.shard, None)
            if news.value is not None:
                with suppress(InvalidRequest):
                    speaker.digests[news.shard] = decode(news.value)
            self._changed.add(news.shard)
        if speaker.address is None and not speaker.digests:
            del self._speakers[news.session]

    def directory(self) -> Directory:
        """Returns the directory of all reports so far."""
        if self._moved:
            self._elect()
        for shard in self._changed:
            self._shards[shard] = self._gathered(shard)
        self._changed.clear()
        addresses = {number: address for address, number in self._numbers.items()}
        return Directory(np.concatenate(self._shards), addresses, dict(self._numbers))

    def _elect(self) -> None:
        """Elects the session that speaks for each address: the later one, if a restarted worker has two."""
        elected: dict[str, _Speaker] = {}
        for speaker in sorted(self._speakers.values(), key=lambda each: each.since):
            # Bulk connections to others go over TCP, which a worker that listens only on a unix socket does not offer.
            if speaker.address is not None and speaker.address != self._own and not speaker.address.startswith("unix:"):
                elected[speaker.address] = speaker
        for address in self._elected.keys() | elected.keys():
            before, after = self._elected.get(address), elected.get(address)
            if before is not after:
                self._changed |= {shard for each in (before, after) if each is not None for shard in each.digests}
                if after is None:
                    # The number is not reused before its shards are rebuilt: ``directory`` rebuilds them next.
                    self._free.append(self._numbers.pop(address))
                elif before is None and self._free:
                    self._numbers[address] = self._free.pop()
        self._elected = {address: each for address, each in elected.items() if address in self._numbers}
        self._moved = False

    def _gathered(self, shard: int) -> Entries:
        """Returns the entries of one shard; if there are too many, an equal share of each peer's."""
        said = [
            (self._numbers[address], each.digests[shard])
            for address, each in self._elected.items()
            if shard in each.digests
        ]
        if not said:
            return EMPTY.entries
        fits = sum(len(prints) for _, prints in said) <= self._shard_max
        share = self._shard_max if fits else self._shard_max // len(said)
        high = np.uint64(shard) << _SHARD_AT
        parts = [high | prints[:share].astype(np.uint64) << _PRINT_AT | np.uint64(number) for number, prints in said]
        entries = np.concatenate(parts)
        entries.sort()
        return entries


# Publishes what this node's memory holds: changed digests, seldom enough and small enough for etcd.
#
# Depends on the session: a new one publishes everything again, because the old keys go with their lease. It has a
# thread of its own, so that no call waits for etcd (rule P1). Every step is a method, for tests with a clock of their
# own.


log = logging.getLogger(__name__)

KEY_BYTES = 128
"""Bytes that a key and its envelope add to a digest, about."""
BURST_BYTES_MIN = DIGEST_BYTES_MAX + KEY_BYTES
"""After a quiet time, one second's share may be written in one burst, and never less than one digest."""
NOTHING = checksum(b"")
WITHDRAW_S = 1.0


class Source(Protocol):
    """The content to report: the memory of this node."""

    def changes(self) -> set[int]:
        """Returns the shards in which chunks came or went since the last call."""
        ...

    def prints(self, shard: int) -> npt.NDArray[np.uint32]: ...


class DigestPublisher:
    """Keeps etcd in step with ``source``, under the session that ``begin`` names, for the worker of ``record``.

    ``peers`` returns how many others there are, to share what etcd bears.
    """

    def __init__(
        self,
        digests: Digests,
        source: Source,
        record: WorkerRecord,
        limits: PeerLimits,
        counters: Counters,
        clock: Clock,
        peers: Callable[[], int],
    ) -> None:
        self._digests = digests
        self._source = source
        self._record = record
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._peers = peers
        self._changed = threading.Condition()  # guards the session that is published under
        self._session: Session | None = None
        self._loop = Loop("kvstore-peers-publish", self._changed, self._next)
        self._due_s = 0.0
        """Time (monotonic) of the next step, unless a session begins before."""
        # Only the thread uses the fields below.
        self._told_in: Session | None = None
        self._is_listed = False
        self._sums: dict[int, int] = {}
        self._due: dict[int, None] = {}
        self._room_bytes = float(BURST_BYTES_MIN)
        self._filled_s = clock.monotonic_s()

    def start(self) -> None:
        self._loop.start()

    def begin(self, session: Session) -> None:
        """Publishes under ``session`` from now on."""
        with self._changed:
            self._session, self._due_s = session, 0.0  # its peers know nothing yet
            self._changed.notify_all()

    def end(self, session: Session) -> None:
        """Notes that the session is over, and with it all that was published."""
        with self._changed:
            if self._session is session:
                self._session = None

    def step(self) -> None:
        """Publishes what is due, as far as the rate allows."""
        self._due |= dict.fromkeys(sorted(self._source.changes()))
        session = self._session
        if session is None:
            return
        if session is not self._told_in:
            self._told_in, self._is_listed = session, False
            self._sums, self._due = {}, dict.fromkeys(range(SHARDS))
        values, sums = self._chosen()
        while values or not self._is_listed:
            if not self._publish(session, values):
                self._due = dict.fromkeys(values) | self._due
                break
            self._sums |= sums
            values, sums = self._chosen()

    def close(self, timeout_s: float) -> None:
        """Asks others to read no more from here, and ends the thread. Idempotent."""
        already = self._loop.closed
        self._loop.close(timeout_s)
        session = self._session
        if already or session is None or not session.alive:
            return
        try:
            self._digests.withdraw(session, min(WITHDRAW_S, timeout_s))
        except KVStoreError:
            pass  # it goes with the session

    def _chosen(self) -> tuple[dict[int, bytes], dict[int, int]]:
        """Returns the digests to write now, oldest change first, and their sums; unchanged ones are no longer due."""
        now_s, rate = self._clock.monotonic_s(), self._limits.rate_bytes_per_s(self._peers())
        room = self._room_bytes + (now_s - self._filled_s) * rate
        room, self._filled_s = min(room, max(rate, BURST_BYTES_MIN)), now_s
        values: dict[int, bytes] = {}
        sums: dict[int, int] = {}
        left = STEP_BYTES_MAX
        for shard in list(self._due):
            value = encode(self._source.prints(shard))
            total = checksum(value)
            if total != self._sums.get(shard, NOTHING):
                size = len(value) + KEY_BYTES
                if size > min(room, left):
                    break
                room, left = room - size, left - size
                values[shard], sums[shard] = value, total
            del self._due[shard]
        self._room_bytes = room
        return values, sums

    def _publish(self, session: Session, values: dict[int, bytes]) -> bool:
        """Writes digests; False if they have to be written again."""
        try:
            record = None if self._is_listed else self._record
            self._digests.publish(session, values, record, self._limits.meta_deadline_s)
        except KVStoreError as error:
            # The write may have succeeded despite the error: reading the same digest twice does no harm.
            log.debug("peers.not_published %s", error)
            return False
        self._is_listed = True
        self._counters.add(NodeCount.PEERS_SYNCS)
        self._counters.add(NodeCount.PEERS_DIGESTS, len(values))
        self._counters.add(NodeCount.PEERS_DIGEST_BYTES, sum(map(len, values.values())))
        return True

    def _next(self) -> Decision:
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return self._due_s - now_s
        self._due_s = now_s + self._limits.sync_interval_s
        return self.step
