"""The chunks of one read as arrays, each in a leased slot of the worker's memory, or in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Laid, address_of, cut_evenly
from kvstore.client.bulk.memory import Lease, Leased
from kvstore.layout import Layout
from kvstore.node.wanted import Wanted, payload_of


class _Copies(Laid):
    """Chunks one after another, each as its sections in file order."""

    def __init__(self, array: npt.NDArray[Any], section_bytes: int) -> None:
        self._bytes = array.reshape(len(array), -1).view(np.uint8)
        self._section_bytes = section_bytes

    def __call__(self, index: int) -> list[memoryview]:
        return cut_evenly(self._bytes[index].data, self._section_bytes)

    @property
    def is_writable(self) -> bool:
        return True

    def covers(self, first: int, count: int) -> bool:
        return 0 <= first <= len(self._bytes) - count

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        items["offset"] = address_of(self._bytes.data) + np.asarray(indexes, np.uint64) * self._bytes.shape[1]
        return [self._bytes]


class Views:
    """The arrays of one read, by chunk index, as they come."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lent: dict[int, npt.NDArray[Any]] = {}
        self._copies = np.empty(layout.shape(0), layout.numpy_dtype)

    def sections(self, count: int) -> Laid:
        """Makes memory for chunks that are copied; the system gives no page of it before one comes."""
        layout = self._layout
        self._copies = np.empty((count, *layout.shape(layout.chunk_tokens)), layout.numpy_dtype)
        return _Copies(self._copies, layout.section_bytes)

    def lend(self, wanted: Wanted, index: int, image: memoryview, lease: Lease) -> None:
        """Adds a verified chunk in place."""
        layout = self._layout
        payload = Leased(payload_of(wanted, index, image), lease).array()
        self._lent[index] = payload.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))

    def leading(self, count: int) -> list[npt.NDArray[Any]]:
        """Returns the read-only arrays of the first ``count`` chunks."""
        arrays = [self._lent[index] if index in self._lent else self._copies[index] for index in range(count)]
        for array in arrays:
            array.flags.writeable = False
        return arrays
