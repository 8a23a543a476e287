"""The file that a reordered batch is written to. Apart from ``file``, because its rules are about the path alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvstore.errors import InvalidRequest

NEW_MODE = 0o666


def replace_file(output: Path, pieces: Iterable[bytes], source: Path) -> None:
    """Writes ``pieces``, made from the file ``source``. A file is replaced once all is written, and keeps its mode.

    A symlink stays one: its target is written. Raises InvalidRequest if ``output`` is ``source``, or neither a regular
    file nor absent; and OSError.
    """
    mode = _mode_of(output, source)
    target = Path(os.path.realpath(output))
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "xb", opener=lambda path, flags: os.open(path, flags, mode or NEW_MODE)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # opening takes away what the umask says
            file.writelines(pieces)
        staged.replace(target)
    finally:
        with suppress(OSError):  # it is the output now, or its folder is gone
            staged.unlink()


def _mode_of(output: Path, source: Path) -> int | None:
    """The mode of the file that is replaced; None if there is none."""
    try:
        found = output.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"the output {str(output)!r} is a folder: give a file")
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"the output {str(output)!r} is a device or a pipe: give a file, and read it afterwards")
    if output.samefile(source):
        raise InvalidRequest(f"the output {str(output)!r} is the batch itself: give another file")
    return stat.S_IMODE(found.st_mode)
