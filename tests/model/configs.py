"""The worlds that are searched, and the rules whose loss must be found."""

from __future__ import annotations


from tests.model.config import Config

CONFIGS: dict[str, Config] = {
    "hold": Config(),
    "join": Config(nodes=1),
    "deposed": Config(nodes=1, runs=3, incs=3, pins=True),
    "pins": Config(pins=True),
    "ppin": Config(pins=True, persistent_pins=True),
    "unpin": Config(nodes=1, pins=True, late_unpins=True),
    "cache": Config(nodes=1, runs=3, cache=True),
    "resur": Config(nodes=1, pins=True, resurrects=True, final_list=True),
    "s3": Config(nodes=1, runs=3, incs=3, pins=True, final_list=True, objects=True),
    "c13": Config(rollback=True),
    "c13p": Config(nodes=1, pins=True, rollback=True),
    "c13d": Config(nodes=1, rollback=True, other_shard=True),
    "big": Config(runs=3, pins=True),
    "hold+": Config(runs=3, cache=True, other_shard=True),
    "nolink": Config(nodes=1, runs=3, incs=3, pins=True, replaces=True),
    "c13r": Config(nodes=1, sweeps=1, incs=1, rollback=True, resurrects=True, final_list=True),
}
