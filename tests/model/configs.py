"""The worlds that are searched, each named after what it adds."""

from __future__ import annotations

from tests.model.config import Config

CONFIGS: dict[str, Config] = {
    # One shard.
    "hold": Config(),
    "join": Config(nodes=1),
    "deposed": Config(nodes=1, runs=3, incs=3, pins=True),
    "pins": Config(pins=True),
    "ppin": Config(pins=True, persistent_pins=True),
    "unpin": Config(nodes=1, pins=True, late_unpins=True),
    "cache": Config(nodes=1, runs=3, cache=True),
    "looks": Config(nodes=1, runs=3, looks=True),
    "big": Config(runs=3, pins=True),
    "hold+": Config(runs=3, cache=True, other_shard=True),
    "abandon": Config(nodes=1, runs=3, incs=3, pins=True, abandoning=True),
    # A lost watch, a rollback of etcd, both.
    "v3": Config(nodes=1, looks=True, other_shard=True, lost_watch=True),
    "c13": Config(rollback=True),
    "c13p": Config(nodes=1, pins=True, rollback=True),
    "c13d": Config(nodes=1, rollback=True, other_shard=True),
    "c13v": Config(nodes=1, rollback=True, other_shard=True, lost_watch=True),
    "c13vl": Config(nodes=1, rollback=True, other_shard=True, lost_watch=True, looks=True),
    "c13vp": Config(nodes=1, pins=True, rollback=True, lost_watch=True),
    # Two shards.
    "two": Config(nodes=1, shards=2, incs=1),
    "two2": Config(nodes=1, shards=2, incs=2),
    "two3": Config(nodes=1, shards=2, runs=3, sweeps=3, incs=1),
    "twov": Config(nodes=1, shards=2, incs=1, lost_watch=True),
    "two13": Config(nodes=1, shards=2, incs=1, rollback=True),
    "two13v": Config(nodes=1, shards=2, incs=1, rollback=True, lost_watch=True),
    "twoa": Config(nodes=1, shards=2, sweeps=3, incs=1, abandoning=True),
    "twoa3": Config(nodes=1, shards=2, runs=3, sweeps=3, incs=1, abandoning=True),
    "twon": Config(shards=2, incs=1),
    # Damaged files.
    "aside": Config(nodes=1, runs=1, sweeps=1, incs=3, menders=2, restorers=1),
    "asidep": Config(nodes=1, runs=1, sweeps=1, incs=3, menders=2, restorers=1, pins=True),
    "aside2": Config(nodes=1, sweeps=1, incs=3, menders=1, restorers=1),
    # Other roots.
    "s3": Config(nodes=1, runs=3, incs=3, pins=True, final_list=True, objects=True),
    "nolink": Config(nodes=1, runs=3, incs=3, pins=True, replaces=True),
}

QUICK = ("hold", "join", "unpin", "two", "pins", "cache", "twoa")
"""Worlds that take seconds, not minutes."""
