"""Tiers that break kvstore/memory/MEMORY.md: memory, the local disk, peers, write-back."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import INVENTORY, MEMORY_TIER, at, giving
from tests.mutants.mutant import Mutant, mutant

IMAGES = "node/test_images.py"
READING = "tiers/test_reading.py"
WRITING = "tiers/test_writing.py"
INVENTORY_TESTS = "memory/test_inventory.py"
DISK = "disk/test_disk_tier.py"
DISK_TIER = "kvstore.node.disk_tier:DiskTier"
PEERS = "kvstore.peers.tier:Peers"


def _claim_over(real: Any, self: Any, place: Any, *rest: Any, **how: Any) -> Any:
    found = self.find(place.address)
    if found is not None:
        self.drop(found)
    return real(self, place, *rest, **how)


def _first_extent(real: Any, self: Any, size_bytes: int) -> Any:
    real(self, size_bytes)
    return 0


def _all(indexes: Any) -> Any:
    import numpy as np

    return np.ones(len(indexes), np.bool_)


def _behind() -> Any:
    from kvstore.writes import WriteMode

    return WriteMode.BEHIND


MUTANTS: list[Mutant] = [
    mutant(
        "images-always-right",
        "MEMORY I1: an image is verified",
        at("kvstore.node.images", "verify_images", lambda real, wanted, indexes, images: _all(indexes)),
        IMAGES,
        READING,
    ),
    mutant(
        "view-of-memory-unverified",
        "MEMORY I1: a view is verified",
        at(MEMORY_TIER, "verified", lambda real, self, slots, **how: slots.leading_count),
        READING,
    ),
    mutant(
        "image-rots-after-its-look",
        "MEMORY I1: an image is verified before it leaves",
        at(MEMORY_TIER, "all_still_right", lambda real, self, slots, indexes: _all(indexes)),
        "tiers/test_read_image.py",
        WRITING,
    ),
    mutant(
        "memory-second-writer-wins",
        "MEMORY E4: the first writer wins",
        at(INVENTORY, "claim", _claim_over),
        "memory/test_inventory_model.py",
    ),
    mutant(
        "memory-evicts-pinned", "MEMORY E2: pinned chunks stay", at(INVENTORY, "pin", giving(None)), INVENTORY_TESTS
    ),
    mutant(
        "memory-evicts-dirty",
        "MEMORY E2: chunks that are not on the root stay",
        at(
            INVENTORY,
            "claim",
            lambda real, self, place, size, now_s, hints=None, *, dirty=False, **how: real(
                self, place, size, now_s, **({"hints": hints} if hints else {}), **how
            ),
        ),
        INVENTORY_TESTS,
    ),
    mutant(
        "extents-overlap",
        "MEMORY A1: extents do not overlap",
        at("kvstore.memory.arena:Extents", "take", _first_extent),
        "memory/test_extents.py",
    ),
    mutant(
        "put-behind-though-durable",
        "MEMORY W: a durable put is on the root",
        at("kvstore.node.tier_stack:TierStack", "mode", lambda real, self, asked, hints: _behind()),
        WRITING,
    ),
    mutant(
        "disk-encodes-rotten-images",
        "MEMORY I1: an image keeps its checksums on its way to the disk",
        at(
            "kvstore.encodings.codec",
            "encode_chunk",
            lambda real, expected, incarnation, sections, wish, salt, checksums=None: real(
                expected, incarnation, sections, wish, salt
            ),
        ),
        "contract/test_rot.py",
    ),
    mutant(
        "peer-that-is-wrong-stays",
        "MEMORY peers: a peer whose chunks are wrong is avoided",
        at(PEERS, "damaged", giving(None)),
        "peers_memory/test_fetch.py",
    ),
]
