"""A process of its own that uses metadata in a file: ``python -m tests.meta.sqlite_process FOLDER WHAT``.

It prints a line when it has begun, and goes on until it is killed, or its standard input ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from kvstore.meta.deadline import Deadline
from kvstore.meta.interface import ModifiedAt, Put
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.connection import Connection
from kvstore.meta.sqlite.store import Store
from tests.kit.patience import NEVER_S, PATIENCE_S

KEY = "/counter"
COUNT = 100


def say(word: object) -> None:
    print(word, flush=True)


def counts(meta: SqliteMeta) -> None:
    """Adds COUNT to a number that others add to as well."""
    say("begun")
    done_count = 0
    while done_count < COUNT:
        found = meta.get(KEY)
        assert found is not None
        new = b"%d" % (int(found.value) + 1)
        done_count += meta.txn((ModifiedAt(KEY, found.mod_revision),), (Put(KEY, new),)).succeeded
    say("done")


def holds(meta: SqliteMeta) -> None:
    """Has a lease of two seconds, and renews it when it is told to."""
    lease = meta.grant(2)
    meta.put("/held", b"1", lease)
    say("begun")
    sys.stdin.readline()
    say("kept" if meta.keep_alive(lease) else "gone")


def lives(meta: SqliteMeta) -> None:
    """Has one lease of an hour that may end with it, and one that outlives it."""
    meta.put("/held", b"1", meta.grant(3600, while_open=True))
    meta.put("/kept", b"1", meta.grant(3600))
    say("begun")
    sys.stdin.readline()


def forks(meta: SqliteMeta) -> None:
    """Has leases as ``lives``, and a child that stays and has none."""
    meta.put("/held", b"1", meta.grant(3600, while_open=True))
    child = os.fork()
    if not child:
        sys.stdin.readline()
        os._exit(0)
    say("begun")
    say(child)
    sys.stdin.readline()


def watches(meta: SqliteMeta) -> None:
    """Prints the values that others put."""
    watch = meta.watch("/watched", meta.list("/").revision + 1)
    watch.next(0)
    say("begun")
    while True:
        for event in watch.next(PATIENCE_S) or ():
            say(event.kv.value.decode() if event.kv else "deleted")


def stops_within(meta: SqliteMeta) -> None:
    """Stays in the middle of a transaction, with the file locked and half of it written."""
    meta.put("/whole", b"1")
    connection: Connection = meta._connection

    def begin(store: Store) -> None:
        with store._writing(synced=True):
            for number in range(1000):
                store._apply([Put(f"/half/{number}", bytes(10_000))])
            say("begun")
            sys.stdin.read()

    connection.call("half a transaction", begin, Deadline(NEVER_S))


PARTS: dict[str, Callable[[SqliteMeta], None]] = {
    each.__name__: each for each in (counts, holds, lives, forks, watches, stops_within)
}

if __name__ == "__main__":
    PARTS[sys.argv[2]](SqliteMeta(sys.argv[1], timeout_s=PATIENCE_S))
