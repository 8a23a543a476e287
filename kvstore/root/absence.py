"""Files that a client of NFS believes to be absent, and how it is made to ask the server again.

A client remembers that a name was not there for as long as it believes to know the folder (``acdirmin``: 30 s by
default), so a chunk that another host stored meanwhile stays a miss. Opening the folder makes the client ask whether it
changed (one GETATTR), and if it did, the next look at the name asks the server. ``statx`` of the file with
AT_STATX_FORCE_SYNC does not help, as measured on Linux 6.1 with NFS 4.2.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from kvstore.root.mounts import Mount

FILE_SYSTEMS = frozenset({"nfs", "nfs4"})
FORGETTING = frozenset({"lookupcache=pos", "lookupcache=none"})
"""Mount options with which a client remembers no absence."""
FRESH_S = 0.5
"""How long an answer about a folder stands. A chunk of another host is found within this time."""
FOLDERS_MAX = 1 << 16
"""The times of more folders are not remembered, so that each miss in one asks."""


def remembers_absence(mount: Mount) -> bool:
    """True if the client of this mount believes for a while that a file is absent."""
    return mount.type in FILE_SYSTEMS and not FORGETTING & set(mount.options)


class Absence:
    """The folders of one root that the client asked for. Thread-safe: at worst two threads ask at once."""

    def __init__(self, path: str, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``path`` is the root's folder."""
        self._path = path
        self._monotonic_s = monotonic_s
        self._asked_s: dict[str, float] = {}

    def may_be_old(self, path: str) -> bool:
        """Has the client ask for the folder of a file that was not found; True if another look may find it.

        False if it asked within the last ``FRESH_S``, or if the folder is not there either.
        """
        folder = os.path.dirname(path)
        now_s = self._monotonic_s()
        if len(folder) < len(self._path) or now_s - self._asked_s.get(folder, -math.inf) < FRESH_S:
            return False
        if not _ask(folder) and not (self.may_be_old(folder) and _ask(folder)):
            return False
        if len(self._asked_s) >= FOLDERS_MAX:
            self._asked_s.clear()
        self._asked_s[folder] = now_s
        return True


def _ask(folder: str) -> bool:
    """Opens a folder; False if that fails: then the miss stands, whatever the reason."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
