"""The chunks of one namespace as the root has them, and as they were last published: columns, 53 bytes a chunk.

Events are the differences between both. A chunk is published if its file exists, no sweep or clear condemns it, its
identity is known, and the same holds of its parent: what a ``get`` would read, and nothing else (EVENTS.md, section 2).
Pure: no I/O beyond a file for tokens, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.address import block_addresses
from kvstore.core.namespace import Namespace
from kvstore.events.columns import BLOCK, NO_ROW, U64, BlockName, Columns, Mask, Rows

Tokens = npt.NDArray[np.uint32]

PRESENT, CONDEMNED, KNOWN, PUBLISHED, ODD, LACKING = 1, 2, 4, 8, 16, 64
"""States of a row, as bits, in addition to BLOCK. ODD: the file does not match its name, so it is never published.
LACKING: another part of the block is missing, or another inventory publishes it."""
ELIGIBLE = PRESENT | KNOWN
DEAD_MIN = 65_536
SPELLED_MAX = 8_192
"""Blocks spelled in one ``settle``: some 50 ms."""
NO_ROWS: Rows = np.zeros(0, np.int32)
KEY_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Identities:
    """Identities of some chunks, one element of a column for each. ``parents`` of a first chunk count for nothing."""

    firsts: U64
    lasts: U64
    parent_firsts: U64
    parent_lasts: U64
    depths: npt.NDArray[np.uint32]
    tokens: Tokens
    """One line of ``chunk_tokens`` tokens for each."""
    names: Sequence[BlockName] = ()
    """If these are engine-hashed blocks, the name of each."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows to publish: first those no longer there, then those that are, parents first."""

    removed: Rows
    stored: Rows


