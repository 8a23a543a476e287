"""The judge of a run: what may leave the root, and what protected chunks may never do.

It sees every change of a file at the moment it happens, below all faults, and every claim that a node makes to its
callers.  The invariants are those of gc/PROTOCOL.md:

* I1: a publication found under a live, protecting hold stays at its name.
* I2: so does one that an acknowledged pin protects.
* I3: a publication disappears only if a sweep condemned that very one; and never the last of an address.
* I4: bytes read are those written for that address, whole.

The promise for an address whose file was damaged is weaker: misses, never wrong bytes, nothing newer lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.engine.gc_state import ChunkHold
from kvstore.format.header import incarnation_at
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import Keys
from kvstore.meta.sweeps import Condemned
from kvstore.root.memory import MemoryFile
from tests.sim.kernel import Kernel, Process

NameOf = Callable[[ChunkKeys, int], Name]


@dataclass(slots=True, eq=False)
class Claim:
    """Somebody was told that a publication is protected at its name, as long as ``is_live()``."""

    who: str
    name: str
    incarnation: bytes
    is_live: Callable[[], bool]
    rule: str


class Oracle:
    """One run's."""

    def __init__(self, kernel: Kernel, keys: Keys) -> None:
        self._kernel = kernel
        self._keys = keys
        self._at: dict[str, bytes] = {}
        self._links: Counter[bytes] = Counter()
        self._name_of: dict[bytes, str] = {}
        self._claims: dict[str, list[Claim]] = {}
        self._condemned: set[tuple[str, bytes]] = set()
        self._ever_condemned: set[bytes] = set()
        self._damaged: set[bytes] = set()
        self.weak: set[str] = set()
        """The names of chunks that were damaged."""
        self.void_sessions: set[bytes] = set()
        """Sessions that a restored etcd does not know."""
        self.restored = False
        self.read_plan: Callable[[Condemned], list[bytes]] = lambda record: []
        self.counts: Counter[str] = Counter()
        self.used_bytes = 0
        """Bytes of chunks, and of those in a trash or set aside."""
        self.grew: Callable[[], object] = lambda: None
        """Called when a chunk was written."""

    # What happens on the root.

    def wrote(self, name: str, before: MemoryFile | None, file: MemoryFile) -> None:
        """A name has this file now."""
        self.used_bytes += len(file.content) - (len(before.content) if before else 0)
        if name.startswith("chunks/"):
            self.grew()
        incarnation = incarnation_at(file.content)
        old = incarnation_at(before.content) if before else b""
        if before is not None and old == incarnation:
            return  # touched
        self._links[incarnation] += 1
        if name.startswith("chunks/"):
            self._name_of.setdefault(incarnation, name)
            self._kernel.happened("published")
            self._at[name] = incarnation
        if before is not None:
            if name.startswith("chunks/") and old not in self._damaged:
                self._kernel.fail(f"W1: {incarnation.hex()[:8]} was written over {old.hex()[:8]} at {name}")
            self._left(name, old)

    def deleted(self, name: str, file: MemoryFile) -> None:
        """Notes that a name has no file any more."""
        self.used_bytes -= len(file.content)
        if name.startswith("chunks/"):
            self._at.pop(name, None)
        self._left(name, incarnation_at(file.content))

    def damages(self, name: str, incarnation: bytes) -> None:
        """The saboteur is about to damage a chunk."""
        self._damaged.add(incarnation)
        self.weak.add(name)
        self.counts["chunks damaged"] += 1

    def condemned(self, record: Condemned) -> None:
        """A condemned key was put."""
        incarnations = self.read_plan(record)
        self.counts["sweeps condemned"] += 1
        self._kernel.happened("condemned")
        self._condemned |= {(record.sweep.hex(), one) for one in incarnations}
        self._ever_condemned |= set(incarnations)

    def _left(self, name: str, incarnation: bytes) -> None:
        """A publication has one name less."""
        self._links[incarnation] -= 1
        if name.startswith("chunks/"):
            self._check_claims(name, incarnation)
        if not self._links[incarnation] and len(incarnation) == 16:
            self._check_vanished(name, incarnation)

    def _check_claims(self, name: str, incarnation: bytes) -> None:
        claims = self._claims.get(name)
        if not claims or name in self.weak:
            return
        for claim in claims:
            if claim.incarnation == incarnation and claim.is_live():
                self._kernel.fail(f"{claim.rule}: {claim.who} is told that {name} is protected, and it was taken away")
        self._claims[name] = [claim for claim in claims if claim.is_live()]

    def _check_vanished(self, name: str, incarnation: bytes) -> None:
        if incarnation in self._damaged:
            return
        if name.startswith("trash/"):
            if (name.split("/")[1], incarnation) in self._condemned:
                self.counts["publications reaped"] += 1
                return
        elif name.startswith("chunks/") and incarnation in self._ever_condemned:
            self.counts["publications reaped"] += 1
            return
        stays = self._at.get(self._name_of.get(incarnation, ""))
        # In its place something must be that the same sweep does not take; after a restored etcd, something.
        if stays is None or ((name.split("/")[1], stays) in self._condemned and not self.restored):
            self._kernel.fail(
                f"I3: {incarnation.hex()[:8]} disappeared from {name}, uncondemned and the last of its address"
            )
            return
        self.counts["publications superseded"] += 1

    # What nodes tell their callers.

    def holds(self, process: Process, hold: ChunkHold, names: list[Name], is_live: Callable[[], bool]) -> None:
        """A hold was handed out that says these chunks are there."""
        who = f"hold {hold.id.hex()[:8]} of {process.name} born at {hold.born}"
        self._claim("I1", who, names, lambda: process.alive and is_live())

    def pins(self, pin: str, names: list[Name], ends_s: float) -> Callable[[], None]:
        """A pin was acknowledged that lasts until ``ends_s``; call the result when it is to end."""
        ended = [False]

        def lives() -> bool:
            return not ended[0] and self._kernel.now_s < ends_s

        def end() -> None:
            ended[0] = True

        self._claim("I2", f"pin {pin[-8:]}", names, lives)
        return end

    def protected(self) -> set[str]:
        """The names of chunks that some claim protects now."""
        return {name for name, claims in self._claims.items() if any(claim.is_live() for claim in claims)}

    def _claim(self, rule: str, who: str, names: list[Name], is_live: Callable[[], bool]) -> None:
        if not is_live():
            return
        self.counts[f"claims of {rule}"] += 1
        self._kernel.happened("claimed" if rule == "I1" else "pinned")
        for name in names:
            incarnation = self._at.get(name)
            if incarnation is None:
                if name not in self.weak:
                    self._kernel.fail(f"{rule}: {who} says that {name} is there, and it is not")
                continue
            self._claims.setdefault(name, []).append(Claim(who, name, incarnation, is_live, rule))

    def is_at(self, name: str) -> bool:
        """True if there is a chunk of that name."""
        return name in self._at

    @property
    def names(self) -> list[str]:
        """All chunks there are."""
        return sorted(self._at)

    def incarnation_of(self, name: str) -> bytes | None:
        """Returns the incarnation at a name."""
        return self._at.get(name)
