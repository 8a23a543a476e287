"""The caller's tensors, scattered over its memory, as one array: gathered before a put, scattered after a get.

Both are one numpy call over all tensors, which runs at the speed of a memory copy and without the GIL. It treats memory
as an array of overlapping rows, one starting at every byte, and picks those that begin at the tensors' addresses.
"""

from __future__ import annotations

import ctypes
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.connectors.vineyard.errors import InvalidCall
from kvstore.connectors.vineyard.tensor import KVTensor, tensor_type

ByteArray = npt.NDArray[np.int8]
KVCacheList = list[list[tuple[KVTensor, KVTensor]]]
"""``kv_cache_list[i][j]`` is K and V of token i at layer j."""

ROW_BYTES_MAX = 16_384
"""Larger tensors are copied one by one: a call for each costs little then, and numpy limits rows times row size."""


class Tensors:
    """K and V of each token and layer, by address."""

    def __init__(self, kv_cache_list: Any, layers: int, tensor_bytes: int) -> None:
        """Takes the addresses out of the list; raises InvalidCall for another shape or other tensors."""
        self._tensor_bytes = tensor_bytes
        flat = _flattened(kv_cache_list, layers)
        lengths = _lengths(flat)
        self.count = len(kv_cache_list)
        self.wants_memory = lengths == {0}
        """True if every tensor is ``KVTensor(0, 0)``."""
        try:
            addresses = np.fromiter(map(ctypes.addressof, flat), np.intp, len(flat))
        except OverflowError:
            raise InvalidCall(
                "a KVTensor points outside of memory: expected an address such as array.ctypes.data"
            ) from None
        if not self.wants_memory:
            if lengths != {tensor_bytes}:
                raise InvalidCall(
                    f"KVTensors have lengths {sorted(lengths)}: expected {tensor_bytes} for all, as tensor_nbytes says"
                )
            if addresses.min() <= 0:
                raise InvalidCall("a KVTensor has no address: expected one such as array.ctypes.data")
        self._addresses = addresses.reshape(self.count, layers, 2)

    def gather(self, first: int, end: int) -> ByteArray:
        """Copies tokens ``first`` to ``end`` into one array of shape ``(layers, 2, end - first, 1, tensor_bytes)``."""
        addresses = self._by_plane(first, end)
        if addresses.size and self._tensor_bytes <= ROW_BYTES_MAX:
            rows, low = _rows(addresses, self._tensor_bytes)
            gathered = rows[addresses - low][..., np.newaxis].view(np.int8)
        else:
            gathered = np.empty((*addresses.shape, self._tensor_bytes), np.int8)
            for address, target in zip(addresses.flat, gathered.reshape(-1, self._tensor_bytes), strict=True):
                np.copyto(target, _at(int(address), self._tensor_bytes))
        return gathered[:, :, :, np.newaxis]

    def scatter(self, values: ByteArray) -> None:
        """Copies ``values``, of shape ``(layers, 2, n, 1, tensor_bytes)``, into the tensors of the first n tokens."""
        addresses = self._by_plane(0, values.shape[2])
        source = values[:, :, :, 0]
        if self._tensor_bytes <= ROW_BYTES_MAX:
            rows, low = _rows(addresses, self._tensor_bytes)
            rows[addresses - low] = source.view(rows.dtype)[..., 0]
        else:
            for place in np.ndindex(*addresses.shape):
                np.copyto(_at(int(addresses[place]), self._tensor_bytes), source[place])

    def _by_plane(self, first: int, end: int) -> npt.NDArray[np.intp]:
        return np.ascontiguousarray(self._addresses[first:end].transpose(1, 2, 0))


def give_memory(kv_cache_list: KVCacheList, values: ByteArray) -> None:
    """Puts tensors over ``values``, of shape ``(layers, 2, n, 1, tensor_bytes)``, into the list's first n entries.

    The tensors keep the memory alive until the last of them, and of the arrays made over them, is gone.
    """
    values = np.ascontiguousarray(values)
    layers, _, count, _, tensor_bytes = values.shape
    over = tensor_type(tensor_bytes).from_buffer
    plane_bytes = count * tensor_bytes
    filled: set[int] = set()
    for token in range(count):
        offsets = range(token * tensor_bytes, values.nbytes, plane_bytes)
        row = [(over(values, offsets[2 * layer]), over(values, offsets[2 * layer + 1])) for layer in range(layers)]
        given = kv_cache_list[token]
        if isinstance(given, list) and id(given) not in filled:
            filled.add(id(given))
            given[:] = row
        else:
            # One inner list may stand for several tokens, as in [row] * n: each token gets its own list.
            kv_cache_list[token] = row


class _Rows:
    """Memory from ``low`` on, as an array whose element i is the row of ``row_bytes`` bytes at ``low + i``."""

    def __init__(self, low: int, count: int, row_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (low, False),
            "typestr": f"|V{row_bytes}",
            "shape": (count,),
            "strides": (1,),
        }


def _rows(addresses: npt.NDArray[np.intp], row_bytes: int) -> tuple[npt.NDArray[np.void], int]:
    """Returns rows that cover all addresses, and the address of row 0. Only the picked rows are ever touched."""
    low, high = int(addresses.min()), int(addresses.max())
    return np.asarray(_Rows(low, high - low + 1, row_bytes)), low


def _at(address: int, size: int) -> ByteArray:
    return np.frombuffer(memoryview(KVTensor(address, size)), np.int8)


def _flattened(kv_cache_list: Any, layers: int) -> list[Any]:
    """Returns all tensors in one list: token by token, layer by layer, K then V."""
    try:
        if set(map(len, kv_cache_list)) != {layers}:
            token = next(at for at, row in enumerate(kv_cache_list) if len(row) != layers)
            raise InvalidCall(
                f"kv_cache_list[{token}] has {len(kv_cache_list[token])} entries: expected {layers}, one per layer"
            )
        pairs = list(chain.from_iterable(kv_cache_list))
        if set(map(len, pairs)) != {2}:
            raise InvalidCall("an entry of kv_cache_list is not a pair: expected (K, V), two KVTensors")
        return list(chain.from_iterable(pairs))
    except TypeError as cause:
        raise InvalidCall(f"kv_cache_list is not a list of lists of pairs (K, V): {cause}") from cause


def _lengths(flat: list[Any]) -> set[int]:
    """Returns the distinct lengths; a ctypes array's length is part of its type, so few types need a look."""
    lengths = set()
    for kind in set(map(type, flat)):
        if not issubclass(kind, KVTensor):
            raise InvalidCall(f"kv_cache_list holds a {kind.__name__}: expected KVTensor")
        lengths.add(kind._length_)
    return lengths
