"""One bulk connection to a worker, and the memory that it shares with it. Used by one call at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

import grpc

from kvstore.client.bulk.arena import ARENA_BYTES_MIN, Arena, Ledger
from kvstore.client.bulk.memory import WorkerMemory
from kvstore.client.bulk.shortage import Shortage
from kvstore.counts import ClientCount, Counts
from kvstore.root.mounts import MEMORY_FILE_SYSTEMS, file_system_type
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Head, Kind, Mode, encode_arena
from kvstore.wire.messages import parse
from kvstore.wire.statuses import Failure, failure

NUMBER_MAX = 1 << 31
"""Requests per connection, before it is replaced: request numbers must not run out."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class BulkRefused(Exception):
    """A worker refused a request on a bulk connection; carries the error to raise."""

    def __init__(self, failed: Failure) -> None:
        super().__init__(str(failed.error))
        self.failed = failed


class Link:
    """One connection and its arena. Used by one call at a time."""

    def __init__(
        self,
        channel: Channel,
        hands_files: bool,
        ledger: Ledger | None,
        memory: WorkerMemory | None,
        address: str,
        shortage: Shortage | None = None,
    ) -> None:
        self.channel = channel
        self.shortage = shortage or Shortage(Counts(ClientCount))
        self.hands_files = hands_files
        self.memory = memory
        """The worker's memory, mapped; None if it has none or is on another host."""
        self.arena: Arena | None = None
        self.arena_bytes = 0
        """Bytes reserved for the arena, which may not exist yet (``Links.reserve_arena``)."""
        self.address = address
        self._ledger = ledger
        self._number = 0
        self._never_blocks: dict[int, bool] = {}
        self.credentials_version = 0
        """Version of the credentials with which this connection was made."""

    @property
    def is_shared(self) -> bool:
        """True if the worker is on this host and shares memory and files with it."""
        return self.channel.is_unix

    @property
    def mode(self) -> Mode:
        """The best mode for reads on this connection. All but the stream need file descriptors of this process."""
        if self.shortage.is_on or (self.memory is None and not self.hands_files):
            return Mode.STREAM
        return Mode.FILES if self.memory is None else Mode.SLOTS

    @property
    def is_usable(self) -> bool:
        """True if another request can be sent."""
        return self.channel.alive and self._number < NUMBER_MAX

    def next_number(self) -> int:
        """Returns the number for a new request."""
        self._number += 1
        return self._number

    def receive(self, *kinds: Kind) -> tuple[Head, bytes]:
        """The next frame, one of ``kinds``. Raises BulkRefused where the worker refuses."""
        head = self.receive_head(*kinds)
        return head, self.channel.receive(head.length)

    def receive_head(self, *kinds: Kind) -> Head:
        """The head of the next frame, one of ``kinds``. Raises BulkRefused where the worker refuses."""
        head = self.channel.receive_head()
        if head.kind is Kind.REFUSED:  # the worker closes the connection after it
            refused = self.refusal_in(self.channel.receive(head.length))
            self.channel.alive = False
            raise refused
        self.channel.expect(head, *kinds)
        return head

    def refusal_in(self, payload: bytes) -> BulkRefused:
        """Returns the error that a REFUSED frame carries."""
        refusal = parse(pb.BulkRefusal, payload)
        code = _CODES.get(refusal.code, grpc.StatusCode.UNKNOWN)
        return BulkRefused(failure(code, refusal.message, list(refusal.trailers.items()), self.address))

    def share(self, size_bytes: int, reserve: Callable[[int], int]) -> None:
        """Makes an arena that holds ``size_bytes`` twice, or as much as can be had.

        ``reserve(bytes)`` returns how many of those bytes the arena may have.
        """
        arena, ledger = self.arena, self._ledger
        if ledger is None or (arena is not None and (arena.size_bytes >= size_bytes or not arena.is_free)):
            return
        # Twice, so that one put is copied while the one before is being written.
        size = arena.size_bytes if arena else 0
        wanted = reserve(max(ARENA_BYTES_MIN, 2 << (size_bytes - 1).bit_length()))
        if wanted <= size:
            return
        try:
            new = Arena(wanted, ledger)
        except (OSError, MemoryError) as error:
            self.shortage.note(error)
            reserve(size)
            return
        if arena is not None:
            arena.close()
        self.arena = new
        self.channel.send(Kind.ARENA, 0, [encode_arena(wanted)], [new.fd])

    def never_blocks(self, fd: int) -> bool:
        """True if reading this file never waits for a device."""
        device = os.fstat(fd).st_dev
        known = self._never_blocks.get(device)
        if known is None:
            known = self._never_blocks[device] = file_system_type(f"/proc/self/fd/{fd}") in MEMORY_FILE_SYSTEMS
        return known

    def close(self) -> None:
        """Closes connection and arena. Idempotent."""
        self.channel.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.memory = None  # views hold their own reference to the mapping
