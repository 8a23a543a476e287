"""The native library: its structures and functions, and the same functions in Python; ``native.h`` is the other side.

Nothing is compiled here: the library is built when kvstore is installed (``.ci/build_native.py``). ctypes releases the
GIL for the whole of each call through ``library``, and keeps it through ``brief``, which is for calls of about a
microsecond: less than getting the GIL back takes.

Without the library both are ``PurePython``, so callers do not ask which it is. The functions that move files and
sockets have no twin, because Python does those in another way: there callers ask ``is_available``.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

ABI = 18
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


class Common(ctypes.Structure):
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


class WritePermit(ctypes.Structure):
    """The ``kv_borrowed`` of C: permission to write into a caller's memory."""

    _fields_ = (("stop", ctypes.c_int32), ("users", ctypes.c_int32))


class Turn(ctypes.Structure):
    """The ``kv_turn`` of C: one thread's turn at the chunks of a run."""

    _fields_ = (
        ("next", ctypes.POINTER(ctypes.c_int64)),
        ("step", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("files", ctypes.c_int64),
        ("header_bytes", ctypes.c_int64),
        ("reported", ctypes.c_void_p),
        ("reported_count", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
        ("abandoned", ctypes.POINTER(ctypes.c_int32)),
        ("time_ns", ctypes.c_int64),
    )


class PresenceTable(ctypes.Structure):
    """The ``kv_known`` of C: a table of ``kvstore.engine.chunk_store``, as the addresses of its arrays."""

    _fields_ = (("prints", ctypes.c_void_p), ("marks", ctypes.c_void_p), ("mask", ctypes.c_uint64))


_INT, _INT32, _INT64 = ctypes.c_int, ctypes.c_int32, ctypes.c_int64
_UINT32, _UINT64 = ctypes.c_uint32, ctypes.c_uint64
_AT = ctypes.c_void_p
"""An address in memory: an integer, or a buffer of ctypes."""
_BYTES = ctypes.c_char_p
_RUN, _TURN, _BORROWED, _KNOWN = map(ctypes.POINTER, (Common, Turn, WritePermit, PresenceTable))

Function = tuple[type | None, tuple[type, ...]]

FUNCTIONS: dict[str, Function] = {
    "kv_abi": (_INT, ()),
    "kv_addresses": (None, (_BYTES, _BYTES, _AT, _UINT64, _UINT64, _AT)),
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
    "kv_shared_add": (_INT64, (_INT, _AT, _INT64)),
    "kv_known_forget": (None, (_KNOWN, _AT, _AT, _INT64, _INT32)),
}
"""The result and arguments of each function, as ``native.h`` declares them."""


CHUNK_PERSON = b"kvstore.chunk.1"
"""What sets the hash of a chunk's address apart from others, as in ``addresses.c``."""
WAYS = 8
"""Entries in a row of the presence table, as in ``shared.c``."""
ROTATED = ("bfloat16", "float16", "float32")
"""Types of keys that can be rotated, by their numbers in ``rotate.c``."""
HEADS_AT_ONCE = 1 << 15
"""Heads that numpy rotates at a time: some tens of MiB of float32."""


def memory_at(address: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns ``count`` elements of memory that the caller keeps alive."""
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    found: npt.NDArray[Any] = np.frombuffer(memoryview(memory), dtype)
    return found


class PurePython:
    """The functions of the library in Python: the same arguments and results, as plain as possible."""

    @staticmethod
    def kv_addresses(
        digest: bytes, parent: bytes, packed: int | bytes, chunk_bytes: int, count: int, addresses: Any
    ) -> None:
        tokens, found = _array(packed, count * chunk_bytes, np.uint8).data, list[bytes]()
        # A copy of a state that has the key in it costs a third of making one.
        keyed = blake2b(digest_size=16, key=digest, person=CHUNK_PERSON).copy
        for at in range(0, count * chunk_bytes, chunk_bytes):
            state = keyed()
            state.update(parent)
            state.update(tokens[at : at + chunk_bytes])
            parent = state.digest()
            found.append(parent)
        _array(addresses, 16 * count, np.uint8)[:] = np.frombuffer(b"".join(found), np.uint8)

    @staticmethod
    def kv_withdraw(borrowed: WritePermit) -> int:
        borrowed.stop = 1
        users: int = borrowed.users
        return users

    @staticmethod
    def kv_images_make(run: Common, chunks: int, count: int, images: int) -> None:
        """Leaves every chunk to Python, as the library does with an image that is not right."""
        memory_at(chunks, count, CHUNK)["status"] = OTHER

    kv_images_take = kv_images_verify = kv_images_make

    @staticmethod
    def kv_copy_rows(to: int, source: int, count: int, start: int, size: int) -> None:
        for one, other in zip(memory_at(to, count, np.uint64), memory_at(source, count, np.uint64), strict=True):
            ctypes.memmove(int(one) + start, int(other) + start, size)

    @staticmethod
    def kv_rotate(
        planes: int,
        plane_count: int,
        cosines: int,
        sines: int,
        count: int,
        heads: int,
        head_dim: int,
        pairs: int,
        type: int,
        interleaved: int,
    ) -> None:
        low, high = (slice(pairs), slice(pairs, 2 * pairs))
        if interleaved:
            low, high = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        tables = [memory_at(each, count * pairs, np.float32).reshape(count, 1, pairs) for each in (cosines, sines)]
        step = max(1, HEADS_AT_ONCE // heads)
        for plane in memory_at(planes, plane_count, np.uint64):
            rows = memory_at(int(plane), count * heads * head_dim, ROTATED[type]).reshape(count, heads, head_dim)
            for start in range(0, count, step):
                some = rows[start : start + step]
                cos, sin = (table[start : start + step] for table in tables)
                a, b = some[..., low].astype(np.float32), some[..., high].astype(np.float32)
                some[..., low], some[..., high] = a * cos - b * sin, b * cos + a * sin

    @staticmethod
    def kv_shared_add(file: int, number: int, delta: int) -> int:
        """A lock of the file makes it one step for all processes; threads of one process exclude each other."""
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            shared = ctypes.c_int64.from_address(number)
            shared.value += delta
            return shared.value
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    @staticmethod
    def kv_known_have(known: PresenceTable, addresses: bytes, count: int, least: int, bits: int, found: int) -> None:
        prints, marks = _table(known)
        wanted = np.frombuffer(addresses, "<u8")[::2]
        rows = (wanted & np.uint64(known.mask)).astype(np.intp)
        # Read marks before prints, because writers set prints before marks: otherwise an address whose entry another
        # one is taking at this moment would be found with the other's mark.
        seen = marks.take(rows, axis=0)
        fits = (prints.take(rows, axis=0) == wanted[:, None]) & (seen >= least) & (seen & bits == bits)
        memory_at(found, count, np.bool_)[:] = fits.any(axis=1)

    @staticmethod
    def kv_known_add(
        known: PresenceTable | None,
        chunks: int,
        places: int | None,
        count: int,
        status: int,
        mark: int,
        renewed_ns: int,
        payload: int,
    ) -> int:
        some = _with_status(chunks, places, count, status)
        if known is not None:
            prints, marks = _table(known)
            renewed = (some["mtime_ns"] >= renewed_ns).tolist()
            for wanted, fresh in zip(_prints(some), [mark | each for each in renewed], strict=True):
                row = wanted & known.mask
                entries, seen = prints[row].tolist(), marks[row].tolist()
                if wanted in entries:
                    way = entries.index(wanted)
                    if seen[way] & 1 and seen[way] >= fresh:
                        continue
                else:
                    way = seen.index(min(seen))
                prints[row, way], marks[row, way] = wanted, fresh
        ctypes.c_uint64.from_address(payload).value = int((some["section_count"] * some["section_bytes"]).sum())
        return len(some)

    @staticmethod
    def kv_known_forget(known: PresenceTable, chunks: int, places: int | None, count: int, status: int) -> None:
        prints, marks = _table(known)
        for wanted in _prints(_with_status(chunks, places, count, status)):
            marks[wanted & known.mask][prints[wanted & known.mask] == wanted] = 0


def _array(given: Any, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns what a caller gave as an address, as bytes, or as an array of ctypes."""
    return memory_at(given, count, dtype) if isinstance(given, int) else np.frombuffer(given, dtype, count)


def _table(known: PresenceTable) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Returns the prints and marks of a table, row by row."""
    rows = known.mask + 1
    prints, marks = memory_at(known.prints, rows * WAYS, np.uint64), memory_at(known.marks, rows * WAYS, np.uint32)
    return prints.reshape(rows, WAYS), marks.reshape(rows, WAYS)


def _with_status(chunks: int, places: int | None, count: int, status: int) -> npt.NDArray[Any]:
    """Returns those of the chunks at some places, or of the first ``count``, that have a status."""
    if places is None:
        some = memory_at(chunks, count, CHUNK)
    else:
        at = memory_at(places, count, np.int32)
        some = memory_at(chunks, int(at.max(initial=-1)) + 1, CHUNK)[at]
    found: npt.NDArray[Any] = some[some["status"] == status]
    return found


def _prints(chunks: npt.NDArray[Any]) -> list[int]:
    """Returns the first eight bytes of the addresses of chunks, as numbers."""
    prints: list[int] = np.frombuffer(chunks["address"].tobytes(), "<u8")[::2].tolist()
    return prints


def _load() -> tuple[Any, Any, str]:
    """Loads the library twice, releasing and keeping the GIL; or returns the twins and the reason."""
    if os.environ.get("KVSTORE_NATIVE", "") == "0":
        return PurePython, PurePython, "turned off by KVSTORE_NATIVE=0"
    if sys.byteorder != "little":
        return PurePython, PurePython, "this machine is big-endian"
    if not LIBRARY.exists():
        return PurePython, PurePython, f"{LIBRARY} was not built: install kvstore again with a C compiler at hand"
    try:
        found, keeping = ctypes.CDLL(str(LIBRARY)), ctypes.PyDLL(str(LIBRARY))
    except OSError as cause:
        return PurePython, PurePython, f"{LIBRARY} cannot be loaded ({cause}): install kvstore again"
    try:
        is_ours = found.kv_abi() == ABI
        for each in (found, keeping):
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(each, name)  # AttributeError if it is missing
                function.restype, function.argtypes = result, arguments
    except AttributeError:
        is_ours = False
    if not is_ours:
        return PurePython, PurePython, f"{LIBRARY} is of another version: install kvstore again"
    return found, keeping, ""


library, brief, _reason = _load()
if _reason and os.environ.get("KVSTORE_NATIVE", "") != "0":
    # Not if pure Python was asked for. pip hides the build's messages, and all else works, only slower.
    log.warning("native.missing kvstore runs in pure Python, which is slower: %s", _reason)


def is_available() -> bool:
    """True if the native data path is in use."""
    return library is not PurePython


def why_not() -> str:
    """Returns why it is not in use; empty if it is."""
    return _reason
