"""Whatever goes wrong around nodes and collectors: killed processes, lost watches, an etcd that goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore.format.places import Name
from kvstore.meta.interface import Put
from kvstore.root.memory import MemoryFile
from tests.sim.content import LAYOUT
from tests.sim.kernel import Process
from tests.sim.metadata import Saved

if TYPE_CHECKING:
    from tests.sim.world import World

Mishap = Callable[[], bool]
"""Makes it happen; False where it cannot happen now."""


class Saboteur:
    """Has a turn before every switch of actors."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernel = world.kernel
        self._saved: Saved | None = None
        self._restore_at: int | None = None
        self._weights: Mapping[str, float] = world.profile.mishaps
        self._mishaps: dict[str, Mishap] = {
            "kill": self._kill,
            "stop": self._stop,
            "leave": self._leave,
            "land": self._land,
            "cut_watches": self._cut_watch,
            "compact": self._compact,
            "expire": self._expire,
            "etcd_down": self._etcd_down,
            "full": self._full,
            "snapshot": self._snapshot,
            "restore": self._restore,
            "damage": self._damage,
        }
        world.faults.before_txn, world.faults.before_take = self._before_txn, self._before_take

    def turn(self) -> None:
        """Perhaps time passes, perhaps something happens."""
        kernel, world = self._kernel, self._world
        if kernel.random() < 0.02:
            kernel.advance(3.0 * kernel.random() ** 3)
        while world.faults.doomed:
            self._end(world.faults.doomed.pop())
        if self._restore_at is not None and kernel.steps >= self._restore_at:
            self._restore_at = None
            self._happens("restore")
        if kernel.random() < world.profile.mishap:
            self._happens(world.choose(self._weights))

    def rest(self) -> None:
        """Nothing goes wrong any more."""
        faults = self._world.faults
        faults.before_txn, faults.before_take = (lambda keys: None), (lambda: None)

    def _happens(self, what: str) -> None:
        if self._mishaps[what]():
            self._kernel.note(f"MISHAP {what}")
            self._world.count(f"mishap: {what}")

    # Processes.

    def _end(self, process: Process) -> None:
        """Of a process that died at a call, or has ended in order."""
        self._kernel.note(f"MISHAP {process.name} ends")
        found = next((one for one in self._world.programs if one.process is process), None)
        if found is None:
            self._kernel.kill(process)
        else:
            self._world.count("processes that died at a call")
            self._world.replace(found)

    def _kill(self) -> bool:
        self._world.replace(self._kernel.source.choice(self._world.programs))
        return True

    def _stop(self) -> bool:
        process = self._kernel.source.choice(self._world.programs).process
        self._kernel.stop(process, int(600 ** self._kernel.random()))
        return True

    def _leave(self) -> bool:
        host = self._kernel.source.choice(self._world.hosts)
        host.leave()
        self._world.forget(host)
        return True

    def _land(self) -> bool:
        late = self._world.faults.late
        if late:
            self._world.faults.land(self._kernel.source.randrange(len(late)))
        return bool(late)

    # etcd.

    def _cut_watch(self) -> bool:
        watches = self._world.store.watches
        if watches:
            self._kernel.source.choice(watches).cut()
        return bool(watches)

    def _compact(self) -> bool:
        store = self._world.store
        store.compact(store._revision)
        store.stir()
        return True

    def _expire(self) -> bool:
        """Time in which nobody gets anything done; often too much of it for a session."""
        self._kernel.advance(self._kernel.source.choice((6.0, 16.0, 40.0)))
        return True

    def _etcd_down(self) -> bool:
        self._world.faults.meta_down_until_s = self._kernel.now_s + 20 * self._kernel.random()
        return True

    def _full(self) -> bool:
        store = self._world.store
        lease = store.grant(1 + self._kernel.source.randrange(4))
        store.txn((), (Put(self._world.keys.gc_full, b"x", lease),))
        return True

    def _before_txn(self, keys: str) -> None:
        """A snapshot just before a sweep begins or ends, to which etcd will go back soon."""
        if "/condemned/" not in keys or self._restore_at is not None or self._world.oracle.restored:
            return
        if self._world.faults.strikes(self._world.profile.restores):
            self._snapshot()
            self._restore_at = self._kernel.steps + int(self._world.profile.restore_steps * self._kernel.random())

    def _before_take(self) -> None:
        """What decided this taking may be lost at this moment."""
        if self._restore_at is not None and self._kernel.random() < 0.7:
            self._restore_at = self._kernel.steps

    def _snapshot(self) -> bool:
        self._saved = self._world.store.snapshot()
        return True

    def _restore(self) -> bool:
        """Once in a run: what holds after two restores nobody has promised."""
        world = self._world
        if self._saved is None or world.oracle.restored:
            return False
        how = self._kernel.random()
        lost = world.store.restore(self._saved, bump=how < 0.3)
        if how > 0.5:
            for watch in list(world.store.watches):
                watch.cut()
        sessions = [session for key in lost if (session := world.keys.parse_session(key)) is not None]
        world.oracle.void_sessions |= set(sessions)
        world.oracle.restored = True
        world.count("sessions lost by a restore", len(sessions))
        return True

    # The root.

    def _damage(self) -> bool:
        """Of a chunk: cut short, or one byte of it changed."""
        world, random = self._world, self._kernel.random
        if not world.oracle.names:
            return False
        name = Name(self._kernel.source.choice(world.oracle.names))
        file = world.root.files.find(name)
        assert file is not None
        world.oracle.damages(name, incarnation_at(file.content))
        if random() < 0.3 or len(file.content) <= FIXED_BYTES:
            content = file.content[: int(random() * len(file.content))]
        else:
            # The payload is small next to the header, and it must be damaged as often.
            start = FIXED_BYTES if random() < 0.5 else len(file.content) - LAYOUT.chunk_bytes
            at = self._kernel.source.randrange(start, len(file.content))
            content = file.content[:at] + bytes([file.content[at] ^ 0xFF]) + file.content[at + 1 :]
        world.root.files.write(name, MemoryFile(content, file.mtime_ns))
        return True
