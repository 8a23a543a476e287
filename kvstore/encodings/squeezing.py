"""Compression of sections: byte planes apart, then zstd.

Neighbouring elements of KV have similar exponents, and mantissas like noise. Once they are apart, the exponents shrink
and the mantissas cost little to pass over. Lossless, and each section separately, so that one can be read without the
others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.buffers import ReadBuffer
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damage, Damaged

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

LEVEL = 1
"""The level of zstd. Higher levels are slower and gain nothing on KV (benchmarks/NOTES.md)."""

_own = threading.local()
"""zstd's contexts are for one thread at a time, and making one costs more than a small section."""


def is_available() -> bool:
    """True if the library is installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def check_available() -> None:
    """Raises InvalidRequest if the library is not installed."""
    if not is_available():
        raise InvalidRequest("compression needs a library: pip install 'kvstore-llm[compression]'")


def squeeze(section: memoryview, itemsize: int) -> bytes | memoryview:
    """Compresses a section; returns the section itself if that would not be shorter."""
    compressor: ZstdCompressor | None = getattr(_own, "compressor", None)
    if compressor is None:
        from zstandard import ZstdCompressor

        compressor = _own.compressor = ZstdCompressor(level=LEVEL, write_content_size=True)
    made = compressor.compress(split_planes(section, itemsize))
    return made if len(made) < len(section) else section


def stretch(stored: ReadBuffer, section: memoryview, itemsize: int) -> None:
    """Decompresses what ``squeeze`` returned into ``section``. Raises Damaged if the result does not fit."""
    if len(stored) == len(section):
        section[:] = stored
        return
    join_planes(_decompressed(stored, len(section)), itemsize, section)


def _decompressed(stored: ReadBuffer, size_bytes: int) -> bytes:
    import zstandard

    decompressor: ZstdDecompressor | None = getattr(_own, "decompressor", None)
    if decompressor is None:
        decompressor = _own.decompressor = zstandard.ZstdDecompressor()
    try:
        # Check the size before use: a frame that claims more would allocate that much.
        if zstandard.frame_content_size(stored) != size_bytes:
            raise Damaged(Damage.ENCODING)
        planes = decompressor.decompress(stored)
    except zstandard.ZstdError:
        raise Damaged(Damage.ENCODING) from None
    if len(planes) != size_bytes:
        raise Damaged(Damage.ENCODING)
    return planes


def split_planes(section: memoryview, itemsize: int) -> memoryview:
    """Returns all first bytes of elements, then all second ones, and so on; bytes that fill no element come last."""
    whole = len(section) - len(section) % itemsize
    if itemsize == 1 or not whole:
        return section
    planes = np.empty(len(section), np.uint8)
    elements = np.frombuffer(section, np.uint8, whole).reshape(-1, itemsize)
    planes[:whole].reshape(itemsize, -1)[:] = elements.T
    planes[whole:] = np.frombuffer(section[whole:], np.uint8)
    return planes.data


def join_planes(planes: ReadBuffer, itemsize: int, section: memoryview) -> None:
    """Joins the planes that ``split_planes`` made, into ``section``."""
    whole = len(section) - len(section) % itemsize
    if itemsize == 1 or not whole:
        section[:] = planes
        return
    split = np.frombuffer(planes, np.uint8, whole).reshape(itemsize, -1)
    joined = np.frombuffer(section, np.uint8, whole)
    for at in range(itemsize):  # plane by plane is eight times as fast as a transposed copy
        joined[at::itemsize] = split[at]
    section[whole:] = memoryview(planes)[whole:]
