"""A node that holds one prompt for as long as it can, and reports on it: ``python -m tests.chaos.holder``.

First it stores the given number of prompts; it holds number 0.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from kvstore.buffers import planes_of
from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.errors import HoldBroken
from kvstore.node.opening import open_member
from tests.chaos.prompts import LAYOUT, SPACE, chain_of, kv

PAUSE_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--etcd")
    parser.add_argument("--prompts", type=int, required=True)
    given = parser.parse_args()
    member = open_member(given.root, given.etcd)
    cache = Store(LocalPort(member)).namespace(SPACE.name, LAYOUT)
    for number in range(given.prompts):
        cache.put(chain_of(number).tokens, kv(number))
    hold = member.node.hold(chain_of(0))
    found = np.empty(LAYOUT.shape(hold.tokens), LAYOUT.numpy_dtype)
    print("held" if hold.born is not None and hold.count == len(chain_of(0)) else "not held", flush=True)
    while True:
        time.sleep(PAUSE_S)
        found.fill(0)
        try:
            count = member.node.read(hold, planes_of(found, LAYOUT))
            is_whole = count == hold.count and np.array_equal(found, kv(0))
            if not is_whole:
                member.node.holds.check(hold)  # where the session ended during the read, nothing was promised
        except HoldBroken:
            print("broken", flush=True)
            break
        if not is_whole:
            print("lost", flush=True)
            return 3
    count, rest = cache.get(chain_of(0).tokens)
    print("right" if np.array_equal(rest, kv(0)[:, :, :count]) else "wrong", flush=True)
    member.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
