"""The mutants of tests/mutants in the simulation: each breaks a rule, and some seed must show that.

A simulation that finds nothing may simply not look; these show where it looks.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.mutants.mutant import NAME_VARIABLE
from tests.mutants.running import HOOK, ROOT

HOMES = {
    "a1-announces-ahead-of-its-view": "narrow",
    "a1-applies-half-of-a-transaction": "paired",
    "a2-names-nothing": "narrow",
    "c1-node-ignores-the-chain": "forked",
    "c2-lost-write-unnoticed": "lapsed",
    "c3-sweep-is-not-read-again": "forked",
    "c4-starts-without-a-fence": "lapsed",
    "c5-pin-without-a-twin": "repinned",
    "c5-twins-are-not-spared": "repinned",
    "c5-unreadable-twin-skipped": "repinned",
    "c6-protects-on-a-foreign-store": "calm",
    "f1-move-makes-the-folder": "deposed",
    "f2-makes-the-folder-late": "deposed",
    "f3-loses-what-no-key-names": "relayed",
    "f3-unnamed-folders-stay": "narrow",
    "g2-condemns-over-another-sweep": "paired",
    "g4-no-grace": "narrow",
    "g4-takes-what-is-held": "narrow",
    "g4-takes-what-is-pinned": "pinned",
    "g4-unreadable-session-skipped": "narrow",
    "g5-goes-back-over-a-newer-one": "relayed",
    "g5-newer-publication-is-lost": "relayed",
    "g5-one-name-in-the-trash": "relayed",
    "g6-closes-another-sweep": "paired",
    "g6-closes-before-the-fence": "deposed",
    "g7-adopts-nothing": "narrow",
    "g8-abandons-behind-an-open-fence": "deposed",
    "h1-condemned-is-a-hit": "narrow",
    "h2-hold-is-not-registered": "narrow",
    "h2-look-before-hold": "hasty",
    "h3-look-outlives-a-sweep": "hasty",
    "h3-sweep-forgets-nothing": "narrow",
    "h4-ended-hold-is-read": "arriving",
    "leftovers-stay": "narrow",
    "host-log-before-table": "one_host",
    "host-tables-before-append": "one_host",
    "host-pins-before-tables": "one_host",
    "host-unsettled-is-there": "one_host",
    "host-parents-first": "one_host",
    "host-put-renews-no-parent": "one_host",
    "host-log-forgets-nothing": "one_host",
    "host-overrun-forgets-nothing": "one_host",
    "host-no-limit": "one_host",
    "credit-counts-no-bytes": "full",
    "full-store-keeps-its-credit": "full",
    "o1-removes-another-version": "objects",
    "p1-pin-without-a-hold": "repinned",
    "v2-holds-outlive-the-session": "arriving",
    "v2-session-never-dies": "arriving",
    "v3-chain-not-checked": "lapsed",
    "v3-knows-what-lost-events-condemned": "cut",
    "w1-publishes-over": "narrow",
    "w3-damaged-file-is-deleted": "damaged",
    "w3-intact-file-stays-in-quarantine": "damaged",
    "w3-quarantine-is-emptied-unlooked": "damaged",
}
"""The profile in which to look for each mutant. The catalogue has more, which other tests show."""


def first_to_find_mutant(name: str, seeds_count: int) -> str | None:
    """Returns the line about the first seed that shows a mutant; None if none of them does."""
    environment = {
        **os.environ,
        NAME_VARIABLE: name,
        "PYTHONPATH": os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [
        sys.executable,
        "-m",
        "tests.sim",
        "--seeds",
        str(seeds_count),
        "--profile",
        HOMES[name],
        "--until-found",
    ]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in ran.stdout.splitlines() if line.startswith("seed ")]
    assert not any(" died of TypeError" in line for line in found), f"{name} does not fit the code: {found}"
    assert ran.returncode == int(bool(found)), ran.stderr[-2000:]
    return found[0] if found else None
