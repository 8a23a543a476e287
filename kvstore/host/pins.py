"""Pins of a host: one record each in the root's folder ``pins``. A record outlives its process and a reboot.

The number of live records that contain an address is its refcount. Records end by the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.address import Address
from kvstore.core.clock import Clock, Ids
from kvstore.core.namespace import NamespaceDigest
from kvstore.errors import RootMismatch
from kvstore.meta.keys import PinId
from kvstore.meta.pins import PinQuota, StoredPin, check_pin, packed
from kvstore.root.fences import list_twins, read_twin, remove_twin, write_twin
from kvstore.root.interface import Root

OnRoot = Callable[[Callable[[], Any]], Any]


class PinTwins:
    """The records of pins on a root. ``on_root`` calls a function that uses it within a deadline: a mount may hang."""

    def __init__(self, root: Root, ids: Ids, clock: Clock, on_root: OnRoot) -> None:
        self._root = root
        self._ids = ids
        self._clock = clock
        self._on_root = on_root

    def write(self, owner: str, pin: PinId, content: bytes) -> None:
        self._on_root(partial(write_twin, self._root, owner, pin, content, ids=self._ids, clock=self._clock))

    def remove(self, owner: str, pin: PinId) -> bool:
        return bool(self._on_root(lambda: remove_twin(self._root, owner, pin)))

    def unexpired(self) -> list[StoredPin]:
        """Returns the records of pins that have not ended. Raises RootMismatch if one cannot be understood."""
        found = self._on_root(lambda: _records(self._root, self._clock.now_s()))
        return [record for _, record in found]


class HostPins:
    """The pins of one root. Hold what is to be pinned while ``pin`` runs (gc/PROTOCOL.md, section 7)."""

    def __init__(self, twins: PinTwins, ids: Ids, clock: Clock, quota: PinQuota) -> None:
        self._twins = twins
        self._ids = ids
        self._clock = clock
        self.quota = quota
        """May change at any time: live pins stay."""

    def pin(
        self,
        owner: str,
        addresses: Sequence[Address],
        ttl_s: int,
        tokens_count: int,
        namespace: NamespaceDigest,
        timeout_s: float | None = None,
    ) -> StoredPin:
        """Pins ``addresses`` for ``ttl_s``. Raises InvalidRequest over a limit, Overloaded over a quota, and the
        root's errors: then there is no pin.
        """
        check_pin(ttl_s, tokens_count)
        content = packed(addresses)
        live = self.list()
        self.quota.check(owner, sum(pin.owner == owner for pin in live), len(live))
        expires_s = round(self._clock.now_s() + ttl_s, 3)
        record = StoredPin(PinId(self._ids.fresh()), owner, namespace, tokens_count, ttl_s, expires_s, content)
        self._twins.write(owner, record.id, record.to_bytes())
        return record

    def unpin(self, owner: str, pin: PinId, timeout_s: float | None = None) -> bool:
        """Removes a pin; False if it does not exist (any more). Raises the root's errors."""
        return self._twins.remove(owner, pin)

    def list(self, owner: str | None = None, timeout_s: float | None = None) -> tuple[StoredPin, ...]:
        """Returns all live pins, or one owner's. Raises RootMismatch if one cannot be understood."""
        return tuple(record for record in self._twins.unexpired() if owner in (None, record.owner))

    def refcount(self, address: Address, timeout_s: float | None = None) -> int:
        """Counts the live pins that contain ``address``."""
        return sum(record.contains(address) for record in self.list())


class PinnedPrints:
    """What pins keep, read repeatedly by the process that evicts. Records never change: each is read once."""

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._seen: dict[str, StoredPin] = {}
        self._prints: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def read(self) -> npt.NDArray[np.uint64]:
        """Returns the first 8 bytes of each address that is pinned, in no order; records that have ended go.

        Raises RootMismatch if a record cannot be understood, and the root's errors.
        """
        now_s = self._clock.now_s()
        live = dict(_records(self._root, now_s, self._seen, removes_ended=True))
        if live.keys() != self._seen.keys():
            parts = [np.frombuffer(record.packed, "<u8")[::2] for record in live.values()]
            self._prints = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
        self._seen = live
        return self._prints


def _records(
    root: Root, now_s: float, seen: dict[str, StoredPin] | None = None, *, removes_ended: bool = False
) -> list[tuple[str, StoredPin]]:
    found: list[tuple[str, StoredPin]] = []
    for name in list_twins(root):
        record = (seen or {}).get(name)
        if record is None:
            content = read_twin(root, name)
            if content is None:
                continue  # removed since it was listed
            try:
                record = StoredPin.from_bytes(content, name)
            except RootMismatch as mismatch:
                raise RootMismatch(f"{mismatch} What it protects is unknown (deploy/RUNBOOK.md)") from mismatch
        if record.expires_s > now_s:
            found.append((name, record))
        elif removes_ended:
            remove_twin(root, record.owner, record.id)
    return found
