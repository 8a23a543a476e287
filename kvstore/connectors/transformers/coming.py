"""Stored KV that comes into a model's cache: all of it, or layer by layer while the model computes what follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvstore.connectors.transformers.kept import Kept


class Coming:
    """K and V of a prompt's first tokens on their way into ``past``, which is empty.

    ``layers`` yields both for each layer, of shape (2, tokens, width), or nothing if nothing is stored. Methods raise
    what it raises.
    """

    def __init__(self, past: Any, kept: Kept, layers: Iterable[Any]) -> None:
        self._add = past.update
        self._kept = kept
        self._layers = iter(layers)
        self._arrived = 0
        # A model asks its first layer how many tokens came before. With windows it asks others, too.
        self._needed = 1 if all(type(layer) is DynamicLayer for layer in past.layers) else len(past.layers)

    def begin(self) -> None:
        """Waits for the layers that a model must have before it starts."""
        self._wait(self._needed)

    def reach(self, layer: int) -> None:
        """Waits until this layer and those before it are in the cache."""
        self._wait(layer + 1)

    def finish(self) -> None:
        """Waits for all layers."""
        self._wait(len(self._kept.devices))

    def _wait(self, count: int) -> None:
        while self._arrived < count and (rows := next(self._layers, None)) is not None:
            k, v = rows
            kept, layer = self._kept, self._arrived
            if kept.k != kept.v:
                width = kept.k[0] * kept.k[1]
                k, v = torch.cat((k, v), 1).split((width, kept.row - width), 1)
            self._add(_heads(k, kept.k), _heads(v, kept.v), layer)
            self._arrived += 1


def _heads(rows: Any, shape: tuple[int, int]) -> Any:
    """Reshapes (tokens, heads * dim) to the cache's (1, heads, tokens, dim)."""
    return rows.reshape(len(rows), *shape).transpose(0, 1)[None].contiguous()
