"""Lookup: the places of a prompt's chunks, as messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.address import Chain
from kvstore.errors import KVStoreError
from kvstore.format.header import Encoding
from kvstore.node.lanes import Deadline
from kvstore.node.looking import ChunkPlace, RootCopy
from kvstore.node.member import Member
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.messages import hints_message
from kvstore.worker.call import CallContext
from kvstore.worker.calls import seconds_left


def lookup(member: Member, chain: Chain, context: CallContext) -> Iterator[bytes]:
    """Yields the encoded messages of one answer. Raises what the root raised; without etcd pins are left out."""
    node = member.node
    deadline = Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s))
    try:
        pins: Sequence[int] | None = member.pins_of(chain)
    except KVStoreError:
        pins = None
    for places in node.looking.places(chain, deadline):
        yield pb.LookupResponse(
            chunks=[_message(place, None if pins is None else pins[place.index]) for place in places]
        ).SerializeToString()


def _message(place: ChunkPlace, pins: int | None) -> pb.ChunkPlace:
    memory = place.memory
    return pb.ChunkPlace(
        index=place.index,
        address=place.address,
        root=None if place.root is None else _root_message(place.root),
        memory=None
        if memory is None
        else pb.MemoryCopy(bytes=memory.size_bytes, dirty=memory.is_dirty, users=memory.users_count),
        disk=place.on_disk,
        peers=place.peers,
        pins=pins,
    )


def _root_message(copy: RootCopy) -> pb.RootCopy:
    by = copy.lineage
    lineage = None
    if by is not None:
        lineage = pb.Lineage(
            written_s=by.written_s,
            session=by.session,
            node=by.node,
            host=by.host,
            version=by.version,
            label=by.label,
        )
    return pb.RootCopy(
        bytes=copy.size_bytes,
        last_use_s=copy.last_use_s,
        uses=copy.uses,
        hints=hints_message(copy.hints),
        compressed=Encoding.COMPRESSED in copy.encoding,
        encrypted=Encoding.ENCRYPTED in copy.encoding,
        key_id=copy.key_id,
        lineage=lineage,
        condemned=copy.is_condemned,
    )
