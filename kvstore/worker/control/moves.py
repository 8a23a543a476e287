"""Prefetch, move and release of several prompts as one operation, which goes on without its client."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import Overloaded
from kvstore.namespace import Namespace
from kvstore.node.moves import Act, Level, Move
from kvstore.node.node import Node
from kvstore.tokens import TokenArray
from kvstore.worker.control.runner import Step

LOOK_S = 0.2
"""Interval between two looks at the progress of a move and at its cancellation."""
PAUSE_S = 0.5
"""Pause while other moves occupy the node."""


def move_prompts(
    node: Node, namespace: Namespace, prompts: Sequence[TokenArray], act: Act, level: Level, step: Step
) -> str:
    """Moves one prompt after the other. Counts chunks; raises what one of them failed with."""
    size = namespace.layout.chunk_tokens
    total = sum(len(tokens) // size for tokens in prompts)
    passed = moved = 0
    for tokens in prompts:
        move = _begun(node, namespace, tokens, act, level, step)
        try:
            while not move.done:
                move.wait(LOOK_S)
                step.count(chunks=moved + move.chunks, tokens=(moved + move.chunks) * size)
                step.progress(passed + move.chunks, total)
        finally:
            move.cancel()
        if move.error is not None:
            raise move.error
        passed += len(move.chain)
        moved += move.chunks
        step.count(chunks=moved, tokens=moved * size)
        step.progress(passed, total)
    return "" if moved == total else f"{moved} of {total} chunks: the others are not stored, or found no room"


def _begun(node: Node, namespace: Namespace, tokens: TokenArray, act: Act, level: Level, step: Step) -> Move:
    chain = node.chains.of(namespace, tokens)
    while True:
        try:
            return node.begin_move(chain, act, level)
        except Overloaded:
            step.pause(PAUSE_S)
