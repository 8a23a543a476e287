"""Mapped files that keep no descriptor, so that a process may have many of them; native code maps them.

Unmapped when nothing cut from them lives any more.  Bounded for the whole process, because the allocators of the engine
beside need mappings as well.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import lru_cache
from typing import Any

from kvstore.native import library as native

MAPPED_MAX = 16_384
"""A quarter of the mappings that Linux lets a process have (``vm.max_map_count``)."""

_lock = threading.Lock()
_mapped_count = 0


def reserve(count: int) -> int:
    """How many of ``count`` files may be mapped now; each is then for ``view``, or ``give_back``."""
    global _mapped_count
    with _lock:
        granted = max(0, min(count, MAPPED_MAX - _mapped_count))
        _mapped_count += granted
    return granted


def give_back(count: int) -> None:
    """So many are not mapped."""
    global _mapped_count
    with _lock:
        _mapped_count -= count


def view(address: int, size_bytes: int) -> memoryview:
    """A mapped file, read-only, which is unmapped when neither it nor anything cut from it lives any more."""
    mapping = _type(size_bytes).from_address(address)
    weakref.finalize(mapping, _unmap, address, size_bytes).atexit = False
    return memoryview(mapping).toreadonly().cast("B")


def _unmap(address: int, size_bytes: int) -> None:
    native.library.kv_unmap(address, size_bytes)
    give_back(1)


@lru_cache(maxsize=64)
def _type(size_bytes: int) -> Any:
    """An array that can be referred to weakly, as those of ctypes itself cannot."""
    return type("Mapping", (ctypes.c_ubyte * size_bytes,), {})
