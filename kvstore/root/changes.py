"""Cheap looks at a shard's folder, for a reader that follows what changes: when it changed, and which names it has.

Separate from the root's interface, because only folders of a mounted file system have times, and only there does a
listing without sizes cost less.
"""

from __future__ import annotations

import os

from kvstore.errors import Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import Root, local_files
from kvstore.root.posix_errors import MISSING_ERRORS, error_of


def folder_time(root: Root, folder: Name) -> int | None:
    """Returns when an entry of a folder last came or went, in ns by the file system's clock; 0 if there is no folder.

    None if the root cannot tell. Two changes within one tick of that clock (a few ms, on some file systems 2 s) look
    like one. Raises the root's errors.
    """
    local = local_files(root)
    if local is None:
        return None
    path = f"{local.path}/{folder}"
    try:
        return os.stat(path).st_mtime_ns
    except OSError as cause:
        if cause.errno in MISSING_ERRORS:
            return 0
        raise error_of("look at", path, cause) from cause


def list_names(root: Root, folder: Name) -> list[str]:
    """Returns the names in a folder, folders included; none if there is no such folder. Raises the root's errors."""
    local = local_files(root)
    if local is None:
        return [entry.name for entry in root.list(folder)]
    path = f"{local.path}/{folder}"
    if os.path.islink(path):
        raise Unavailable(f"{path} is a symbolic link: the folders of a root must be its own")
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        raise error_of("list", path, cause) from cause
