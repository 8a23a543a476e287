"""KVTensor: an address and a length, readable through the buffer protocol.

A ctypes array, because before Python 3.12 no class written in Python can export a buffer of its own.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from operator import index
from typing import Any

LENGTHS_MAX = 1024
"""Maximum of cached array types, one for each length in use; a dropped one is made again."""


class KVTensor(ctypes.Array[ctypes.c_char]):
    """``length`` bytes at the address ``data``, which the caller keeps alive: ``KVTensor(k.ctypes.data, k.nbytes)``.

    Exports the buffer protocol (``np.frombuffer(tensor, dtype)``), one dimension of bytes, without a copy.
    ``KVTensor(0, 0)`` in a query asks the cache for memory; the tensor that takes its place owns that memory. Raises
    TypeError if an argument is not an integer, ValueError for a negative length.
    """

    _type_ = ctypes.c_char
    _length_ = 0

    def __new__(cls, data: int, length: int) -> KVTensor:
        """Makes a tensor over the caller's memory; nothing is read yet."""
        tensor: KVTensor = tensor_type(index(length)).from_address(index(data))
        return tensor

    def __init__(self, data: int, length: int) -> None:
        # ctypes would take the arguments for the first items of the array, and write them.
        pass

    @property
    def data(self) -> int:
        """The address."""
        return ctypes.addressof(self)

    @property
    def length(self) -> int:
        """Length in bytes."""
        return len(self)

    def __repr__(self) -> str:
        return f"KVTensor(data={self.data:#x}, length={self.length})"


@lru_cache(LENGTHS_MAX)
def tensor_type(length: int) -> Any:
    """Returns the type of tensors of ``length`` bytes: a ctypes array has its length in its type."""
    return type("KVTensor", (KVTensor,), {"_type_": ctypes.c_char, "_length_": length, "__module__": __name__})
