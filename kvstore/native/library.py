"""Loads the native library and describes its structures; ``native.h`` is the other side.

Nothing is compiled here: the library is built when kvstore is installed (``.ci/build_native.py``).  ctypes releases the
GIL for the whole of each call through ``library``, and keeps it through ``brief``: for what takes a microsecond, less
than getting the GIL back.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

ABI = 6
LIBRARY = Path(__file__).with_name("libkvstore.so")

DONE, ABSENT, FOUND, BLOCKED, OTHER, PUBLISHED = range(6)
"""What came of a chunk. DONE, FOUND and PUBLISHED are answers; after any other Python does the chunk from scratch."""

CHUNK = np.dtype(
    [
        ("address", "V16"),
        ("parent", "V16"),
        ("incarnation", "V16"),
        ("identity", "<u8"),
        ("bases", "<u8"),
        ("offset", "<u8"),
        ("section_bytes", "<u8"),
        ("number", "<u8"),
        ("mtime_ns", "<i8"),
        ("section_count", "<u4"),
        ("header_bytes", "<u4"),
        ("identity_bytes", "<u4"),
        ("depth", "<u4"),
        ("fd", "<i4"),
        ("status", "<i4"),
    ]
)
"""``kv_chunk``: pointers are plain addresses, kept valid by whoever fills them in."""

VERIFIED_BYTES = 8 * 8 + 8 + 8
"""``kv_verified``."""
MOVED_BYTES = 8 * 8 + 8 + 8 + 8
"""``kv_arrival`` and ``kv_departure``."""


class Run(ctypes.Structure):
    """``kv_run``: what all chunks of one call have in common."""

    _fields_ = (
        ("root", ctypes.c_char_p),
        ("session", ctypes.c_char_p),
        ("digest", ctypes.c_ubyte * 32),
        ("kind", ctypes.c_uint32),
        ("shard_bits", ctypes.c_uint32),
        ("may_wait", ctypes.c_uint32),
        ("durable", ctypes.c_uint32),
        ("direct", ctypes.c_uint32),
    )


class Borrowed(ctypes.Structure):
    """``kv_borrowed``."""

    _fields_ = (("stop", ctypes.c_int32), ("users", ctypes.c_int32))


class Turn(ctypes.Structure):
    """``kv_turn``."""

    _fields_ = (
        ("next", ctypes.POINTER(ctypes.c_int64)),
        ("step", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("files", ctypes.c_int64),
        ("header_bytes", ctypes.c_int64),
        ("told", ctypes.c_void_p),
        ("told_count", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
    )


class Known(ctypes.Structure):
    """``kv_known``: a table of ``kvstore.node.known``, by the addresses of its arrays."""

    _fields_ = (("prints", ctypes.c_void_p), ("marks", ctypes.c_void_p), ("mask", ctypes.c_uint64))


def _load() -> tuple[Any, Any, str]:
    """The library, releasing and keeping the GIL, or None with the reason."""
    if os.environ.get("KVSTORE_NATIVE", "") == "0":
        return None, None, "turned off by KVSTORE_NATIVE=0"
    if sys.byteorder != "little":
        return None, None, "this machine is big-endian"
    if not LIBRARY.exists():
        return None, None, f"{LIBRARY} was not built: install kvstore again with a C compiler at hand"
    try:
        found, keeping = ctypes.CDLL(str(LIBRARY)), ctypes.PyDLL(str(LIBRARY))
    except OSError as cause:
        return None, None, f"{LIBRARY} cannot be loaded ({cause}): install kvstore again"
    try:
        is_ours = found.kv_abi() == ABI
        _describe(found)
        _describe_brief(keeping)
    except AttributeError:
        is_ours = False
    if not is_ours:
        return None, None, f"{LIBRARY} is of another version: install kvstore again"
    return found, keeping, ""


def _describe(found: Any) -> None:
    """Tells ctypes the types of what is called. Raises AttributeError where something is missing."""
    pointer, run = ctypes.c_void_p, ctypes.POINTER(Run)
    found.kv_checksum.argtypes, found.kv_checksum.restype = (pointer, ctypes.c_uint64), ctypes.c_uint64
    found.kv_use_width.argtypes = found.kv_use_vectors.argtypes = (ctypes.c_int,)
    found.kv_hash_begin.argtypes, found.kv_hash_begin.restype = (pointer,), None
    found.kv_hash_absorb.argtypes = (pointer, pointer, ctypes.c_uint64, ctypes.c_uint64)
    found.kv_hash_absorb.restype = None
    found.kv_hash_end.argtypes = (pointer, pointer, ctypes.c_uint64)
    found.kv_hash_end.restype = ctypes.c_uint64
    for name in ("kv_look", "kv_open"):
        each = getattr(found, name)
        each.argtypes, each.restype = (run, pointer, ctypes.c_int64), None
    found.kv_map_files.argtypes, found.kv_map_files.restype = (run, pointer, ctypes.c_int64, pointer), None
    found.kv_map_at_most.argtypes, found.kv_map_at_most.restype = (ctypes.c_int64,), ctypes.c_int64
    borrowed = ctypes.POINTER(Borrowed)
    found.kv_read.argtypes = (run, pointer, ctypes.c_int64, borrowed)
    found.kv_read_turn.argtypes = (run, pointer, ctypes.c_int64, ctypes.POINTER(Turn), borrowed)
    found.kv_read.restype = ctypes.c_int64
    found.kv_stage_turn.argtypes = (run, pointer, ctypes.c_int64, ctypes.POINTER(Turn))
    found.kv_publish.argtypes, found.kv_publish.restype = (run, pointer, pointer, ctypes.c_int64, ctypes.c_int), None
    for name in ("kv_images_make", "kv_images_take", "kv_images_verify"):
        each = getattr(found, name)
        each.argtypes, each.restype = (run, pointer, ctypes.c_int64, pointer), None
    found.kv_copy_rows.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64)
    found.kv_copy_rows.restype = None
    found.kv_close.argtypes, found.kv_close.restype = (pointer, ctypes.c_int64), None
    found.kv_read_cold.argtypes = (ctypes.c_int, pointer, ctypes.c_uint64, ctypes.c_uint64)
    found.kv_read_cold.restype = ctypes.c_int64
    found.kv_read_direct.argtypes = (ctypes.c_int,)
    for name in ("kv_open_parts", "kv_images_tables"):
        each = getattr(found, name)
        each.argtypes, each.restype = (run, pointer, ctypes.c_int64, pointer, pointer), None
    found.kv_read_parts.argtypes = (run, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_uint32, ctypes.c_uint32)
    found.kv_read_parts.restype = None
    found.kv_receive.argtypes = (run, pointer, pointer, pointer, ctypes.c_int)
    found.kv_receive_rows.argtypes = (pointer, pointer, pointer, ctypes.c_int)
    found.kv_send.argtypes = (pointer, pointer, pointer, ctypes.c_int)
    found.kv_take.argtypes = (run, pointer, pointer, pointer, pointer, ctypes.c_uint64, ctypes.c_uint64)


def _describe_brief(found: Any) -> None:
    """The same for what is called through ``brief``."""
    pointer, known = ctypes.c_void_p, ctypes.POINTER(Known)
    found.kv_known_add.argtypes = (
        known, pointer, pointer, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, pointer,
    )  # fmt: skip
    found.kv_known_add.restype = ctypes.c_int64
    found.kv_known_forget.argtypes = (known, pointer, pointer, ctypes.c_int64, ctypes.c_int32)
    found.kv_known_forget.restype = None
    found.kv_withdraw.argtypes = (ctypes.POINTER(Borrowed),)


def _say(reason: str) -> None:
    """Warns where nobody asked for pure Python: pip hides what the build said, and all else works, only slower."""
    if reason and os.environ.get("KVSTORE_NATIVE", "") != "0":
        log.warning("native.missing kvstore runs in pure Python, which is slower: %s", reason)


library, brief, _reason = _load()
_say(_reason)


def is_available() -> bool:
    """Whether the native data path is in use."""
    return library is not None


def why_not() -> str:
    """Why it is not in use; empty where it is."""
    return _reason
