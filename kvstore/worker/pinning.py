"""The calls about pins, each checked against the permission and the quota of the pinned tenant.

Separate from the other calls, because a pin is named by its id alone: its tenant must be looked up.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.errors import InvalidRequest
from kvstore.node.member import Member
from kvstore.results import PinRecord
from kvstore.security.access import EVERY, OverQuota, Role
from kvstore.security.guard import Guard
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import pin_message, unpack_keys
from kvstore.worker.call import Call
from kvstore.worker.prompts import Prompts

PIN_TTL_S_MAX = 30 * 86_400


class PinCalls:
    """Serves Pin, Unpin, ListPins and CountRefs."""

    def __init__(self, member: Member, prompts: Prompts, guard: Guard) -> None:
        self._member = member
        self._prompts = prompts
        self._guard = guard

    def pin(self, request: pb.PinRequest, call: Call) -> pb.PinResponse:
        """Pins the longest stored prefix, or blocks."""
        if not 1 <= request.ttl_s <= PIN_TTL_S_MAX:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 1 to {PIN_TTL_S_MAX}")
        if request.keys:
            return pb.PinResponse(pin=pin_message(self._pin_blocks(request, call)))
        chain = self._prompts.chain(request.namespace, request.tokens, call)
        self._check_quota(chain.namespace.tenant, len(chain.tokens))
        return pb.PinResponse(pin=pin_message(self._member.pin(chain, request.ttl_s, request.owner)))

    def _pin_blocks(self, request: pb.PinRequest, call: Call) -> PinRecord:
        if request.tokens:
            raise InvalidRequest("a Pin has both keys of blocks and tokens: expected one of them")
        namespace, keys = self._prompts.namespace(request.namespace, call), unpack_keys(request.keys)
        self._check_quota(namespace.tenant, len(keys) * namespace.layout.chunk_tokens)
        return self._member.pin_blocks(namespace, keys, request.ttl_s, request.owner)

    def unpin(self, request: pb.UnpinRequest, call: Call) -> pb.UnpinResponse:
        """Ends a pin. One that etcd does not have may have left a twin, whose tenant nobody knows."""
        if not call.may(Role.WRITE, EVERY):
            pin = self._member.find_pin(request.id)
            if pin is None:
                return pb.UnpinResponse(found=False)
            call.allow(pin.tenant, pin.namespace)
        else:
            call.allow_every()
        return pb.UnpinResponse(found=self._member.unpin(request.id))

    def list(self, _: pb.ListPinsRequest, call: Call) -> Iterator[bytes]:
        """Yields all live pins that the caller may see."""
        for pin in self._member.pins():
            if call.may_see(pin.tenant):
                yield pb.ListPinsResponse(pin=pin_message(pin)).SerializeToString()

    def count_refs(self, request: pb.CountRefsRequest, call: Call) -> pb.CountRefsResponse:
        """Counts the live pins that cover all full chunks of a prompt."""
        chain = self._prompts.chain(request.namespace, request.tokens, call)
        return pb.CountRefsResponse(refs=self._member.refcount(chain))

    def _check_quota(self, tenant: str, tokens: int) -> None:
        """Raises OverQuota. Two workers that pin at once for a tenant may both find room for the last one."""
        quota = self._guard.quota(tenant)
        if quota.pins_max is None and quota.pinned_tokens_max is None:
            return
        pins = [pin for pin in self._member.pins() if pin.tenant == tenant]
        pinned = sum(pin.tokens for pin in pins)
        why = None
        if quota.pins_max is not None and len(pins) >= quota.pins_max:
            why = f"has {len(pins)} pins, and may have {quota.pins_max}"
        elif quota.pinned_tokens_max is not None and pinned + tokens > quota.pinned_tokens_max:
            why = f"has {pinned} tokens pinned, and may have {quota.pinned_tokens_max}"
        if why is not None:
            self._guard.over_quota("pins")
            raise OverQuota("pins", f"tenant {tenant!r} {why}: unpin some, or ask the operator for a higher quota")
