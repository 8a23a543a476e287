"""Takes a damaged file away, so that the next process makes a new one: the first step of an adoption."""

from __future__ import annotations

import os
import sqlite3

from kvstore.format.places import METADATA
from kvstore.meta.sqlite.faults import fault_of, is_damage
from kvstore.meta.sqlite.file import MetadataFile
from kvstore.meta.sqlite.host import boot_id
from kvstore.meta.sqlite.liveness import Liveness
from kvstore.meta.sqlite.store import Store
from kvstore.sources import Clock, SystemClock

BUSY_S = 10.0
"""How long others may write before it can be read."""
NOTHING = "removed"
"""The target of a name that cannot be opened."""


def remove_damaged(folder: str, *, clock: Clock | None = None, boot: str | None = None) -> str | None:
    """Removes the file in ``folder``, and those beside it, if it is damaged; returns the damage, None if there is none.

    Processes may run: at their next call they make a new file, whose generation is not the root's. Raises Unavailable
    if nobody can tell, PermissionDenied, OSError.
    """
    path = os.path.join(folder, METADATA)
    damage = _damage(path, clock or SystemClock(), boot_id() if boot is None else boot)
    if damage is not None:
        _remove(path)
    return damage


def _damage(path: str, clock: Clock, boot: str) -> str | None:
    if os.path.islink(path):
        return "an earlier removal was not finished"
    if not os.path.exists(path):
        return None
    folder = os.path.dirname(path)
    liveness = Liveness(folder)
    file = MetadataFile(folder, lambda database: Store(database, clock, boot, liveness))
    try:
        database, store = file.opened(BUSY_S)
        (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            return " ".join(str(found).replace("*** in database main ***", "").split())
        store.check()
    except sqlite3.Error as error:
        if is_damage(error):
            return str(error)
        raise fault_of(error, path) from error
    finally:
        file.close()
        liveness.close()
    return None


def _remove(path: str) -> None:
    """Removes the files. Nobody may make a new one while the old log is there, so the name is taken meanwhile."""
    taken = f"{path}.{NOTHING}"
    try:
        os.symlink(NOTHING, taken)
    except FileExistsError:
        pass  # of an earlier try
    os.rename(taken, path)
    for ending in ("-wal", "-shm"):
        try:
            os.unlink(f"{path}{ending}")
        except FileNotFoundError:
            pass
    os.unlink(path)
