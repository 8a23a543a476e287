"""KV that its tokens determine, and the lists of KVTensors that Vineyard's calls take over it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.connectors.vineyard import KVTensor

Bytes = npt.NDArray[np.uint8]
KVList = list[list[tuple[KVTensor, KVTensor]]]


def kv_of(tokens: Sequence[int], layers: int, tensor_nbytes: int) -> Bytes:
    """KV of each token, determined by it and all before it; shape (tokens, layers, 2, tensor_nbytes)."""
    rows, prefix = [], hashlib.blake2b()
    for token in tokens:
        prefix.update(int(token).to_bytes(8, "little", signed=True))
        rng = np.random.default_rng(int.from_bytes(prefix.digest()[:8], "little"))
        rows.append(rng.integers(0, 256, (layers, 2, tensor_nbytes), dtype=np.uint8))
    return np.array(rows, dtype=np.uint8).reshape(-1, layers, 2, tensor_nbytes)


def over(array: npt.NDArray[Any]) -> KVList:
    """KVTensors over an array of shape (tokens, layers, 2, tensor_nbytes), which must outlive them."""
    tokens, layers, _, size = array.shape

    def tensor(token: int, layer: int, which: int) -> KVTensor:
        return KVTensor(array[token, layer, which].ctypes.data, size)

    return [[(tensor(i, j, 0), tensor(i, j, 1)) for j in range(layers)] for i in range(tokens)]


def asking(tokens: int, layers: int) -> KVList:
    """A list of empty tensors, for memory that the cache gives."""
    return [[(KVTensor(0, 0), KVTensor(0, 0)) for _ in range(layers)] for _ in range(tokens)]


def bytes_in(kv_list: KVList) -> Bytes:
    """Returns the bytes that the tensors of a list point at; shape (tokens, layers, 2, tensor_nbytes)."""
    return np.array([[[array_over(each) for each in pair] for pair in row] for row in kv_list])


def array_over(tensor: Any) -> Bytes:
    """The tensor's bytes without a copy; Any, because numpy's type stubs do not take every buffer."""
    return np.frombuffer(tensor, np.uint8)
