"""The peers' reports so far, kept by session: the directory is made from them.

Separate from following, because it is pure: it decides which session speaks for an address, and whose prints fit. Used
by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.meta.digests import SHARDS, AddressTold, DigestTold
from kvstore.meta.keys import SessionId
from kvstore.peers.digest import Prints, decode
from kvstore.peers.directory import EMPTY, PEER_BITS, PEERS_MAX, Directory, Entries

_SHARD_AT = np.uint64(32 + PEER_BITS)
_PRINT_AT = np.uint64(PEER_BITS)


@dataclass(slots=True)
class _Speaker:
    """One session of a peer."""

    address: str | None = None
    since: int = 0
    digests: dict[int, Prints] = field(default_factory=dict)


class Told:
    """``own`` is this node's address. Reports from there are left out, also those of an earlier process."""

    def __init__(self, own: str | None, prints_max: int) -> None:
        self._own = own
        self._shard_max = max(1, prints_max // SHARDS)
        self._speakers: dict[SessionId, _Speaker] = {}
        self._heard: dict[str, _Speaker] = {}
        self._numbers: dict[str, int] = {}
        self._free = list(range(PEERS_MAX, -1, -1))
        self._shards: list[Entries] = [EMPTY.entries] * SHARDS
        self._changed: set[int] = set()
        self._moved = False

    @property
    def is_changed(self) -> bool:
        """True if the last directory is out of date."""
        return self._moved or bool(self._changed)

    def hear(self, news: AddressTold | DigestTold) -> None:
        """Takes in the value of a key. A digest that cannot be read counts as empty."""
        speaker = self._speakers.setdefault(news.session, _Speaker())
        if isinstance(news, AddressTold):
            speaker.address, speaker.since = news.address, news.since
            self._moved = True
        else:
            speaker.digests.pop(news.shard, None)
            prints = _read(news.value)
            if prints is not None:
                speaker.digests[news.shard] = prints
            self._changed.add(news.shard)
        if speaker.address is None and not speaker.digests:
            del self._speakers[news.session]

    def directory(self) -> Directory:
        """Returns the directory of all reports so far."""
        if self._moved:
            self._elect()
        for shard in self._changed:
            self._shards[shard] = self._gathered(shard)
        self._changed.clear()
        addresses = {number: address for address, number in self._numbers.items()}
        return Directory(np.concatenate(self._shards), addresses, dict(self._numbers))

    def _elect(self) -> None:
        """Elects the session that speaks for each address: the later one, if a restarted worker has two."""
        heard: dict[str, _Speaker] = {}
        for speaker in sorted(self._speakers.values(), key=lambda each: each.since):
            # Bulk connections to others go over TCP, which a worker that listens only on a unix socket does not offer.
            if speaker.address is not None and speaker.address != self._own and not speaker.address.startswith("unix:"):
                heard[speaker.address] = speaker
        for address in self._heard.keys() | heard.keys():
            before, after = self._heard.get(address), heard.get(address)
            if before is not after:
                self._changed |= {shard for each in (before, after) if each is not None for shard in each.digests}
                if after is None:
                    # The number is not used again before its shards are rebuilt, which happens at once.
                    self._free.append(self._numbers.pop(address))
                elif before is None and self._free:
                    self._numbers[address] = self._free.pop()
        self._heard = {address: each for address, each in heard.items() if address in self._numbers}
        self._moved = False

    def _gathered(self, shard: int) -> Entries:
        """Returns the entries of one shard; if there are too many, an equal share of each peer's."""
        said = [
            (self._numbers[address], each.digests[shard])
            for address, each in self._heard.items()
            if shard in each.digests
        ]
        if not said:
            return EMPTY.entries
        fits = sum(len(prints) for _, prints in said) <= self._shard_max
        share = self._shard_max if fits else self._shard_max // len(said)
        high = np.uint64(shard) << _SHARD_AT
        parts = [high | prints[:share].astype(np.uint64) << _PRINT_AT | np.uint64(number) for number, prints in said]
        entries = np.concatenate(parts)
        entries.sort()
        return entries


def _read(value: bytes | None) -> Prints | None:
    if value is None:
        return None
    try:
        return decode(value)
    except InvalidRequest:
        return None
