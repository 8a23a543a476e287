"""Tiers that break kvstore/tiers/MEMORY.md: memory, the local disk, peers, write-back."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import INVENTORY, MEMORY_TIER, at, giving
from tests.mutants.mutant import Mutant, mutant

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
    from kvstore.core.write_mode import WriteMode

    return WriteMode.BEHIND


MUTANTS: list[Mutant] = [
    mutant(
        "images-always-right",
        at("kvstore.codec.image", "verify_images", lambda real, wanted, indexes, images: _all(indexes)),
        "node/test_images.py tiers/test_reading.py",
    ),
    mutant(
        "view-of-memory-unverified",
        at(MEMORY_TIER, "verified", lambda real, self, slots, **how: slots.leading_count),
        "tiers/test_reading.py",
    ),
    mutant(
        "image-rots-after-its-look",
        at(MEMORY_TIER, "all_still_right", lambda real, self, slots, indexes: _all(indexes)),
        "tiers/test_read_image.py tiers/test_writing.py",
    ),
    mutant("memory-second-writer-wins", at(INVENTORY, "claim", _claim_over), "memory/test_inventory_model.py"),
    mutant(
        "memory-evicts-dirty",
        at(
            INVENTORY,
            "claim",
            lambda real, self, place, size, now_s, hints=None, *, dirty=False, **how: real(
                self, place, size, now_s, **({"hints": hints} if hints else {}), **how
            ),
        ),
        "memory/test_inventory_model.py",
    ),
    mutant(
        "extents-overlap", at("kvstore.tiers.arena:Extents", "take", _first_extent), "memory/test_inventory_model.py"
    ),
    mutant(
        "put-behind-though-durable",
        at("kvstore.tiers.stack:TierStack", "mode", lambda real, self, asked, hints: _behind()),
        "tiers/test_writing.py",
    ),
    mutant(
        "disk-encodes-rotten-images",
        at(
            "kvstore.codec.codec",
            "encode_chunk",
            lambda real, expected, incarnation, sections, wish, salt, checksums=None: real(
                expected, incarnation, sections, wish, salt
            ),
        ),
        "contract/test_rot.py",
    ),
    mutant(
        "peer-of-another-chunk-is-blamed",
        at(PEERS, "damaged", lambda real, self, wanted, index: real(self, wanted, 0)),
        "peers_memory/test_fetch.py",
    ),
    mutant("peer-that-is-wrong-stays", at(PEERS, "damaged", giving(None)), "peers_memory/test_fetch.py"),
]
