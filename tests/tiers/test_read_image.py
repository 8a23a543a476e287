"""An image that is read past memory, for a move, is verified from every source (MEMORY.md, I1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.codec.image import verify_images
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from tests.kit.scattering import damage_on_disk, restore, scatter
from tests.kit.stores import flip
from tests.kit.tiers import Acting, on_posix


@pytest.fixture
def node(tmp_root: Path) -> Iterator[Acting]:
    with Acting(on_posix(tmp_root / "root"), disk=tmp_root / "disk") as acting:
        yield acting


def read(node: Acting, number: int, index: int) -> tuple[bool, bool]:
    """The verdict on an image, and the truth."""
    chain = node.chain(number, index + 1)
    image = memoryview(bytearray(chain.image_bytes(index)))
    said = node.node.reader.read_image(chain, index, image, Deadline(SystemClock(), 60.0))
    return said, bool(verify_images(chain, [index], [image]).all())


def damage_on_root(node: Acting, number: int, index: int) -> None:
    flip(Path(node.root.path) / node.name(number, index))  # type: ignore[attr-defined]


def test_i1_an_image_that_is_wrong_in_memory_comes_from_the_root(node: Acting) -> None:
    node.put(1, 2)
    node.drain()
    assert read(node, 1, 1) == (True, True)
    node.damage(1, 1)
    assert read(node, 1, 1) == (True, True)


def test_i1_an_image_that_is_wrong_on_the_disk_comes_from_the_root(node: Acting) -> None:
    scatter(node, 1, list("dd"))
    restore(node, 1, 2)
    damage_on_disk(node, 1, 1)
    assert read(node, 1, 1) == (True, True)
    assert not node.on_disk(1, 2)[1], "the disk was told"


def test_i1_an_image_that_is_wrong_on_the_root_is_a_miss(node: Acting) -> None:
    node.put(1, 2)
    node.drain()
    node.forget(1, 2)
    damage_on_root(node, 1, 1)
    assert read(node, 1, 1)[0] is False
