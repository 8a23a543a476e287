"""Plans of batches, made with what a store holds: asked for in few calls, each within its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from kvstore import planning
from kvstore.client.keeping import Keeping, KeyKeeping, TokenKeeping
from kvstore.client.port import Port
from kvstore.client.runs import Run
from kvstore.namespace import Namespace
from kvstore.node.wanted import leading
from kvstore.planning import Prompts, make_plan
from kvstore.tokens import Tokens

PROMPTS_MAX = 4096
TOKENS_MAX = 1 << 20
"""Limits on the prompts and the tokens of one call, 4 MiB; a longer prompt is a call of its own."""
ASK_S = 60.0
"""Limit for asking a store; past it, what was not answered counts as not stored."""
KEYS_MAX = 16_384
"""Limit on the keys of one call; a longer prompt is a call of its own."""

Wanted = list[tuple[int, int]]
"""Questions to a store: the index of a prompt, and how many of its leading chunks matter."""


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

    def match(call: Wanted) -> list[int]:
        # A worker whose time runs out answers for those prompts that it came to.
        return port.match_each(namespace, [packed.tokens(at, chunks * chunk_tokens) for at, chunks in call])

    made = make_plan(
        packed,
        memory_tokens=memory_tokens,
        decode_tokens=decode_tokens,
        chunk_tokens=chunk_tokens,
        ask=lambda wanted: ask_in_calls(wanted, TOKENS_MAX // chunk_tokens, match),
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

    def match(call: Wanted) -> list[int]:
        keys = list(dict.fromkeys(key for at, count in call for key in prompts[at][:count]))
        present = dict(zip(keys, port.present_blocks(namespace, keys), strict=True))
        return [leading(bytes(present[key] for key in prompts[at][:count])) for at, count in call]

    made = make_plan(
        Prompts.of_blocks(prompts, chunk_tokens),
        memory_tokens=memory_tokens,
        decode_tokens=decode_tokens,
        chunk_tokens=chunk_tokens,
        ask=lambda wanted: ask_in_calls(wanted, KEYS_MAX, match),
    )
    return Plan.of(made, KeyKeeping(port, namespace, prompts))


def ask_in_calls(wanted: Wanted, chunks_max: int, match: Callable[[Wanted], list[int]]) -> list[int]:
    """Returns the leading chunks that are stored, for each question, asked in calls; 0 where the time ran out."""
    found, ends_s = list[int](), time.monotonic() + ASK_S
    while len(found) < len(wanted) and time.monotonic() < ends_s:
        answers = match(_call(wanted, len(found), chunks_max))
        if not answers:
            break
        found += answers
    return found + [0] * (len(wanted) - len(found))


def _call(wanted: Wanted, start: int, chunks_max: int) -> Wanted:
    """Returns the questions from ``start`` on that one call asks: within the limits, and one at least."""
    totals = accumulate(chunks for _, chunks in wanted[start : start + PROMPTS_MAX])
    return wanted[start : start + max(1, sum(total <= chunks_max for total in totals))]
