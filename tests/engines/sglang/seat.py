"""One of two ranks, in its process: the groups between them, and the rank's controller.

The groups are those of torch.distributed, on gloo. SGLang makes its own from them when a backend is attached.
"""

from __future__ import annotations

import os
import threading
import traceback
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvstore.node import opening
from kvstore.root.open import open_root
from tests.engines.sglang.on_cpu import CacheRequestHandle, RadixKey, cache_controller
from tests.engines.sglang.rank import (
    HEADS,
    PAGE,
    Rank,
    device_pool,
    holds,
    host_pool,
    mamba_pool,
    page_keys,
    trailing,
)
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S, eventually

RANKS = 2
ANSWER_S = PATIENCE_S + 60.0
"""More than a rank waits itself, so that it can say what did not happen."""


def serve(number: int, rendezvous: str, line: Connection) -> None:
    """Calls the methods of a Seat that come over the line, until it is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=number,
        world_size=RANKS,
        timeout=timedelta(seconds=ANSWER_S),
    )
    seat = Seat(number)
    while True:
        try:
            act, args, told = line.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str] = (getattr(seat, act)(*args, **told), "")
        except BaseException:  # noqa: BLE001 - raised in the test's process
            answer = (None, traceback.format_exc())
        line.send(answer)


class Seat:
    """One rank. Its methods take and return what can be sent to another process."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._all = dist.group.WORLD
        self._alone = [dist.new_group([each]) for each in range(RANKS)][number]
        self._patches = ExitStack()
        self._release = threading.Event()
        self._root: FaultyRoot | None = None
        self._rank: Any = None
        self._operation: Any = None

    # Attaching

    def sit(
        self,
        kind: str,
        extra: dict[str, Any],
        *,
        hybrid: bool = False,
        stages: str = "",
        batch_pages: int = 0,
        faulty: Sequence[int] = (),
    ) -> None:
        """Makes the pools and the controller of a model, and attaches our backend.

        ``kind`` is ``mha`` or ``mla``, and ends with ``+mamba`` for a model with recurrent states too. ``stages``
        makes the ranks two pipeline stages and names SGLang's mode of their host memory: ``cache`` or
        ``buffer_only``. ``batch_pages`` is how many pages SGLang moves at once. ``faulty`` are the ranks whose root
        can hang.
        """
        attention, _, beside = kind.partition("+")
        device = device_pool(attention, heads=HEADS if stages else HEADS // RANKS)
        pools = {PoolName.KV: host_pool(device, "page_first")}
        if beside:
            pools[PoolName.MAMBA] = mamba_pool()
        for name, pool in pools.items():
            # Latent pages are the same for all tensor-parallel ranks. Everything else is each rank's own.
            if stages or attention != "mla" or name != PoolName.KV:
                pool.owner = f"rank {self._number}"
        axis = "pp" if stages else "tp"
        arguments = {
            "tp_group": self._alone if stages else self._all,
            "pp_group": self._all if stages else self._alone,
            "host_memory_mode": stages or "cache",
        }
        if batch_pages:
            self._patches.enter_context(patch.object(cache_controller, "STORAGE_BATCH_SIZE", batch_pages))
        if self._number in faulty:
            self._patches.enter_context(patch.object(opening, "open_root", self._faulty_root))
        told: dict[str, Any] = {f"{axis}_rank": self._number, f"{axis}_size": RANKS}
        self._rank = Rank(pools, extra, device, hybrid=hybrid, arguments=arguments, **told)

    def leave(self) -> None:
        """Detaches our backend."""
        self._rank.controller.detach_storage_backend()
        self._patches.close()
        self._rank = self._operation = None

    def _faulty_root(self, *args: Any, **told: Any) -> FaultyRoot:
        self._root = FaultyRoot(open_root(*args, **told))
        return self._root

    def hang(self, *operations: str) -> None:
        """Lets these operations of the root stand still until ``heal``."""
        assert self._root is not None, "not one of the faulty ones"
        self._release = threading.Event()
        self._root.set_rules([Rule(each, Hang(release=self._release)) for each in operations])

    def heal(self) -> None:
        """Lets everything go on that stands still."""
        assert self._root is not None, "not one of the faulty ones"
        self._root.set_rules([])
        self._release.set()

    # The steps of SGLang's scheduler

    def back_up(self, tokens: Sequence[int], first: int = 0) -> int:
        """Stores a prompt's pages from page ``first`` on, and the state at its end if there are states.

        Returns the number of tokens that are stored.
        """
        if PoolName.MAMBA not in self._rank.pools:
            return int(self._rank.back_up(tokens, first))
        keys = page_keys(tokens)[-1:]
        at = self._rank.fill(PoolName.MAMBA, keys)
        state = PoolTransfer(PoolName.MAMBA, host_indices=at, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        stored = int(self._rank.back_up(tokens, first, [state]))
        self._rank.pools[PoolName.MAMBA].free(at)
        return stored

    def ask(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens of a prompt both ranks find."""
        self._operation = self._rank.ask(tokens, self._states())
        return int(self._operation.storage_hit_count)

    def read(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Reads what ``ask`` found. Returns its tokens and its states, whose bytes have been compared."""
        self._rank.read(self._operation)
        return self._compared(tokens, self._operation, *self._rank.results(self._operation))

    def prefetch(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Asks, and reads if there is anything."""
        return self.read(tokens) if self.ask(tokens) else (0, 0)

    def prefetch_by_ticket(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Prefetches as stages without a cache in host memory do: the first one sends the others a ticket."""
        controller = self._rank.controller
        if self._number == 0:
            key = RadixKey(array("q", tokens))
            controller.submit_prefetch(CacheRequestHandle("r", 0), key, None, None, None, self._states())
        eventually(lambda: controller.is_pp_prefetch_ready("r"), "the ticket's end")
        operation = controller.take_ready_pp_prefetch("r").operation
        controller.release_pp_prefetch("r")
        if operation.host_indices is None:
            return 0, 0
        controller.prefetch_tokens_occupied -= len(operation.host_indices)
        return self._compared(
            tokens, operation, operation.completed_tokens, operation.pool_storage_result.extra_pool_hit_pages
        )

    def _states(self) -> list[PoolTransfer] | None:
        return [trailing(PoolName.MAMBA, 1)] if PoolName.MAMBA in self._rank.pools else None

    def _compared(self, tokens: Sequence[int], operation: Any, count: int, hits: dict[str, int]) -> tuple[int, int]:
        """Compares what was read, gives its memory back, and returns its tokens and states."""
        keys, states = page_keys(tokens)[: count // PAGE], 0
        assert holds(self._rank.kv, operation.host_indices[:count], keys), "wrong bytes"
        self._rank.kv.free(operation.host_indices)
        for transfer in getattr(operation, "pool_transfers", None) or []:
            pool, states = self._rank.pools[transfer.name], hits.get(str(transfer.name.value), 0)
            at = transfer.host_indices[: states * pool.page_size]
            assert holds(pool, at, keys[len(keys) - states :]), "wrong bytes"
            pool.free(transfer.host_indices)
        return count, states
