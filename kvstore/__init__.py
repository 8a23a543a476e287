"""kvstore: a distributed store for the KV caches of LLM inference.

``open`` makes this process a node of its own; ``connect`` goes through a worker.  Both give the same ``Store``:

    import kvstore

    layout = kvstore.Layout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=256)
    with kvstore.open("/data/kv") as store:  # or kvstore.connect("10.0.0.7:7070")
        cache = store.namespace("llama-3.1-8b", layout, fingerprint="sha256 of the weights")
        cache.put(tokens, kv)  # kv: (layers, 2, len(tokens), kv_heads, head_dim)
        count, kv = cache.get(tokens)  # the longest stored prefix, every byte verified

``kvstore.errors`` has the errors, all of them a ``KVStoreError``.  A miss is a value, never an error.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore.version import VERSION

if TYPE_CHECKING:
    from kvstore.batch import Group, Plan, Run
    from kvstore.census.selection import Selection
    from kvstore.client.cache import BlockCache, BlockHold, Cache, Hold, Pin
    from kvstore.client.limits import ClientLimits
    from kvstore.client.local import open
    from kvstore.client.operation import Operation
    from kvstore.client.store import Store, connect
    from kvstore.core.layout import Layout
    from kvstore.core.namespace import Namespace
    from kvstore.core.recency import Hints
    from kvstore.core.results import Cleared, PinRecord, PutResult, StoredBlocks
    from kvstore.core.write_mode import WriteMode
    from kvstore.engine.settings import Limits
    from kvstore.format.header import Descent
    from kvstore.meta.etcd import EtcdTls, EtcdUser
    from kvstore.security.tls import ClientTls
    from kvstore.segments import Held, Segments

# A process that uses kvstore may fork: an engine for its workers, say. By default gRPC's C library then runs handlers
# of its own in parent and child. They start threads in the child and use connections that it shares with its parent:
# the child hangs or is aborted inside fork, and calls of the parent break. Python's part of gRPC has them off by
# default. gRPC reads this once, when it is imported, so it is set before that; a setting made elsewhere stays.
# Without them gRPC does not work in a child of a process that had connected: kvstore/core/grpc_channels.py says so
# there.
if "grpc" not in sys.modules:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = VERSION
__all__ = [
    "BlockCache",
    "BlockHold",
    "Cache",
    "Cleared",
    "ClientLimits",
    "ClientTls",
    "Descent",
    "EtcdTls",
    "EtcdUser",
    "Group",
    "Held",
    "Hints",
    "Hold",
    "Layout",
    "Limits",
    "Namespace",
    "Operation",
    "Pin",
    "PinRecord",
    "Plan",
    "PutResult",
    "Run",
    "Segments",
    "Selection",
    "Store",
    "StoredBlocks",
    "WriteMode",
    "__version__",
    "connect",
    "errors",
    "open",
]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every name, typos too
    _PLACES = {
        "kvstore.census.selection": ("Selection",),
        "kvstore.client.cache": ("BlockCache", "BlockHold", "Cache", "Hold", "Pin"),
        "kvstore.client.limits": ("ClientLimits",),
        "kvstore.client.local": ("open",),
        "kvstore.client.store": ("Store", "connect"),
        "kvstore.client.operation": ("Operation",),
        "kvstore.format.header": ("Descent",),
        "kvstore.core.recency": ("Hints",),
        "kvstore.core.layout": ("Layout",),
        "kvstore.meta.etcd": ("EtcdTls", "EtcdUser"),
        "kvstore.core.namespace": ("Namespace",),
        "kvstore.engine.settings": ("Limits",),
        "kvstore.batch": ("Group", "Plan", "Run"),
        "kvstore.core.results": ("Cleared", "PinRecord", "PutResult", "StoredBlocks"),
        "kvstore.security.tls": ("ClientTls",),
        "kvstore.segments": ("Held", "Segments"),
        "kvstore.core.write_mode": ("WriteMode",),
    }
    """The names that are imported on first use, by their modules."""

    def __dir__():
        return __all__

    def __getattr__(name):
        from importlib import import_module

        if name in ("aio", "segments"):
            return import_module(f"kvstore.{name}")
        # Lazily: importing the package (for a layout, say) costs no gRPC, and for the command line not even numpy.
        for place, names in _PLACES.items():
            if name in names:
                return getattr(import_module(place), name)
        hint = f": it is kvstore.errors.{name}" if isinstance(getattr(errors, name, None), type) else ""
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}{hint}")
