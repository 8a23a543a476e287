"""Makes the sockets of the bulk protocol at both ends, as no other module does. TLS wraps those between hosts."""

from __future__ import annotations

import os
import socket

BACKLOG = 128


def listen_unix(path: str) -> socket.socket:
    """Returns a listening unix socket at ``path``, for this user alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_tcp(host: str, port: int) -> socket.socket:
    """Returns a listening TCP socket. The system chooses port 0; ``host`` may have brackets. Raises OSError."""
    host = host.removeprefix("[").removesuffix("]")
    host = "0.0.0.0" if host == "*" else host
    is_v6 = ":" in host
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    listener.setblocking(False)
    return listener


def dial_unix(path: str, timeout_s: float) -> socket.socket:
    """Connects to a worker on this host. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects to a worker. Raises OSError."""
    return socket.create_connection((host.removeprefix("[").removesuffix("]"), port), timeout_s)
