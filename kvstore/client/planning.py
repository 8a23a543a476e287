"""Plans of batches, made with what a store holds: asked for in few calls, each within its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from kvstore import planning
from kvstore.client.keeping import Keeping, KeyKeeping, TokenKeeping
from kvstore.client.port import Port
from kvstore.client.runs import Run
from kvstore.namespace import Namespace
from kvstore.planning import Prompts, make_plan
from kvstore.tokens import Tokens

PROMPTS_MAX = 4096
TOKENS_MAX = 1 << 20
"""Limits on the prompts and the tokens of one call, 4 MiB; a longer prompt is a call of its own."""
ASK_S = 60.0
"""Limit for asking a store; past it, what was not answered counts as not stored."""
KEYS_MAX = 16_384
"""Limit on the keys of one call; a longer prompt is a call of its own."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan(planning.Plan):
    """The plan of a batch, which can be run. Made by ``Cache.plan``; it keeps the prompts, 4 bytes a token."""

    keeping: Keeping = field(compare=False)
    """The store, for runs."""

    @classmethod
    def of(cls, plan: planning.Plan, keeping: Keeping) -> Plan:
        """A plan that can be run."""
        return cls(**values_of(plan), keeping=keeping)

    def run(self, *, ahead: int = 2, attempts: int = 3) -> Run:
        """Runs the plan: ``with plan.run() as run: for group in run: ...``. Several runs are independent.

        ``ahead`` groups are brought into memory before their turn; a group goes out at most ``attempts`` times.
        Consumers are threads of this process (``kvstore.aio`` has tasks). To run members in other processes, take
        groups here and send members there; end a group with an error, or ``give_back``, if its process dies.
        """
        return Run(self, self.keeping, ahead, attempts)


def values_of(plan: planning.Plan) -> dict[str, Any]:
    """The fields that every plan has."""
    return {each.name: getattr(plan, each.name) for each in fields(planning.Plan)}


def plan_tokens(
    port: Port,
    namespace: Namespace,
    prompts: Iterable[Tokens],
    memory_tokens: int,
    decode_tokens: int | Sequence[int | None] | None,
) -> Plan:
    """Plans a batch of prompts, which share whole chunks. Raises InvalidRequest."""
    chunk_tokens = namespace.layout.chunk_tokens
    packed = Prompts.of_tokens(prompts, chunk_tokens)

    def ask(wanted: list[tuple[int, int]]) -> list[int]:
        found, ends_s = list[int](), time.monotonic() + ASK_S
        while len(found) < len(wanted) and time.monotonic() < ends_s:
            call = _call(wanted, len(found), PROMPTS_MAX, TOKENS_MAX // chunk_tokens)
            # A worker whose time runs out answers for those prompts that it came to.
            answers = port.match_each(namespace, [packed.tokens(at, chunks * chunk_tokens) for at, chunks in call])
            if not answers:
                break
            found += answers
        return found + [0] * (len(wanted) - len(found))

    made = make_plan(
        packed, memory_tokens=memory_tokens, decode_tokens=decode_tokens, chunk_tokens=chunk_tokens, ask=ask
    )
    return Plan.of(made, TokenKeeping(port, namespace, packed))


def plan_keys(
    port: Port,
    namespace: Namespace,
    prompts: Sequence[Sequence[bytes]],
    memory_tokens: int,
    decode_tokens: int | Sequence[int | None] | None,
) -> Plan:
    """Plans a batch of prompts given as checked keys of blocks of ``chunk_tokens`` tokens. Raises InvalidRequest."""
    chunk_tokens = namespace.layout.chunk_tokens

    def ask(wanted: list[tuple[int, int]]) -> list[int]:
        found, ends_s = list[int](), time.monotonic() + ASK_S
        while len(found) < len(wanted) and time.monotonic() < ends_s:
            call = _call(wanted, len(found), PROMPTS_MAX, KEYS_MAX)
            keys = list(dict.fromkeys(key for at, count in call for key in prompts[at][:count]))
            present = dict(zip(keys, port.present_blocks(namespace, keys), strict=True))
            for at, count in call:
                here = [present[key] for key in prompts[at][:count]]
                found.append(here.index(False) if False in here else count)
        return found + [0] * (len(wanted) - len(found))

    made = make_plan(
        Prompts.of_blocks(prompts, chunk_tokens),
        memory_tokens=memory_tokens,
        decode_tokens=decode_tokens,
        chunk_tokens=chunk_tokens,
        ask=ask,
    )
    return Plan.of(made, KeyKeeping(port, namespace, prompts))


def _call(wanted: list[tuple[int, int]], start: int, prompts_max: int, chunks_max: int) -> list[tuple[int, int]]:
    """The questions from ``start`` on that one call asks: within the limits, and one at least."""
    totals = accumulate(chunks for _, chunks in wanted[start : start + prompts_max])
    return wanted[start : start + max(1, sum(total <= chunks_max for total in totals))]
