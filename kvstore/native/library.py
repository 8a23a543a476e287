"""Loads the native library and describes its structures; ``native.h`` is the other side.

Nothing is compiled here: the library is built when kvstore is installed (``.ci/build_native.py``). ctypes releases the
GIL for the whole of each call through ``library``, and keeps it through ``brief``, which is for calls of about a
microsecond: less than getting the GIL back takes.
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

ABI = 16
LIBRARY = Path(__file__).with_name("libkvstore.so")

DONE, ABSENT, FOUND, BLOCKED, OTHER, PUBLISHED = range(6)
"""Statuses of a chunk. DONE, FOUND and PUBLISHED are answers; after any other Python does the chunk from scratch."""

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
        ("descent", "<u8"),
        ("section_count", "<u4"),
        ("header_bytes", "<u4"),
        ("identity_bytes", "<u4"),
        ("depth", "<u4"),
        ("fd", "<i4"),
        ("status", "<i4"),
    ]
)
"""``kv_chunk``: pointers are plain addresses; the caller that fills them in keeps them valid."""

VERIFIED_BYTES = 8 * 8 + 8 + 8
"""The size of ``kv_verified``."""
MOVED_BYTES = 8 * 8 + 8 + 8 + 8
"""The size of ``kv_arrival``."""
ROWS_BYTES = MOVED_BYTES + 8 * 8 + 8
"""The size of ``kv_rows_arrival``."""
SENT_BYTES = 8 * 8 + 8 + 8
"""The size of ``kv_departure``."""


class Run(ctypes.Structure):
    """The ``kv_run`` of C: facts that all chunks of one call share."""

    _fields_ = (
        ("root", ctypes.c_char_p),
        ("session", ctypes.c_char_p),
        ("digest", ctypes.c_ubyte * 32),
        ("kind", ctypes.c_uint32),
        ("shard_bits", ctypes.c_uint32),
        ("may_wait", ctypes.c_uint32),
        ("durable", ctypes.c_uint32),
        ("direct", ctypes.c_uint32),
        ("from_images", ctypes.c_uint32),
    )


class Borrowed(ctypes.Structure):
    """The ``kv_borrowed`` of C: permission to write into a caller's memory."""

    _fields_ = (("stop", ctypes.c_int32), ("users", ctypes.c_int32))


