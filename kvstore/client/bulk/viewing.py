"""Views of chunks in place: in the worker's memory, or in files that it handed over. No copy; verified once.

An array keeps what it refers to: a lease on the worker's memory, or a mapping of a file. Neither needs the worker.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Pieces, planes_of
from kvstore.client.bulk.given import Given, GivenFiles, GivenSlots
from kvstore.client.bulk.handed import images_of, read_files
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import Leased
from kvstore.format.header import expected_chunk
from kvstore.layout import Layout
from kvstore.node.lanes import Deadline, Lanes
from kvstore.node.reader import verified
from kvstore.node.wanted import Wanted, leading


class Views:
    """The arrays of one view, by chunk index, as they come; at most ``files_max`` of them are mapped files."""

    def __init__(self, layout: Layout, files_max: int) -> None:
        self._layout = layout
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._files_left = files_max

    def sections(self, index: int) -> Pieces:
        """Returns memory for a chunk that must be copied. Allocated on demand: only for chunks that come."""
        layout = self._layout
        self._arrays[index] = array = np.empty(layout.shape(layout.chunk_tokens), layout.numpy_dtype)
        return planes_of(array, layout)(0)

    def add(self, index: int, payload: npt.NDArray[Any]) -> None:
        """Adds the bytes of a chunk, in place."""
        layout = self._layout
        self._arrays[index] = payload.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))

    def may_map(self, count: int) -> bool:
        """True if this many more files may be mapped: each keeps a descriptor, and an engine has few."""
        if count > self._files_left:
            return False
        self._files_left -= count
        return True

    def leading(self, count: int) -> list[npt.NDArray[Any]]:
        """Returns the read-only arrays of the first ``count`` chunks."""
        arrays = [self._arrays[index] for index in range(count)]
        for array in arrays:
            array.flags.writeable = False
        return arrays


def view_given(
    link: Link, wanted: Wanted, given: Given, views: Views, lanes: FileLanes, deadline: Deadline
) -> bytes | bytearray:
    """As ``take_given``, but the chunks stay where they are where that can be. Only prompts can be viewed."""
    assert isinstance(wanted, Chain)
    if isinstance(given, GivenSlots):
        return _view_slots(link, wanted, given, views, lanes.copiers(), deadline)
    if views.may_map(given.count):
        return _map_files(link, wanted, given, views, lanes.get(), deadline)
    return read_files(link, wanted, given, views.sections, lanes.get(), deadline)


def _view_slots(
    link: Link, chain: Chain, slots: GivenSlots, views: Views, lanes: Lanes, deadline: Deadline
) -> bytes | bytearray:
    images = images_of(link, chain, slots)
    done = verified(chain, range(slots.first, slots.first + len(images)), images, lanes, deadline)
    header_bytes = expected_chunk(chain, slots.first).header_bytes
    for at in range(leading(done)):
        views.add(slots.first + at, Leased(images[at][header_bytes:], slots.lease).array())
    return done


def _map_files(
    link: Link, chain: Chain, given: GivenFiles, views: Views, lanes: Lanes, deadline: Deadline
) -> bytes | bytearray:
    """Maps the leading files that have their chunk's size, and closes them all.

    Chunks are copied if the system has no more mappings or descriptors: each mapping needs one.
    """
    expected, count = expected_chunk(chain, given.first), given.count
    images: list[memoryview] = []
    try:
        for fd in given.files:
            images.append(memoryview(mmap.mmap(fd, expected.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ)))
    except ValueError:
        pass  # too short, so damaged: read over gRPC instead
    except OSError as error:
        link.shortage.note(error)
        images.clear()
        return read_files(link, chain, given, views.sections, lanes, deadline)
    except BaseException:
        given.close()
        raise
    given.close()
    # The files may be on a root that hangs: then only lanes wait for it, and never longer than the deadline.
    indexes = range(given.first, given.first + len(images))
    done = verified(chain, indexes, images, lanes, deadline, helps=False)
    for at in range(leading(done)):
        views.add(given.first + at, np.frombuffer(images[at][expected.header_bytes :], np.uint8))
    return done.ljust(count, b"\0")