class NamespaceIndex:
    """One namespace. Used by one thread, or under its owner's lock."""

    def __init__(self, chunk_tokens: int, folder: str | None = None, digest: bytes = b"") -> None:
        """``folder`` is where the file for tokens goes, without a name; None: where temporary files go.

        ``digest`` is the namespace's: with it the tokens of prompts lead to engine-hashed blocks.
        """
        self.rows = Columns(chunk_tokens, folder, digest)
        self.published_count = 0
        self._touched: list[Rows] = []
        self._unknown: list[Rows] = []
        self._waiting = NO_ROWS
        self._unspelled = NO_ROWS
        """Published rows that are not spelled yet, parents before their children."""

    # What the root has

    def listed(self, ranges: Sequence[tuple[int, int]], firsts: U64, lasts: U64) -> None:
        """Notes a whole listing of the addresses whose first 8 bytes are in one of these ranges, ends included.

        Nothing there is condemned any more.
        """
        known = np.concatenate([NO_ROWS, *(self.rows.between(first, last) for first, last in ranges)])
        rows = self._arrived(firsts, lasts)
        gone = np.setdiff1d(known[self.rows.has(known, PRESENT)], rows)
        self.rows.unmark(gone, PRESENT | ODD)
        spared = known[self.rows.has(known, CONDEMNED)]
        self.rows.unmark(spared, CONDEMNED)
        self._touched += [gone, spared]

    def arrived(self, firsts: U64, lasts: U64) -> None:
        """Notes chunks that are there."""
        self._arrived(firsts, lasts)

    def left(self, firsts: U64) -> None:
        """Notes chunks that are not there any more."""
        rows = self.rows.find(firsts)
        rows = rows[rows != NO_ROW]
        self.rows.unmark(rows, PRESENT | ODD)
        self._touched.append(rows)

    def condemn(self, rows: Rows) -> None:
        """Notes that these count as misses from now on (rule H1), until they are listed again."""
        self.rows.mark(rows, CONDEMNED)
        self._touched.append(rows)

    def unknown(self) -> Rows:
        """Returns rows that are there and whose identity has to be learnt; each is returned once."""
        rows = np.unique(np.concatenate([NO_ROWS, *self._unknown]))
        self._unknown = []
        found: Rows = rows[self.rows.states[rows] & (PRESENT | KNOWN | ODD) == PRESENT]
        return found

    def learn(self, found: Identities) -> None:
        """Notes identities. They hold for as long as a row's file is there: those of chunks follow from addresses."""
        rows = self.rows.ensure(found.firsts, found.lasts)
        new = ~self.rows.has(rows, KNOWN)
        if found.names:
            named = self.rows.name(rows[new], [found.names[at] for at in np.flatnonzero(new).tolist()])
            self.refuse(np.setdiff1d(rows[new], named))
            new &= np.isin(rows, named)
            self.rows.unmark(rows[new], LACKING)  # it may have been a part before its file was written anew
            parted = [at for at in np.flatnonzero(new).tolist() if found.names[at].origin.parts > 1]
            self.rows.mark(rows[parted], LACKING)
        rows, depths = rows[new], found.depths[new]
        has_parent = depths > 0
        parents = np.full(len(rows), NO_ROW, np.int32)
        above = found.parent_firsts[new][has_parent], found.parent_lasts[new][has_parent]
        parents[has_parent] = self.rows.ensure(*above)
        self.rows.parents[rows], self.rows.depths[rows] = parents, depths
        self.rows.tokens.write(rows, found.tokens[new])
        self.rows.mark(rows, KNOWN)
        self._touched.append(rows)

    def touched_blocks(self) -> Rows:
        """Returns the blocks that changed since the last ``settle``."""
        touched = np.unique(np.concatenate([NO_ROWS, *self._touched]))
        return touched[self.rows.has(touched, BLOCK)]

    def has_part(self, rows: Rows) -> Mask:
        """Returns which rows are there and can be read, whatever other parts are; NO_ROW is not."""
        found: Mask = rows != NO_ROW
        found[found] = self.rows.states[rows[found]] & (ELIGIBLE | CONDEMNED) == ELIGIBLE
        return found

    def lack(self, rows: Rows, lacking: Mask) -> None:
        """Notes the blocks among these that lack another part."""
        changed = self.rows.has(rows, LACKING) != lacking
        self.rows.mark(rows[changed & lacking], LACKING)
        self.rows.unmark(rows[changed & ~lacking], LACKING)
        self._touched.append(rows[changed])

    def retry(self, rows: Rows) -> None:
        """Has ``unknown`` return these again."""
        self._unknown.append(rows)

    def refuse(self, rows: Rows) -> None:
        """Notes that the files of these rows do not say what they are."""
        self.rows.mark(rows, ODD)

    # Publication

    def settle(self) -> Difference:
        """Returns the difference to what was published before, and counts it as published from now on."""
        touched = np.unique(np.concatenate([NO_ROWS, *self._touched]))
        self._touched = []
        removed = touched[~self._eligible(touched) & self.rows.has(touched, PUBLISHED)]
        self._unpublish(removed)
        cut_off = self._cut_off() if len(removed) and self.rows.children[removed].any() else NO_ROWS
        stored, self._waiting = self._publish(np.concatenate([self._waiting, cut_off, touched]))
        self.published_count += len(stored) - len(removed) - len(cut_off)
        self.rows.forget_spelled(np.concatenate([removed, cut_off]))
        self._spell(stored)
        # Another writer may say something else of a block when it comes again.
        gone = touched[~self.rows.has(touched, PRESENT)]
        self.rows.unmark(gone[self.rows.has(gone, BLOCK)], KNOWN)
        return Difference(np.concatenate([removed, cut_off]), stored)

    def are_published(self, rows: Rows) -> Mask:
        """Returns which rows are published; NO_ROW is not."""
        known: Mask = rows != NO_ROW
        known[known] = self.rows.has(rows[known], PUBLISHED)
        return known

    def snapshot(self) -> Rows:
        """Returns all published rows, parents first."""
        rows = self.rows.having(PUBLISHED)
        return rows[np.argsort(self.rows.depths[rows], kind="stable")]

    def between(self, first: int, last: int) -> Rows:
        """Returns the rows that are there, of addresses whose first 8 bytes are from ``first`` to ``last``."""
        rows = self.rows.between(first, last)
        return rows[self.rows.has(rows, PRESENT)]

    def compact(self) -> bool:
        """Drops unneeded rows, if there are many, and renumbers the rest. Call it after ``settle``."""
        alive = self.rows.having(PRESENT | PUBLISHED)
        if self.rows.count - len(alive) < max(DEAD_MIN, self.rows.count // 2):
            return False
        above = self.rows.parents[alive]
        moved = self.rows.keep(np.union1d(alive, above[above != NO_ROW]).astype(np.int32))
        # A parent that is gone stays as an address alone: what else was known of it is read again.
        gone = np.setdiff1d(np.arange(self.rows.count, dtype=np.int32), moved[alive])
        self.rows.states[gone], self.rows.parents[gone] = 0, NO_ROW
        self._waiting, self._unspelled = _kept(moved[self._waiting]), _kept(moved[self._unspelled])
        self._unknown = [_kept(moved[each]) for each in self._unknown]
        return True

    def close(self) -> None:
        """Gives the files back."""
        self.rows.close()

    def _arrived(self, firsts: U64, lasts: U64) -> Rows:
        rows = self.rows.ensure(firsts, lasts)
        new = rows[~self.rows.has(rows, PRESENT)]
        self.rows.mark(new, PRESENT)
        self._touched.append(new)
        self._unknown.append(new[~self.rows.has(new, KNOWN)])
        return rows

    def _spell(self, stored: Rows) -> None:
        """Spells some published rows. Queries, and removals in all namespaces, wait for the lock until it returns."""
        waiting = np.concatenate([self._unspelled, stored])
        now, self._unspelled = waiting[:SPELLED_MAX], waiting[SPELLED_MAX:]
        self.rows.spell(now[self.rows.has(now, PUBLISHED)])

    def _eligible(self, rows: Rows) -> Mask:
        found: Mask = self.rows.states[rows] & (ELIGIBLE | CONDEMNED | LACKING) == ELIGIBLE
        return found

    def _unpublish(self, rows: Rows) -> None:
        self.rows.unmark(rows, PUBLISHED)
        above = self.rows.parents[rows]
        np.subtract.at(self.rows.children, above[above != NO_ROW], 1)

    def _cut_off(self) -> Rows:
        """Retracts all published rows below unpublished ones. Checks every row; rare: leaves are evicted first."""
        found: list[Rows] = []
        while True:
            rows = self.rows.having(PUBLISHED)
            above = self.rows.parents[rows]
            lost = rows[(above != NO_ROW) & ~self.rows.has(above, PUBLISHED)]
            if not len(lost):
                return np.concatenate([NO_ROWS, *found])
            self._unpublish(lost)
            found.append(lost)

    def _publish(self, candidates: Rows) -> tuple[Rows, Rows]:
        """Publishes eligible rows, depth by depth; returns them, and the rows that still wait for their parents."""
        rows = np.unique(candidates)
        rows = rows[self._eligible(rows) & ~self.rows.has(rows, PUBLISHED)]
        rows = rows[np.argsort(self.rows.depths[rows], kind="stable")]
        stored, waiting, depths = [NO_ROWS], [NO_ROWS], self.rows.depths
        for level in self._levels(rows):
            above = self.rows.parents[level]
            # The depths of blocks are claims: only if they grow by one, the order of depths has parents first.
            reached = (above == NO_ROW) | (self.rows.has(above, PUBLISHED) & (depths[above] + 1 == depths[level]))
            published = level[reached]
            self.rows.mark(published, PUBLISHED)
            np.add.at(self.rows.children, above[reached & (above != NO_ROW)], 1)
            stored.append(published)
            waiting.append(level[~reached])
        return np.concatenate(stored), np.concatenate(waiting)

    def _levels(self, rows: Rows) -> Iterator[Rows]:
        cuts = np.flatnonzero(np.diff(self.rows.depths[rows])) + 1
        return iter(np.split(rows, cuts) if len(rows) else ())


def _kept(rows: Rows) -> Rows:
    found: Rows = rows[rows != NO_ROW]
    return found


# Blocks in several parts: each rank of an engine stores its own under one key, in a namespace of its own.
#
# Such a block can be loaded only with all of its parts. So the namespace with the lowest id publishes it, while all
# of them have it. If more namespaces claim to be parts than there are, none publishes it.


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One of the namespaces that have parts of the same blocks."""

    namespace: Namespace
    inventory: NamespaceIndex

    def rows(self, keys: Sequence[bytes]) -> Rows:
        """Returns where the blocks with these keys are; NO_ROW for those it never had."""
        packed = b"".join(block_addresses(self.namespace, keys))
        return self.inventory.rows.find(np.frombuffer(packed, ">u8")[::2].astype(np.uint64))


_Known = tuple[str, str, bytes]
"""Tenant and name of the namespaces, and what names them together."""


class MultipartBlocks:
    """Decides which parts are published, before inventories settle. Used under the lock of their owner."""

    def __init__(self) -> None:
        self._members: dict[_Known, set[int]] = {}

    def judge(self, parts: Mapping[int, BlockPart]) -> None:
        """Records for each block of the publishing parts whether all others exist. ``parts`` are by namespace id."""
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


def _judge(whole: bytes, members: Sequence[BlockPart], *, is_complete: bool, is_new: bool) -> None:
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
