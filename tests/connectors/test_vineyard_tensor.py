"""KVTensor: an address, a length, and the buffer protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.connectors.vineyard import KVTensor
from tests.kit.cases import for_each


def test_reads_the_callers_memory_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor: Any = KVTensor(array.ctypes.data, array.nbytes)
    seen = np.frombuffer(tensor, dtype=np.float32).reshape(2, 3)
    array[1, 2] = -7.0
    assert np.array_equal(seen, array)
    assert (tensor.data, tensor.length) == (array.ctypes.data, 24)


def test_is_a_one_dimensional_buffer_of_bytes() -> None:
    array = np.frombuffer(b"four bytes and more", np.uint8)
    view = memoryview(KVTensor(array.ctypes.data, 4))
    assert (view.ndim, view.itemsize, view.nbytes, view.contiguous) == (1, 1, 4, True)
    assert bytes(view) == b"four"


def test_is_one_class_whatever_the_length() -> None:
    array = np.zeros(32, np.uint8)
    short, long = KVTensor(array.ctypes.data, 16), KVTensor(data=array.ctypes.data, length=32)
    assert isinstance(short, KVTensor) and isinstance(long, KVTensor)
    assert type(short).__name__ == "KVTensor"
    assert not isinstance(array, KVTensor)
    assert repr(short) == f"KVTensor(data={array.ctypes.data:#x}, length=16)"


def test_the_empty_tensor_has_no_address_and_no_bytes() -> None:
    tensor = KVTensor(0, 0)
    assert (tensor.data, tensor.length, bytes(tensor)) == (0, 0, b"")


def test_making_a_tensor_touches_no_memory() -> None:
    assert KVTensor(8, 1 << 40).length == 1 << 40


def test_takes_numpy_integers() -> None:
    array = np.full(8, 5, np.uint8)
    assert bytes(KVTensor(np.uint64(array.ctypes.data), np.int32(8))) == bytes(array)  # type: ignore[arg-type]


@for_each("data, length", [("0", 4), (0, 4.0), (None, 4), (0, None)])
def test_anything_but_integers_is_a_type_error(data: object, length: object) -> None:
    with pytest.raises(TypeError):
        KVTensor(data, length)  # type: ignore[arg-type]


def test_a_negative_length_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        KVTensor(0, -1)


def test_many_lengths_leave_no_types_behind() -> None:
    array = np.zeros(4096, np.uint8)
    tensors = [KVTensor(array.ctypes.data, length) for length in range(4096)]
    assert [tensor.length for tensor in tensors] == list(range(4096))
