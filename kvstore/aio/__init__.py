"""The store for programs with asyncio: the names of ``kvstore``, each call awaited.

    async with kvstore.aio.connect("127.0.0.1:8100") as store:
        cache = await store.namespace("llama", layout)
        async with cache.hold(tokens) as hold:
            async for layer, k, v in hold.layers():
                ...

Calls run on a few threads of the store (``threads``). A call that is cancelled ends first: see ``Threads.run``.
"""

from kvstore.aio.store import (
    BlockCache,
    BlockHold,
    Cache,
    Control,
    Held,
    Hold,
    Operation,
    Pin,
    Plan,
    Run,
    Segments,
    Store,
    connect,
    open,
)

__all__ = [
    "BlockCache",
    "BlockHold",
    "Cache",
    "Control",
    "Held",
    "Hold",
    "Operation",
    "Pin",
    "Plan",
    "Run",
    "Segments",
    "Store",
    "connect",
    "open",
]
