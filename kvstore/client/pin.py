"""A pin: what a cache and a block cache return for what they pinned."""

from __future__ import annotations

from kvstore.brief import brief, kind_of, shown
from kvstore.checks import is_unicode, number
from kvstore.client.port import Port
from kvstore.errors import InvalidRequest
from kvstore.results import PinRecord

PIN_TTL_S_MAX = 30 * 86_400


class Pin:
    """A leased refcount on a stored prefix; ends by ``release``, as a context, or with its lease."""

    def __init__(self, record: PinRecord, port: Port) -> None:
        self.record = record
        self._port = port

    @property
    def id(self) -> str:
        """The id for ``kvstore unpin``; empty if nothing was pinned."""
        return self.record.id

    @property
    def tokens(self) -> int:
        """Number of leading tokens pinned."""
        return self.record.tokens

    def release(self) -> bool:
        """Removes the pin; False if it had already ended. Raises Unavailable if etcd does not answer."""
        return bool(self.record.id) and self._port.unpin(self.record.id)

    def __repr__(self) -> str:
        about = f"{self.tokens} tokens of {self.record.namespace!r}, {shown(self.id)}" if self.id else "of nothing"
        return f"<kvstore.Pin {about}, {self._port.place}>"

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_pin(ttl: float, owner: str) -> None:
    """Raises InvalidRequest unless a pin can have these."""
    ttl_s = number(ttl)
    if ttl_s is None or not 1 <= ttl_s <= PIN_TTL_S_MAX:
        raise InvalidRequest(f"ttl={brief(ttl)}: expected 1 to {PIN_TTL_S_MAX} seconds")
    if not isinstance(owner, str):
        raise InvalidRequest(f"owner is {kind_of(owner)}: expected text")
    if not is_unicode(owner):
        raise InvalidRequest(f"owner={brief(owner)} is not valid Unicode")
