"""The processes of one host on NFS, attacked at random: ``python -m tests.hosts.members WORK NAME ETCD [--last]``.

They play until the second that the file WORK/ends names. Every promise must be kept; the last host then looks at what
is left on the root once all sessions have ended. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import kvstore
from tests.chaos.cast import SHARD_BITS, Cast
from tests.chaos.journal import LONGEST
from tests.chaos.play import CALM_S, MAX_BYTES, PROMPTS, all_kept, nothing_is_left
from tests.chaos.saboteur import Saboteur
from tests.kit.patience import eventually

ROOT = Path("/mnt/nfs/root")
NODES = 2
BREATH_S = 0.02
PATIENCE_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("name")
    parser.add_argument("etcd")
    parser.add_argument("--last", action="store_true")
    given = parser.parse_args()
    kvstore.open(str(ROOT), shard_bits=SHARD_BITS).close()
    # A host that was cut off has another clock after its boot, so its journals are others.
    boots = len(list(given.work.glob(f"{given.name}.*.cast")))
    players = Cast(ROOT, given.work / f"{given.name}.{boots}.cast", endpoints=given.etcd)
    attacks = play(players, given.work, f"{given.name} {boots}")
    figures: dict[str, Mapping[str, float]] = {
        "attacks": attacks,
        "counts": players.counts(),
        "rounds": players.rounds(),
    }
    longest_s: dict[str, float] = {}
    for _, fact in players.facts(LONGEST):
        for action, seconds in fact.items():
            if action not in ("fact", "at_s"):
                longest_s[action] = round(max(longest_s.get(action, 0.0), seconds), 1)
    if given.last:
        eventually((given.work / "over").exists, "the end of the others", PATIENCE_S)
        left = nothing_is_left(players)
        silly = [name for _, _, names in os.walk(ROOT) for name in names if name.startswith(".nfs")]
        assert not silly, f"files that NFS renamed are left: {silly}"
        figures["left"] = {"used_bytes": left.used_bytes, "pins_checked": left.pins_checked}
    print(json.dumps({**figures, "longest_s": longest_s}), flush=True)


def play(players: Cast, work: Path, seed: str) -> Counter[str]:
    """Returns the attacks."""
    limits = ["--max-bytes", str(MAX_BYTES)]
    nodes = [players.node(f"node{number}", PROMPTS, "--breath", str(BREATH_S)) for number in range(NODES)]
    pauses_s = dict.fromkeys((node.name for node in nodes), 30.0)
    pauses_s[players.collector("gc", "--interval", "1s", *limits).name] = 20.0
    pauses_s[players.collector("cron", "--once", "--ttl", "0s").name] = 10.0
    auditor = players.auditor()
    (work / f"{seed.split()[0]}.playing").touch()
    eventually((work / "ends").exists, "the beginning", PATIENCE_S)
    ends_s = float((work / "ends").read_text())
    saboteur = Saboteur(players, sum(seed.encode()), pauses_s)
    saboteur.play(ends_s - time.time())
    time.sleep(CALM_S)
    all_kept(players, [*nodes, auditor])
    return saboteur.done


if __name__ == "__main__":
    main()
