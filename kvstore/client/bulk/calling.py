"""Short calls over a bulk connection: a round trip takes 0.4 of the time that it takes over gRPC."""

from __future__ import annotations

import logging

from google.protobuf.message import Message

from kvstore.client.bulk.link import BulkRefused, Link
from kvstore.client.bulk.links import Links
from kvstore.errors import InvalidRequest
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import SHORT_CALLS, Kind, encode_request
from kvstore.wire.traces import traced

log = logging.getLogger(__name__)

_NUMBERS = {name: number for number, name in enumerate(SHORT_CALLS)}


def call_past_grpc(links: Links, name: str, message: Message, timeout_s: float) -> bytes | None:
    """Returns the answer to a call of SHORT_CALLS; None if no connection is at hand, or it breaks.

    Raises BulkRefused, LinkLate.
    """
    try:
        with links.link_at_hand() as link:
            if link is None:
                return None
            answer = _called(link, name, message, timeout_s)
    except (LinkBroken, InvalidRequest) as error:
        links.broke(error)
        return None
    if isinstance(answer, BulkRefused):
        raise answer
    return answer


def _called(link: Link, name: str, message: Message, timeout_s: float) -> bytes | BulkRefused:
    """Returns the answer, or a refusal, after which the connection goes on."""
    channel = link.channel
    channel.limit(timeout_s, timeout_s)
    channel.send(Kind.CALL, link.next_number(), [encode_request(timeout_s, _NUMBERS[name], traced(message))])
    head = channel.receive_head()
    channel.expect(head, Kind.ANSWER, Kind.REFUSED)
    payload = channel.receive(head.length)
    return link.refusal_in(payload) if head.kind is Kind.REFUSED else payload
