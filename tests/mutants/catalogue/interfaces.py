"""The interfaces at which mutants are planted, and the planters.

A redesign changes the places here, and leaves the catalogue as it is. No place and no method is private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.mutants.planters import Planter, Target, Wrap, several

Behaviour = Callable[..., Any]
"""Called with the real function first, then with the arguments of the call; its result is the call's."""

ROOT = ("kvstore.root.posix:PosixRoot", "kvstore.root.memory:MemoryRoot", "kvstore.root.object_store:ObjectRoot")
OBJECT_DOUBLE = "tests.kit.object_root:MemoryObjectRoot"
READER = (
    "kvstore.root.posix:PosixReader",
    "kvstore.root.memory:MemoryReader",
    "kvstore.root.object_store:ObjectReader",
)
META = ("kvstore.meta.memory:MemoryMetadata", "kvstore.meta.etcd.client:EtcdMetadata")
WATCH = ("kvstore.meta.memory:MemoryWatch", "kvstore.meta.etcd.client:EtcdWatch")
MEMORY_STORE = "kvstore.meta.memory:MemoryStore"
SESSION = "kvstore.meta.session:Session"
PINS = "kvstore.meta.pins:Pins"
HOLDS = "kvstore.engine.gc_state:Holds"
VIEW = "kvstore.engine.gc_state:ClusterGcState"
GC_STATE = "kvstore.engine.gc_state:GcState"
KNOWN = "kvstore.engine.chunk_store:PresenceCache"
SWEEPER = "kvstore_gc.execute:Sweeper"
GRACE = "kvstore_gc.grace:Grace"
LEDGER = "kvstore_gc.ledger:SweepStore"
MEMORY_TIER = "kvstore.tiers.memory:MemoryTier"
INVENTORY = "kvstore.tiers.inventory:TierInventory"
CHANNEL = "kvstore.transport.channel:Channel"


def at(place: str | tuple[str, ...], name: str, behaviour: Behaviour) -> Planter:
    """A public function of a module, or a public method of one class or several, with another behaviour."""
    places = (place,) if isinstance(place, str) else place
    assert not any(part.startswith("_") for part in name.split(".")), name

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        # Not wraps(): a function of C, or a mock, has no attributes to copy.
        return functools.update_wrapper(lambda *args, **named: behaviour(real, *args, **named), real)

    parts = [Wrap(Target.of(f"{each}.{name}" if ":" in each else f"{each}:{name}"), make) for each in places]
    return parts[0] if len(parts) == 1 else several(*parts)


def giving(result: Any) -> Behaviour:
    """Does nothing, and returns ``result``."""
    return lambda real, *args, **named: result
