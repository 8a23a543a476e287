"""Bytes of the bulk protocol over TLS, which handles one record at a time, not pieces or several buffers.

Separate from the channel, which sends and receives in the same way over TLS and without.
"""

from __future__ import annotations

import ssl

from kvstore.buffers import Pieces, skip

RECORD_BYTES = 1 << 14
"""Most bytes of one record."""


def send_records(sock: ssl.SSLSocket, pieces: Pieces, bytes_max: int) -> int:
    """Sends as many records as it can, at least one, and about ``bytes_max``; returns how many bytes.

    Raises SSLWantReadError or SSLWantWriteError if it can send nothing: then the same pieces must come again.
    """
    sent = 0
    while sent < bytes_max and pieces:
        try:
            count = sock.send(_record(pieces, bytes_max))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if sent:
                break
            raise
        sent += count
        pieces = skip(pieces, count)
    return sent


def receive_records(sock: ssl.SSLSocket, pieces: Pieces, bytes_max: int) -> int:
    """Fills ``pieces`` with available bytes, at least one, and about ``bytes_max``; returns how many, 0 at the end.

    Raises SSLWantReadError or SSLWantWriteError if nothing is there yet.
    """
    came = 0
    for piece in pieces:
        at = 0
        while at < len(piece) and came < bytes_max:
            try:
                count = sock.recv_into(piece[at:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if came:
                    return came
                raise
            if not count:
                return came
            at += count
            came += count
    return came


def _record(pieces: Pieces, bytes_max: int) -> bytes | memoryview:
    """Returns the first bytes, for one call. Joins small pieces: else each would be a record of its own."""
    first = next(at for at, piece in enumerate(pieces) if len(piece))
    if len(pieces[first]) >= RECORD_BYTES:
        return pieces[first][:bytes_max]
    joined: list[memoryview] = []
    left = RECORD_BYTES
    for piece in pieces[first:]:
        joined.append(piece[:left])
        left -= len(joined[-1])
        if not left:
            break
    return b"".join(joined)
