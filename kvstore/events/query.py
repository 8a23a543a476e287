"""Answers for routers that ask: how long a prefix of a prompt is stored. Looks at inventories alone, so it is fast."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np

from kvstore.address import RecentChains
from kvstore.events.columns import Mask
from kvstore.events.table import U64
from kvstore.events.truth import Model, Truth
from kvstore.wire.questions import Question, answer_document

RECENT_BYTES = 64 << 20
"""Memory for addresses of recent prompts: the next turn of a chat hashes its new tokens alone."""


class Answers:
    """Answers from the inventories of a truth. Thread-safe."""

    def __init__(self, truth: Truth, instance: str, medium: str) -> None:
        self._truth = truth
        self._instance = instance
        self._medium = medium
        self._chains = RecentChains(RECENT_BYTES)

    def answer(self, question: Question) -> dict[str, Any]:
        """Returns the longest stored prefix, in tokens, over all namespaces with that name and tenant; 0 if none."""
        models = [
            model
            for model in list(self._truth.models.values())
            if (model.namespace.name, model.namespace.tenant) == (question.model, question.tenant)
        ]
        found = [(self._leading(model, question), model.namespace.layout.chunk_tokens) for model in models]
        blocks, size = max(found, key=lambda each: each[0] * each[1], default=(0, 0))
        return answer_document(question, size, blocks, self._instance, {self._medium: blocks})

    def _leading(self, model: Model, question: Question) -> int:
        inventory = model.inventory
        if question.tokens is not None:
            packed = self._chains.of(model.namespace, question.tokens).packed_addresses
            rows = inventory.rows
            with self._truth.lock:
                chunks = _leading_chain(lambda firsts: inventory.told(rows.find(firsts)), packed)
                blocks = _leading_chain(lambda firsts: inventory.told(rows.find_spelled(firsts)), packed)
            return max(chunks, blocks)
        with self._truth.lock:
            return _leading(inventory.told(inventory.rows.find_hashes(np.array(question.hashes, np.uint64))))


def _leading_chain(told: Callable[[U64], Mask], packed: bytes) -> int:
    """Returns how many leading addresses of a chain are told. What is told has told parents, so few are looked at."""
    firsts = np.frombuffer(packed, ">u8")[::2]
    first, stop = 0, len(firsts)
    while first < stop:
        step = isqrt(stop - first)
        ends = range(first + step - 1, stop, step)
        count = _leading(told(firsts[ends].astype(np.uint64)))
        first += count * step
        if count < len(ends):
            stop = first + step - 1
    return first


def _leading(told: Mask) -> int:
    return len(told) if told.all() else int(told.argmin())
