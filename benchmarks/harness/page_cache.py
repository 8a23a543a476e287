"""The page cache under a root: emptied for cold figures, and checked."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

LOOKS_MAX = 64
TRIES = 20
PAUSE_S = 0.1


def evict(folder: Path) -> None:
    """Writes back and drops every file below ``folder`` from the page cache. Needs no privileges."""
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def emptied(folder: Path, share_max: float) -> float:
    """Evicts until at most ``share_max`` is cached; what another core has not put on its lists yet stays at first.

    Returns the share that is cached in the end.
    """
    share = 1.0
    for _ in range(TRIES):
        evict(folder)
        share = cached_share(folder)
        if share <= share_max:
            break
        time.sleep(PAUSE_S)
    return share


def cached_share(folder: Path) -> float:
    """The share of some files below ``folder`` whose middle can be read without the device."""
    found = files(folder)
    looked = found[:: max(1, len(found) // LOOKS_MAX)]
    return sum(_is_cached(path) for path in looked) / max(1, len(looked))


def can_be_cold(folder: Path) -> bool:
    """True if dropping takes effect on this file system; not in memory, which has nothing below the cache."""
    probe = folder / "cold-probe"
    probe.write_bytes(bytes(1 << 20))
    try:
        evict(folder)
        return not _is_cached(probe)
    except OSError:
        return False
    finally:
        probe.unlink()


def touch(folder: Path, size_bytes: int) -> None:
    """Writes so much to a file and deletes it: the first touch of memory is slow in a virtual machine."""
    block = bytes(8 << 20)
    with (folder / "touched").open("wb") as file:
        for _ in range(min(size_bytes, shutil.disk_usage(folder).free // 2) // len(block)):
            file.write(block)
    (folder / "touched").unlink()


def files(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names]


def _is_cached(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return False
        raise
    finally:
        os.close(descriptor)
