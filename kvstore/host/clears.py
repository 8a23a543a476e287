"""Announces to the other processes of a host what a clear deletes, because their memory may have it too.

The last orders are lines of the file ``host/clears``; their number is in the shared file, and each table says how many
of them its process has obeyed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from kvstore.census.selection import ClearOrder
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.host.tables import CLEARS, CLEARS_NONE, HoldTable, Number, Own, Shared, evicting_lock, live_tables
from kvstore.root.posix import FILE_MODE, translated

log = logging.getLogger(__name__)

ORDERS_MAX = 64
PASSING_S = 60.0
"""An order is kept so long: it keeps chunks out of memory that are on their way there."""
POLL_S = 0.05
ANSWER_S = 15.0
"""Time for other processes to drop what was cleared from their memory."""

Obey = Callable[[list[ClearOrder], list[ClearOrder]], bool]
"""``obey(new, all)``: drops what new orders name and keeps out what all orders name; False if it is not done yet."""


class HostClears:
    """The clears of one root, as one process orders and obeys them."""

    def __init__(
        self,
        folder: str,
        shared: Shared,
        table: HoldTable,
        obey: Obey | None,
    ) -> None:
        """``obey`` is None for a process that keeps nothing in memory."""
        self._folder = folder
        self._shared = shared
        self._table = table
        self._obey = obey
        self._obeyed = shared[Number.CLEARS]
        self._ended = threading.Event()
        self._passes_s = math.inf
        """The time at which chunks may come in again that an order named."""
        self._thread: threading.Thread | None = None
        if obey is None:
            table.numbers[Own.CLEARS] = CLEARS_NONE
        else:
            obey([], self._in_force(self._read()))
            table.numbers[Own.CLEARS] = self._obeyed
            self._thread = threading.Thread(target=self._run, name="kvstore-clears", daemon=True)
            self._thread.start()

    def publish(self, order: ClearOrder) -> tuple[str, ...]:
        """Announces an order, and waits until all processes have dropped its chunks from memory.

        Returns the tables of those that have not in time. Raises OSError.
        """
        with evicting_lock(self._folder):
            number = self._shared[Number.CLEARS] + 1
            lines = self._lines()[1 - ORDERS_MAX :]
            lines.append(json.dumps({"number": number, "order": order.to_json().decode()}))
            with open(f"{self._folder}/{CLEARS}.new", "w", opener=_private) as file:
                file.write("\n".join(lines))
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{self._folder}/{CLEARS}.new", f"{self._folder}/{CLEARS}")
            self._shared[Number.CLEARS] = number
        ends_s = time.monotonic() + ANSWER_S
        while True:
            silent = tuple(t.name for t in live_tables(self._folder, self._shared) if t.numbers[Own.CLEARS] < number)
            if not silent or time.monotonic() > ends_s:
                return silent
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def orders(self) -> list[ClearOrder]:
        """Returns the orders that are kept, for a local disk that was away."""
        return [order for _, order in self._read()]

    def _run(self) -> None:
        """Carries out new orders, and ends the ban on the chunks of expired ones."""
        assert self._obey is not None
        while not self._ended.wait(POLL_S):
            number = self._shared[Number.CLEARS]
            if number == self._obeyed and time.time() < self._passes_s:
                continue
            try:
                kept = self._read()
                new = [order for at, order in kept if self._obeyed < at <= number]
                if self._obey(new, self._in_force(kept)):
                    self._obeyed = self._table.numbers[Own.CLEARS] = number
            except (OSError, KVStoreError) as error:
                log.info("clears.not_obeyed %s", error)

    def _in_force(self, kept: list[tuple[int, ClearOrder]]) -> list[ClearOrder]:
        orders = [order for _, order in kept if order.issued_s + PASSING_S > time.time()]
        self._passes_s = min((order.issued_s + PASSING_S for order in orders), default=math.inf)
        return orders

    def _read(self) -> list[tuple[int, ClearOrder]]:
        """Returns the orders that are kept, each after its number."""
        kept: list[tuple[int, ClearOrder]] = []
        for line in self._lines():
            try:
                fields = parse_json(line)
                kept.append((int(fields["number"]), ClearOrder.from_json(fields["order"].encode())))
            except (ValueError, KeyError, TypeError, InvalidRequest) as error:
                log.warning("clears.not_understood %s", error)
        return kept

    def _lines(self) -> list[str]:
        path = f"{self._folder}/{CLEARS}"
        with translated("read", path):
            try:
                with open(path) as file:
                    return file.read().splitlines()
            except FileNotFoundError:
                return []


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
