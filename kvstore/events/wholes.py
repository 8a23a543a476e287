"""Blocks in several parts: each rank of an engine stores its own under one key, in a namespace of its own.

Such a block can be loaded only with all of its parts. So one of the namespaces tells of it, while all of them have it:
the one with the lowest id. If more namespaces claim to be parts than there are, none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.address import block_addresses
from kvstore.events.columns import BLOCK, Mask
from kvstore.events.inventory import Inventory
from kvstore.events.table import NO_ROW, Rows
from kvstore.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Part:
    """One of the namespaces that have parts of the same blocks."""

    namespace: Namespace
    inventory: Inventory

    def rows(self, keys: Sequence[bytes]) -> Rows:
        """Returns where the blocks with these keys are; NO_ROW for those it never had."""
        packed = b"".join(block_addresses(self.namespace, keys))
        return self.inventory.rows.find(np.frombuffer(packed, ">u8")[::2].astype(np.uint64))


_Known = tuple[str, str, bytes]
"""Tenant and name of the namespaces, and what names them together."""


class Wholes:
    """Decides which parts are told, before inventories settle. Used under the lock of their owner."""

    def __init__(self) -> None:
        self._members: dict[_Known, set[int]] = {}

    def judge(self, parts: Mapping[int, Part]) -> None:
        """Notes for each block of the telling parts whether all others are there. ``parts`` are by namespace id."""
        found: dict[_Known, dict[int, int]] = {}
        for number, part in parts.items():
            names, namespace = part.inventory.rows.names, part.namespace
            for whole, count in names.wholes.items() if names is not None else ():
                found.setdefault((namespace.tenant, namespace.name, whole), {})[number] = count
        for known, counts in found.items():
            members = [parts[number] for number in sorted(counts)]
            is_complete = {*counts.values()} == {len(members)}
            _judge(known[2], members, is_complete=is_complete, is_new=self._members.get(known) != counts.keys())
            self._members[known] = set(counts)


def _judge(whole: bytes, members: Sequence[Part], *, is_complete: bool, is_new: bool) -> None:
    """Judges the blocks of one whole that something happened to; all of them if its members are others than before."""
    keys = list[bytes]()
    for member in members:
        inventory, names = member.inventory, member.inventory.rows.names
        rows = inventory.rows.having(BLOCK) if is_new else inventory.touched_blocks()
        if len(rows) and names is not None:
            keys += names.keys(rows, whole)
    if not keys:
        return
    keys = list(dict.fromkeys(keys))
    found = [member.rows(keys) for member in members]
    there = np.logical_and.reduce([each.inventory.has_part(rows) for each, rows in zip(members, found, strict=True)])
    for at, (member, rows) in enumerate(zip(members, found, strict=True)):
        lacking: Mask = ~there if is_complete and not at else np.ones(len(rows), np.bool_)
        here = rows != NO_ROW
        member.inventory.lack(rows[here], lacking[here])
