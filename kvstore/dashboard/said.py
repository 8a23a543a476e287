"""The rows of the documents: one JSON object for each thing that the page shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.dashboard.cluster import Cluster
from kvstore.dashboard.forest import Forest, Run, Sum
from kvstore.dashboard.rooted import RootSeen
from kvstore.format.places import NAMESPACE_ID_BYTES
from kvstore.meta.pins import PinRecord
from kvstore.namespace import Namespace, NamespaceId
from kvstore.operations import OperationStatus

Document = dict[str, Any]

TEXT_MAX = 128
"""Length to which a text is cut: somebody chose it, and it may have thousands of characters."""


def cluster(etcd: Cluster) -> Document:
    """The cluster in numbers."""
    return {
        "root": etcd.root.hex(),
        "engines": sum(each.worker is None for each in etcd.sessions),
        "sessions": len(etcd.sessions),
        "collectors": len(etcd.collectors),
        "namespaces": len(etcd.namespaces),
        "tenants": len({each.tenant for each in etcd.namespaces}),
        "pins": etcd.pins_count,
        "sweeps": len(etcd.sweeps),
        "is_full": etcd.is_full,
        "used_bytes": etcd.capacity.used_bytes if etcd.capacity else None,
        "capacity_bytes": etcd.capacity.capacity_bytes if etcd.capacity else None,
    }


def space(root: RootSeen | None) -> Document | None:
    """The room of the root; None if it is not known."""
    if root is None:
        return None
    return {
        "url": root.url,
        "root": root.identity.root.hex(),
        "shard_bits": root.identity.shard_bits,
        "total_bytes": root.space.total_bytes,
        "free_bytes": root.space.free_bytes,
    }


def namespace(each: Namespace, stored: Mapping[str, Mapping[str, int]]) -> Document:
    """A namespace with what it has stored, where that was counted."""
    tally = stored.get(each.id.hex(), {})
    return {
        "id": each.id.hex(),
        "digest": each.digest.hex(),
        "name": each.name,
        "tenant": each.tenant,
        "fingerprint": _short(each.fingerprint),
        "attributes": {_short(key): _short(value) for key, value in each.attributes},
        "layout": each.layout.to_dict(),
        "chunks": tally.get("chunks"),
        "bytes": tally.get("bytes"),
    }


def name_of(id: NamespaceId, known: Mapping[NamespaceId, Namespace]) -> Document:
    """The name of a namespace; its id alone if the name is not known."""
    found = known.get(id)
    return {
        "id": id.hex(),
        "name": found.name if found else None,
        "tenant": found.tenant if found else None,
        "chunk_tokens": found.layout.chunk_tokens if found else None,
    }


def below(below: Sum) -> Document:
    """The chunks that continue a prefix, in sums."""
    return {
        "chunks": round(below.chunks),
        "bytes": round(below.size_bytes),
        "depth": below.depth_max,
        "ends": below.ends_count,
        "last_use_s": below.last_use_s,
        "uses": below.uses,
    }


def blocks(forest: Forest, id: NamespaceId) -> Document:
    """The engine-hashed blocks of a namespace."""
    count, size_bytes = forest.blocks.get(id, (0.0, 0.0))
    return {"count": round(count), "bytes": round(size_bytes)}


def run(run: Run, known: Mapping[NamespaceId, Namespace]) -> Document:
    """A run of the prefix tree."""
    return {
        "id": run.id.hex(),
        "above": run.above.hex() if run.above else None,
        "namespace": name_of(run.namespace, known),
        "first": run.first,
        "chunks": run.chunks,
        "bytes": run.size_bytes,
        "forks": run.forks,
        "last_use_s": run.last_use_s,
        "uses": run.uses,
        "rooted": run.is_rooted,
        "below": below(run.below),
    }


def operation(each: OperationStatus) -> Document:
    """An operation of a worker."""
    fields = ("id", "kind", "about", "identity", "tenant", "worker", "unit", "began_s", "done", "total", "message")
    return {**{name: getattr(each, name) for name in fields}, "state": each.state.value}


def pin(each: PinRecord, of: Namespace | None) -> Document:
    """A pin; ``of`` is its namespace, if that is known."""
    return {
        "id": each.id.hex(),
        "owner": each.owner,
        "namespace": of.name if of else None,
        "tenant": of.tenant if of else None,
        "namespace_id": each.namespace[:NAMESPACE_ID_BYTES].hex(),
        "tokens": each.tokens_count,
        "chunks": each.addresses_count,
        "ttl_s": each.ttl_s,
        "expires_s": each.expires_s,
    }


def _short(text: str) -> str:
    """A long text without its middle."""
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 33]}…{text[-32:]}"
