"""The folder of a worker's unix socket: private to its user; a later worker removes the folders of killed ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER_PREFIX = "kvstore-bulk-"
MARK = "lock"


class SocketFolder:
    """A folder under ``parent``, marked by a lock that ends with this process."""

    def __init__(self, parent: str) -> None:
        self._parent = parent
        self._path = ""
        self._mark = -1

    def make(self) -> str:
        """Makes the folder, removes those of workers that were killed, and returns its path. Raises OSError."""
        _remove_dead(self._parent)
        self._path = tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}", dir=self._parent)
        self._mark = _marked(self._path)
        # Renamed only once it is locked: another worker would remove an unlocked one.
        path = os.path.join(self._parent, os.path.basename(self._path).removeprefix("."))
        os.rename(self._path, path)
        self._path = path
        return path

    def close(self) -> None:
        """Removes the folder with its content. Idempotent."""
        mark, self._mark = self._mark, -1
        if mark >= 0:
            os.close(mark)
        path, self._path = self._path, ""
        if path:
            shutil.rmtree(path, ignore_errors=True)


def _marked(folder: str) -> int:
    mark = os.open(os.path.join(folder, MARK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(mark)
        raise
    return mark


def _remove_dead(parent: str) -> None:
    """Removes this user's folders whose lock nobody holds."""
    for folder in Path(parent).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            mark = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(mark)
