"""Opens a root from what a user types: a path or a URL."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from kvstore.core.validate import brief, kind_of
from kvstore.errors import InvalidRequest, PermissionDenied, RootMismatch, Unavailable
from kvstore.format.places import FOLDERS
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import FOLDER_MODE, PosixRoot

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_KNOWN = "a path, file:///path, memory://name, s3://bucket/prefix, or any URL of fsspec (gs://, az://, ...)"
_VIA_FSSPEC = "fsspec+"

_memory: dict[str, MemoryFiles] = {}
_memory_lock = threading.Lock()  # guards the roots of ``memory://`` by name


def open_root(url: str, options: Mapping[str, Any] | None = None, *, create: bool = True) -> Root:
    """Opens the root at ``url``; connects and tries the store unless it is a mounted file system.

    A path or ``file:///path`` is a folder, which is made if its parent exists and ``create`` allows it. With the option
    ``direct``, uncached data is read around the page cache (O_DIRECT), if the file system can. ``memory://name`` is one
    root for all callers in this process that open that name; ``memory://`` is a new one. Anything else goes through
    fsspec, with ``options``; ``fsspec+SCHEME://`` sends it there even if kvstore has a root of its own for the scheme.

    Raises InvalidRequest if it is not such a URL, RootMismatch if the folder's parent does not exist, PermissionDenied,
    Unavailable.
    """
    check_place(url, options)
    found = _URL.fullmatch(url)
    if found is None:
        if "://" in url or re.match(r"(file|memory|s3):", url):
            raise InvalidRequest(f"root {url!r} is not a URL; expected {_KNOWN}")
        return _open_folder(os.path.abspath(os.path.expanduser(url)), create, options)
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        return _open_folder(_file_path(url, rest), create, options)
    if scheme == "memory":
        return _open_memory(rest)
    return _open_remote(url, scheme, rest, options)


def check_place(url: object, options: object = None) -> None:
    """Raises InvalidRequest for what can be no place of a root, or no options of one. Looks at nothing."""
    if not isinstance(url, str) or not url or "\0" in unquote(url):
        raise InvalidRequest(f"root {brief(url)}: expected {_KNOWN}")
    try:
        url.encode()
    except UnicodeEncodeError as cause:
        raise InvalidRequest(f"root {brief(url)} is not valid Unicode: expected {_KNOWN}") from cause
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise InvalidRequest(
            f"root_options are {kind_of(options)}: expected names and values, such as {{'anon': True}}"
        )


def _file_path(url: str, rest: str) -> str:
    path = unquote(rest.removeprefix("localhost"))
    if not path.startswith("/"):
        raise InvalidRequest(f"root {url!r} names a host or a relative path: expected file:///absolute/path")
    return os.path.abspath(path)


def make_root_folder(path: str) -> None:
    """Makes the folder of a root if it is not there; its parent must be. Raises RootMismatch, InvalidRequest."""
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise InvalidRequest(f"root {path} is not a folder: give a folder") from None
    except FileNotFoundError as cause:
        parent = os.path.dirname(path)
        if os.path.isdir(parent):  # a file system such as /proc, which has no folders of ours
            raise InvalidRequest(f"root {path}: no folder can be made in {parent}; give another one") from cause
        raise RootMismatch(
            f"root {path}: {parent} does not exist; make it, or is the file system not mounted?"
        ) from cause
    except NotADirectoryError as cause:
        raise InvalidRequest(f"root {path}: {os.path.dirname(path)} is not a folder") from cause
    except PermissionError as cause:
        raise PermissionDenied(f"root {path}: not allowed to make that folder; make it, owned by this user") from cause
    except OSError as cause:
        raise Unavailable(f"root {path}: could not make that folder: {cause.strerror}; check the mount") from cause


def _open_folder(path: str, create: bool, options: Mapping[str, Any] | None) -> PosixRoot:
    if not create and not os.path.lexists(path):
        raise RootMismatch(f"root {path} does not exist: is the path right, and the file system mounted?")
    make_root_folder(path)
    _check_own(path)
    return PosixRoot(path, direct=bool((options or {}).get("direct")))


def _check_own(path: str) -> None:
    """Raises RootMismatch if a folder of the root is a symbolic link: it may lead to where others can read."""
    for folder in (os.path.join(path, name) for name in FOLDERS):
        if os.path.islink(folder):
            raise RootMismatch(f"{folder} is a symbolic link: the folders of a root must be its own; remove the link")


def _open_memory(name: str) -> MemoryRoot:
    if not name:
        return MemoryRoot()
    with _memory_lock:
        files = _memory.setdefault(name, MemoryFiles())
    return MemoryRoot(files, name=name)


def _open_remote(url: str, scheme: str, rest: str, options: Mapping[str, Any] | None) -> Root:
    scheme = scheme.removeprefix(_VIA_FSSPEC)
    import fsspec

    from kvstore.root.object_store import open_object_root

    if scheme not in fsspec.available_protocols():
        raise InvalidRequest(f"root {url!r}: unknown scheme {scheme!r}; expected {_KNOWN}")
    if "::" in rest:
        raise InvalidRequest(
            f"root {url!r}: chained file systems keep copies that other hosts do not see; give one URL"
        )
    return open_object_root(f"{scheme}://{rest}", options)
