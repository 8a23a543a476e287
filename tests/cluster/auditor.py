"""Checks that every pin in force is listed and readable to the last byte: ``python -m tests.cluster.auditor``.

It asks one worker, on one host, and prints one JSON object. A miss is tried again for a given time: reads may miss
during trouble, but pinned chunks must still exist.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from kvstore.client.cache import Cache
from kvstore.replay import TraceRequest, load_trace
from kvstore.replay.runner import Scratch
from kvstore.replay.trace import BLOCK_TOKENS
from tests.chaos.journal import Journals
from tests.cluster.engine import PINNED, UNPINNING
from tests.cluster.load import CONTENT, NAMESPACE, reach_of, reach_options

AGAIN_S = 0.25


@dataclass(slots=True)
class Audit:
    """The findings."""

    pins: int = 0
    wrong_bytes: int = 0
    lost: list[str] = field(default_factory=list)


class LivePins:
    """The pins that the engines were promised and have not released."""

    def __init__(self, folder: Path) -> None:
        self._journals = Journals(folder)
        self._live: dict[str, dict[str, int]] = {}

    def in_force(self) -> dict[str, dict[str, int]]:
        """By id, with ``number`` and ``tokens``."""
        for _, fact in self._journals.new():
            if fact["fact"] == PINNED:
                self._live[fact["id"]] = fact
            elif fact["fact"] == UNPINNING:
                self._live.pop(fact["id"], None)
        return dict(self._live)


def read(cache: Cache, request: TraceRequest, tokens: int) -> tuple[int, int]:
    """Reads a request's tokens; returns how many were there, and how many bytes of them were wrong."""
    memory = Scratch(CONTENT).blocks(tokens // BLOCK_TOKENS)
    memory.fill(np.uint64(0))
    got = cache.get(CONTENT.tokens(request)[:tokens], out=CONTENT.shaped(memory))
    blocks = got // BLOCK_TOKENS
    return got, CONTENT.wrong_bytes(CONTENT.seeds(request)[:blocks], memory[:, :blocks])


def main() -> int:
    parser = argparse.ArgumentParser()
    reach_options(parser)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--journals", type=Path, required=True)
    parser.add_argument("--patience-s", type=float, required=True)
    given = parser.parse_args()
    requests, pins, audit = load_trace(given.trace), LivePins(given.journals), Audit()
    began_s = time.monotonic()
    with reach_of(given).open() as store:
        cache = store.namespace(NAMESPACE, CONTENT.layout)
        listed: set[str] = set()
        for name, fact in pins.in_force().items():
            audit.pins += 1
            while True:
                got, wrong = read(cache, requests[fact["number"]], fact["tokens"])
                audit.wrong_bytes += wrong
                if name not in listed:
                    listed = {each.id for each in store.pins()}
                if got == fact["tokens"] and name in listed:
                    break
                if name not in pins.in_force():
                    break  # given back meanwhile
                if time.monotonic() - began_s > given.patience_s:
                    audit.lost.append(f"{name}: {got} of {fact['tokens']} tokens, listed: {name in listed}")
                    break
                time.sleep(AGAIN_S)
    print(json.dumps(asdict(audit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
