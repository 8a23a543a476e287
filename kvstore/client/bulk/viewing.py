"""Views of chunks in place: in the worker's memory, or in files that it handed over. No copy; verified once.

An array keeps what it refers to: a lease on the worker's memory, or a mapping of a file. Neither needs the worker.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Pieces
from kvstore.client.bulk.given import Given, GivenFiles, GivenSlots
from kvstore.client.bulk.handed import images_of, in_groups, leading, read_files
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import Leased
from kvstore.format.header import expected_chunk
from kvstore.layout import Layout
from kvstore.node.deadline import Deadline
from kvstore.node.images import ImagesIn, verify_images
from kvstore.node.lanes import Lanes
from kvstore.sections import planes_of


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


def view_given(link: Link, chain: Chain, given: Given, views: Views, lanes: FileLanes, deadline: Deadline) -> bytearray:
    """Verifies a run of chunks in place, or copies those that cannot stay; returns as ``take_given`` does."""
    if isinstance(given, GivenSlots):
        return _view_slots(link, chain, given, views, lanes.copiers(), deadline)
    if views.may_map(given.count):
        return _map_files(link, chain, given, views, lanes.get(), deadline)
    return read_files(link, chain, given, views.sections, lanes.get(), deadline)


def _view_slots(
    link: Link, chain: Chain, slots: GivenSlots, views: Views, lanes: Lanes, deadline: Deadline
) -> bytearray:
    images = images_of(link, chain, slots)
    done = _verified(chain, slots.first, images, lanes, deadline)
    header_bytes = expected_chunk(chain, slots.first).header_bytes
    for at in range(leading(done)):
        views.add(slots.first + at, Leased(images[at][header_bytes:], slots.lease).array())
    return done


def _map_files(
    link: Link, chain: Chain, given: GivenFiles, views: Views, lanes: Lanes, deadline: Deadline
) -> bytearray:
    """Maps the leading files that have their chunk's size, and closes all files.

    Chunks are copied if the system has no more mappings or descriptors: each mapping needs one.
    """
    expected = expected_chunk(chain, given.first)
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
    done = _verified(chain, given.first, images, lanes, deadline)
    for at in range(leading(done)):
        views.add(given.first + at, np.frombuffer(images[at][expected.header_bytes :], np.uint8))
    return done


def _verified(chain: Chain, first: int, images: Sequence[memoryview], lanes: Lanes, deadline: Deadline) -> bytearray:
    """Verifies each image as that of its chunk, from index ``first`` on; returns one byte for each, 1 if it is good."""

    def verify(start: int, stop: int, _: Borrowed) -> npt.NDArray[np.bool_]:
        return verify_images(chain, range(first + start, first + stop), images[start:stop])

    if not images:
        return bytearray()
    # Mapped files may be on a root that hangs: only lanes wait for it, never past the deadline.
    return in_groups(chain, first, len(images), verify, lanes, deadline, helps=isinstance(images, ImagesIn))
