"""A run on one host: the metadata are a file, which is removed, damaged and replaced, and mended by an operator."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvstore.errors import KVStoreError, RootMismatch
from kvstore.format.places import HOST_GENERATIONS, METADATA
from kvstore.fsck import adopt
from kvstore.meta.generation import Foreign, join_generation
from kvstore.meta.interface import Delete, Put
from kvstore.node.member import Sharing
from kvstore.root.generations import publish, read_newest
from kvstore_gc.site import Site
from tests.sim.collector import Collector
from tests.sim.host import SESSION_TTL_S
from tests.sim.kernel import Effect, Kernel, Process
from tests.sim.metadata_file import HostFile
from tests.sim.profiles import Profile
from tests.sim.shared_root import RootPort
from tests.sim.world import World

OPERATOR_S = 30.0
"""The longest that an operator takes to notice."""
STOPPED_STEPS = 3000
GOES_ON = ("put", "match", "put_blocks", "get_blocks")
"""What goes on whatever happens to the file."""
RENEWED_S = SESSION_TTL_S / 2
"""A lease that ends sooner in an old copy may end before its session comes to renew it."""


class HostWorld(World):
    """``store`` is the file."""

    store: HostFile  # type: ignore[assignment]
    sharing = Sharing.HOST
    generations = HOST_GENERATIONS

    def close(self) -> None:
        self.store.close()

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self._adopting: set[Process] = set()
        super().__init__(kernel, profile)

    def _make_store(self) -> HostFile:  # type: ignore[override]
        return HostFile(self.faults, self.ids, self._committed)

    def _first_generation(self) -> None:
        """The first node makes it."""

    def check_of(self, site: Site) -> Callable[[], object]:
        def check() -> None:
            standing = join_generation(
                site.meta,
                site.keys,
                site.ids,
                read_root=partial(read_newest, site.root, site.generations),
                publish_root=partial(publish, site.root, ids=site.ids, clock=site.clock, folder=site.generations),
            )
            if isinstance(standing, Foreign):
                raise RootMismatch(standing.why)

        return check

    def _committed(self, change: Put | Delete, is_here: bool) -> None:
        session = self.keys.parse_session(change.key)
        actor = self.kernel.current
        is_ended = isinstance(change, Delete) and actor is not None and actor.process in self._adopting
        if session is not None and (is_ended or not is_here):
            # An adoption ends the sessions that there are, and what is put into a removed file nobody finds. Nodes hear
            # of both at their next keepalive.
            self.oracle.void_sessions.add(session)
        if isinstance(change, Put):
            self._was_put(change)
        elif change.key.startswith(self.keys.condemned):
            self.kernel.happened("closed")

    def raised(self, work: str, error: KVStoreError) -> None:
        super().raised(work, error)
        if work in GOES_ON and METADATA in str(error):
            self.kernel.fail(f"G1: {work} needed the metadata: {error}")

    def _stop(self) -> None:
        """SIGSTOP, often past the end of a lease."""
        processes = [one.process for one in self._members]
        self.kernel.stop(self.kernel.source.choice(processes), int(STOPPED_STEPS ** self.kernel.random()))

    def _killed(self, process: Process) -> list[Effect]:
        effects = super()._killed(process)
        self.store.died(process)
        return effects

    # What happens to the file.

    def _remove_file(self) -> bool:
        if not self.store.inode or self.store.is_being_opened:
            return False
        self._void(set())
        self.store.remove()
        self._operate()
        return True

    def _damage_file(self) -> bool:
        if not self.store.damage(self.profile.damage_share):
            return False
        self._operate()
        return True

    def _old_copy(self) -> bool:
        """Makes a copy, or puts it back."""
        if self._saved is None:
            self._snapshot()
            return self._saved is not None
        return self._restore()

    def _snapshot(self) -> None:
        self._saved = self.store.snapshot() or self._saved

    def _restore(self) -> bool:
        saved: Path | None = self._saved
        if saved is None or self.store.is_being_opened:
            return False
        self._void(self.store.sessions(self.keys.sessions, saved, RENEWED_S))
        self.store.restore(saved)
        self._saved = None
        self.kernel.happened("restored")
        self._operate()
        return True

    def _void(self, known: set[str]) -> None:
        """Nothing is promised to sessions that the file does not know from now on."""
        try:
            lost = self.store.sessions(self.keys.sessions) - known
        except sqlite3.Error:
            lost = set()
        lost |= {host.session.key for host in self.hosts if host.session is not None} - known
        found = {self.keys.parse_session(key) for key in lost}
        self.oracle.void_sessions |= {session for session in found if session is not None}
        self.oracle.restored = True

    def _compact(self) -> bool:  # type: ignore[override]
        """Watches that are behind are lost."""
        return self._write("UPDATE state SET compacted = revision") and self._write(
            "DELETE FROM history WHERE revision < (SELECT compacted FROM state)"
        )

    def _write(self, statement: str) -> bool:
        try:
            self.store.rows(statement)
        except sqlite3.Error:
            return False
        return True

    def _reboot(self) -> None:
        """All processes die, and all leases end."""
        self.store.reboot()
        for one in self._members:
            self._replace(one)

    # The operator.

    def _operate(self) -> None:
        """Somebody notices after a while."""
        process = Process(self.kernel, "operator")

        def work() -> None:
            self.kernel.sleep(OPERATOR_S * self.kernel.random())
            self._adopt(process)

        self.kernel.spawn(process, "main", work)

    def _adopt(self, process: Process) -> None:
        """``kvstore fsck ROOT --adopt``, until it works."""
        root = RootPort(self.root, self.faults)
        self._adopting.add(process)
        try:
            self._adopt_until_done(process, root)
        finally:
            self._adopting.discard(process)

    def _adopt_until_done(self, process: Process, root: RootPort) -> None:
        for _ in range(20):
            meta = self.store.port(self.faults)
            try:
                self.store.remove_damaged(lambda: self._void(set()))
                adopt(root, self.identity, meta, clock=process, ids=self.ids, generations=HOST_GENERATIONS)
                self._adopted()
                self.count("adoptions")
                return
            except KVStoreError as error:
                self.kernel.note(f"adoption: {error}")
            finally:
                meta.close()
            self.kernel.sleep(2.0)

    def _adopted(self) -> None:
        """The metadata are of the root's generation again."""

    def _tidy(self, janitor: Collector) -> None:
        self._adopt(janitor.process)
        super()._tidy(janitor)

    def _untidy(self) -> list[str]:
        try:
            return super()._untidy()
        except sqlite3.Error as error:
            return [f"{type(error).__name__}: {error}"]
