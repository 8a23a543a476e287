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


@for_each("data, length", [("0", 4), (0, 4.0), (None, 4), (0, None)])
def test_anything_but_integers_is_a_type_error(data: object, length: object) -> None:
    with pytest.raises(TypeError):
        KVTensor(data, length)  # type: ignore[arg-type]


def test_a_negative_length_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        KVTensor(0, -1)
