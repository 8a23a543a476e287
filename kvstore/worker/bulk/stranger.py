"""A connection before its grant is proved and, over TCP, before its TLS handshake is done.

Separate from the listener, which has many of these and one thread: nothing here waits.
"""

from __future__ import annotations

import hashlib
import socket
import ssl

from kvstore.wire.bulk.frames import HEAD_BYTES
from kvstore.wire.bulk.grants import HELLO_BYTES

GREETING_BYTES = HEAD_BYTES + HELLO_BYTES


class Stranger:
    """One such connection. Used by the listening thread alone. ``socket`` never blocks; the listener closes it."""

    def __init__(self, sock: socket.socket, ends_s: float) -> None:
        self.socket = sock
        self.ends_s = ends_s
        """Time at which it is closed."""
        self._said = bytearray()
        self._shakes_hands = isinstance(sock, ssl.SSLSocket)

    @property
    def thumbprint(self) -> bytes:
        """Thumbprint of the client's certificate; empty without TLS or if none was asked for."""
        shown = self.socket.getpeercert(binary_form=True) if isinstance(self.socket, ssl.SSLSocket) else None
        return hashlib.sha256(shown).digest() if shown else b""

    def hear(self) -> bytes | None:
        """Returns the greeting once it is complete, empty if none will come, None if more bytes are needed."""
        try:
            if self._shakes_hands and isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
                self._shakes_hands = False
            said = self.socket.recv(GREETING_BYTES - len(self._said))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return b""
        self._said += said
        if said and len(self._said) < GREETING_BYTES:
            return None
        return bytes(self._said) if said else b""
