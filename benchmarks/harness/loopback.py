"""The baseline of every path over TCP: bare bytes over loopback, between two processes, into existing memory.

Nothing is named, verified or kept. The other process is this module as a program: it receives bytes, and sends them
back when asked to.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress

import numpy as np

from benchmarks.harness.load import Bytes, poison
from kvstore.core.buffers import aligned

TAKE, GIVE, DONE = b"t", b"g", b"d"
PATIENCE_S = 60.0


class Loopback:
    """The other process and the connection to it. ``size_bytes`` are moved by each call."""

    def __init__(self, size_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE_S)
            command = [
                sys.executable,
                "-m",
                "benchmarks.harness.loopback",
                str(listener.getsockname()[1]),
                str(size_bytes),
            ]
            self._other = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for this process alone
            self._socket = _set(listener.accept()[0])
            self._socket.settimeout(PATIENCE_S)

    def put(self, source: Bytes) -> None:
        """Sends it; returns when the other process has all of it."""
        self._socket.sendall(TAKE)
        self._socket.sendall(source.reshape(-1).data)
        if self._socket.recv(1) != DONE:
            raise ConnectionError("the other end of the loopback went away")

    def read(self, target: Bytes) -> None:
        """Reads what was put last into ``target``."""
        self._socket.sendall(GIVE)
        _receive(self._socket, target)

    def close(self) -> None:
        """Ends the other process."""
        self._socket.close()
        try:
            self._other.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._other.kill()
            self._other.wait()


def _set(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return sock


def _receive(sock: socket.socket, memory: Bytes) -> None:
    left = memory.reshape(-1).data
    while len(left):
        count = sock.recv_into(left)
        if not count:
            raise ConnectionError("the other end of the loopback went away")
        left = left[count:]


def main() -> None:
    """Serves one connection until it is closed, however long it is between two calls."""
    port, size_bytes = map(int, sys.argv[1:])
    memory = np.frombuffer(aligned(size_bytes), np.uint8)
    poison(memory)
    with suppress(ConnectionError), _set(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as sock:
        while asked := sock.recv(1):
            if asked == TAKE:
                _receive(sock, memory)
                sock.sendall(DONE)
            else:
                sock.sendall(memory.data)


if __name__ == "__main__":
    main()
