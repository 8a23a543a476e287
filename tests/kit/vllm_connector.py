"""The scheduler's half of the vLLM connector on a store in memory, and requests and steps as vLLM passes them.

No vLLM is needed here, only the two empty base classes of the messages, and its version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvstore import Layout
from kvstore.client.cache import BlockCache
from kvstore.connectors.vllm.blocks import LayerGroups
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.namespace import Namespace
from tests.kit.patience import PATIENCE_S
from tests.kit.vllm_modules import vllm_modules

BLOCK_TOKENS = 4
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
EVENTS: dict[str, dict[str, Any]] = {
    "vllm.v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": lambda request, start, end, media: (("a salt", start), media),
        "to_event_extra_keys": lambda extra_keys: extra_keys,
    }
}
"""The parts of vLLM that the connector's descents use."""


@dataclass
class Request:
    """The part of a vLLM request that the connector reads."""

    request_id: str
    num_tokens: int
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: Any = None
    kv_hints: Any = None
    priority: int = 0
    num_computed_tokens: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        """A token for each place."""
        return list(range(self.num_tokens))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.block_hashes = self.block_hashes or [
            bytes([number]) * 32 for number in range(self.num_tokens // BLOCK_TOKENS)
        ]


class Blocks:
    """The block table of every request: block ``100 + n`` holds the tokens of its n-th block."""

    def get_block_ids(self, request_id: str = "") -> tuple[list[int]]:
        return (list(range(100, 132)),)


@contextmanager
def halves() -> Iterator[Callable[..., Any]]:
    """Yields what makes a scheduler's half on a store in memory."""
    with vllm_modules({BASE: {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object}, **EVENTS}):
        yield from _halves()


def _halves() -> Iterator[Callable[..., Any]]:
    from kvstore.connectors.vllm.descents import Describer
    from kvstore.connectors.vllm.scheduler import SchedulerHalf

    made: list[Any] = []

    def half(
        clusters: Sequence[LayerGroups] = (LayerGroups((0,), BLOCK_TOKENS),),
        *,
        loads: bool = True,
        waits: bool = True,
        **settings: Any,
    ) -> Any:
        given = ConnectorSettings.of({"root": "memory://", **settings})
        shape = SimpleNamespace(
            tp=1,
            pp=1,
            clusters=clusters,
            block_tokens=[each.block_tokens for each in clusters],
            hash_tokens=BLOCK_TOKENS,
            adapters="float32",
        )
        names = [Namespace.of("model", Layout(1, 1, 16, "int8", 1))]
        said = Describer(clusters, BLOCK_TOKENS)
        made.append(
            SchedulerHalf(
                *(given, shape, names),  # type: ignore[arg-type]
                loads=loads,
                stores=True,
                describer=said,
                waits=waits,
            )
        )
        made[-1].manager = Blocks()
        return made[-1]

    yield half
    for each in made:
        each.close()


def cache(half: Any) -> BlockCache:
    found: list[BlockCache] = half._store.caches()
    return found[0]


def store(half: Any, request: Request, count: int) -> None:
    keys = [hashed + b"\0" for hashed in request.block_hashes[:count]]
    assert cache(half).put(keys, [bytes(64)] * count) == [True] * count


def matched(half: Any, request: Request, computed: int = 0) -> tuple[int, bool]:
    """Asks as vLLM does, once per step, until there is an answer."""
    ends_s = time.monotonic() + PATIENCE_S
    while (found := half.matched_tokens(request, computed))[0] is None:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    answer: tuple[int, bool] = found
    return answer


def step(half: Any, request: Request, computed: int, count: int) -> Any:
    """The orders of a step in which one new request is scheduled."""
    return half.orders(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={request.request_id: count},
            total_num_scheduled_tokens=count,
        )
    )


def idle(half: Any) -> Any:
    """The orders of a step in which nothing is scheduled."""
    return half.orders(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            total_num_scheduled_tokens=0,
        )
    )
