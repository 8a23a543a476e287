"""Sizes on the wire, and the channel options that follow; both ends use the same. The .proto states them to others."""

from __future__ import annotations

from typing import Any

from kvstore.core.address import TOKENS_MAX

SERVICE = "kvstore.v1.KVStore"
CONTROL = "kvstore.v1.Control"

MESSAGE_BYTES_MAX = 4 << 20
"""Limit of a message of data: the default receive limit of gRPC in every language."""

DATA_BYTES = (2 << 20) + (64 << 10)
"""Data in one message: 2 MiB of sections and their header. The fastest on loopback among 256 KiB to 4 MiB."""

REQUEST_BYTES_MAX = 4 * TOKENS_MAX + (1 << 20)
"""Limit of a request: the tokens of the longest prompt, and some room."""

BLOCKS_MAX = 65_536
BLOCK_BYTES_MAX = 1 << 30
DESCENTS_BYTES_MAX = 8 << 20
"""Limit of what one put says of the descent of its blocks."""

_BOTH = [
    # Notices a peer that vanished silently within 15 s, also while nothing is being sent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # With it, two workers on one port would each get a part of the calls. Without it, the second fails.
    ("grpc.so_reuseport", 0),
    # A connection whose peer is silent keeps a file descriptor that the root needs.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Also the time that one attempt to connect may take: a dead host must not use up a call's deadline.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A name is looked up again this soon, not after 30 s: a worker may be restarted at another address.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Each channel has a connection of its own, so that closing one store cannot disturb another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Traffic inside a cluster never wants a proxy from the environment, and a library reads no environment.
    ("grpc.enable_http_proxy", 0),
]


def method(name: str) -> str:
    """Returns the path of a call of the service, or of the control service: ``Control.Lookup``."""
    service, _, call = name.rpartition(".")
    return f"/{CONTROL if service else SERVICE}/{call}"
