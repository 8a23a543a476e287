"""Views of chunks where they lie: in the worker's memory, or in files that it handed over. No copy; verified once.

Arrays keep what they refer to: a lease on the worker's memory, a mapping of a file.  Neither needs the worker any more.
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
from kvstore.client.bulk.handed import images_of, in_groups, read_files
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import Leased
from kvstore.client.tools import FileLanes
from kvstore.format.header import expected_chunk
from kvstore.layout import Layout
from kvstore.node.deadline import Deadline
from kvstore.node.images import ImagesIn, verify_images
from kvstore.node.lanes import Lanes
from kvstore.node.reading import leading
from kvstore.sections import planes_of


class Views:
    """The arrays of one view as they come, by the index of their chunk; at most ``files_max`` of mapped files."""

    def __init__(self, layout: Layout, files_max: int) -> None:
        self._layout = layout
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._files_left = files_max

    def sections(self, index: int) -> Pieces:
        """Memory for a chunk that has to be copied, taken as it is asked for: only for what really comes."""
        layout = self._layout
        self._arrays[index] = array = np.empty(layout.shape(layout.chunk_tokens), layout.numpy_dtype)
        return planes_of(array, layout)(0)

    def add(self, index: int, payload: npt.NDArray[Any]) -> None:
        """The bytes of a chunk where they lie."""
        layout = self._layout
        self._arrays[index] = payload.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))

    def may_map(self, count: int) -> bool:
        """Whether so many files more may be mapped: each keeps a descriptor, and an engine has few."""
        if count > self._files_left:
            return False
        self._files_left -= count
        return True

    def leading(self, count: int) -> list[npt.NDArray[Any]]:
        """The arrays of the first ``count`` chunks, read-only."""
        arrays = [self._arrays[index] for index in range(count)]
        for array in arrays:
            array.flags.writeable = False
        return arrays


def view_given(link: Link, chain: Chain, given: Given, views: Views, lanes: FileLanes, deadline: Deadline) -> bytearray:
    """As ``take_given``, but the chunks stay where they are where that can be."""
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
    """Maps the leading files that have their chunk's size, and closes them all.

    Where the system gives no more mappings, or descriptors, which each mapping needs, they are copied.
    """
    expected = expected_chunk(chain, given.first)
    images: list[memoryview] = []
    try:
        for fd in given.files:
            images.append(memoryview(mmap.mmap(fd, expected.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ)))
    except ValueError:
        pass  # shorter than it should be: not right, and read over gRPC
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
    """For each image a byte, 1 where it is that of its chunk, from index ``first`` on, whole and right."""

    def verify(start: int, stop: int, _: Borrowed) -> npt.NDArray[np.bool_]:
        return verify_images(chain, range(first + start, first + stop), images[start:stop])

    if not images:
        return bytearray()
    # Mapped files may be on a root that hangs: then only lanes wait for it, and never longer than the deadline.
    return in_groups(chain, first, len(images), verify, lanes, deadline, helps=isinstance(images, ImagesIn))