class Turn(ctypes.Structure):
    """The ``kv_turn`` of C: one lane's turn at the chunks of a run."""

    _fields_ = (
        ("next", ctypes.POINTER(ctypes.c_int64)),
        ("step", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("files", ctypes.c_int64),
        ("header_bytes", ctypes.c_int64),
        ("told", ctypes.c_void_p),
        ("told_count", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
        ("abandoned", ctypes.POINTER(ctypes.c_int32)),
        ("time_ns", ctypes.c_int64),
    )


class Known(ctypes.Structure):
    """The ``kv_known`` of C: a table of ``kvstore.node.known``, as the addresses of its arrays."""

    _fields_ = (("prints", ctypes.c_void_p), ("marks", ctypes.c_void_p), ("mask", ctypes.c_uint64))


_INT, _INT32, _INT64 = ctypes.c_int, ctypes.c_int32, ctypes.c_int64
_UINT32, _UINT64 = ctypes.c_uint32, ctypes.c_uint64
_AT = ctypes.c_void_p
"""An address in memory: an integer, or a buffer of ctypes."""
_BYTES = ctypes.c_char_p
_RUN, _TURN, _BORROWED, _KNOWN = map(ctypes.POINTER, (Run, Turn, Borrowed, Known))

Function = tuple[type | None, tuple[type, ...]]

FUNCTIONS: dict[str, Function] = {
    "kv_abi": (_INT, ()),
    "kv_addresses": (None, (_BYTES, _BYTES, _AT, _UINT64, _UINT64, _AT)),
    "kv_addresses_each": (None, (_BYTES, _AT, _UINT64, _AT, _UINT64, _AT)),
    "kv_use_vectors": (_INT, (_INT,)),
    "kv_use_straight": (_INT, (_INT,)),
    "kv_use_width": (_INT, (_INT,)),
    "kv_use_rotation": (_INT, (_INT,)),
    "kv_checksum": (_UINT64, (_AT, _UINT64)),
    "kv_hash_begin": (None, (_AT,)),
    "kv_hash_absorb": (None, (_AT, _AT, _UINT64, _UINT64)),
    "kv_hash_end": (_UINT64, (_AT, _AT, _UINT64)),
    "kv_open": (None, (_RUN, _AT, _INT64)),
    "kv_close": (None, (_AT, _INT64)),
    "kv_read": (_INT64, (_RUN, _AT, _INT64, _BORROWED)),
    "kv_read_turn": (_INT, (_RUN, _AT, _INT64, _TURN, _BORROWED)),
    "kv_withdraw": (_INT, (_BORROWED,)),
    "kv_read_cold": (_INT64, (_INT, _AT, _UINT64, _UINT64)),
    "kv_read_direct": (_INT, (_INT,)),
    "kv_take": (_INT, (_RUN, _AT, _AT, _AT, _AT, _UINT64, _UINT64)),
    "kv_open_parts": (None, (_RUN, _AT, _INT64, _AT, _AT)),
    "kv_read_parts": (None, (_RUN, _AT, _INT64, _AT, _AT, _UINT32, _UINT32)),
    "kv_map_files": (None, (_RUN, _AT, _INT64, _AT)),
    "kv_map_at_most": (_INT64, (_INT64,)),
    "kv_look": (None, (_RUN, _AT, _INT64)),
    "kv_stage_turn": (_INT, (_RUN, _AT, _INT64, _TURN)),
    "kv_publish": (None, (_RUN, _AT, _AT, _INT64, _INT)),
    "kv_images_make": (None, (_RUN, _AT, _INT64, _AT)),
    "kv_images_take": (None, (_RUN, _AT, _INT64, _AT)),
    "kv_images_verify": (None, (_RUN, _AT, _INT64, _AT)),
    "kv_images_tables": (None, (_RUN, _AT, _INT64, _AT, _AT)),
    "kv_copy_rows": (None, (_AT, _AT, _INT64, _UINT64, _UINT64)),
    "kv_rotate": (None, (_AT, _INT64, _AT, _AT, _INT64, _INT64, _INT64, _INT64, _INT, _INT)),
    "kv_receive": (_INT, (_RUN, _AT, _AT, _AT, _INT)),
    "kv_receive_rows": (_INT, (_AT, _UINT32, _AT, _AT, _AT, _INT)),
    "kv_send": (_INT, (_AT, _AT, _AT, _INT)),
    "kv_known_add": (_INT64, (_KNOWN, _AT, _AT, _INT64, _INT32, _UINT32, _INT64, _AT)),
    "kv_known_have": (None, (_KNOWN, _BYTES, _INT64, _UINT32, _UINT32, _AT)),
    "kv_shared_add": (_INT64, (_AT, _INT64)),
    "kv_fence": (None, ()),
    "kv_known_forget": (None, (_KNOWN, _AT, _AT, _INT64, _INT32)),
}
"""The result and arguments of each function, as ``native.h`` declares them."""


def _load() -> tuple[Any, Any, str]:
    """Loads the library twice, releasing and keeping the GIL; or returns None and the reason."""
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
        for each in (found, keeping):
            _declare(each)
    except AttributeError:
        is_ours = False
    if not is_ours:
        return None, None, f"{LIBRARY} is of another version: install kvstore again"
    return found, keeping, ""


def _declare(found: Any) -> None:
    """Tells ctypes the types of all functions. Raises AttributeError if one is missing."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments


def _say(reason: str) -> None:
    """Warns unless pure Python was asked for: pip hides the build's messages, and all else works, only slower."""
    if reason and os.environ.get("KVSTORE_NATIVE", "") != "0":
        log.warning("native.missing kvstore runs in pure Python, which is slower: %s", reason)


library, brief, _reason = _load()
_say(_reason)


def is_available() -> bool:
    """True if the native data path is in use."""
    return library is not None


def why_not() -> str:
    """Returns why it is not in use; empty if it is."""
    return _reason
