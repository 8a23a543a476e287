"""Files mapped by native code, as arrays: they keep no descriptor, and are unmapped without a call of Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_TENSOR = b"dltensor"
_ON_CPU = (1, 0)


class _Mapped:
    """A ``kv_mapping`` by its address, which it hands over to one array by DLPack."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __dlpack__(self, **_: object) -> object:
        return _new_capsule(self._address, _TENSOR, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU


def mapped(address: int) -> memoryview:
    """Returns the bytes that a ``kv_mapping`` maps, read-only; unmapped when no slice of them lives."""
    return memoryview(np.from_dlpack(_Mapped(address)))  # type: ignore[arg-type]
