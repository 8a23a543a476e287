"""A decoder of transformers, by layers and by rows: a row is a token of the prompt that is still being computed.

The model's own layers compute everything. They are given the rows' positions, a mask, and the KV of the whole prompt,
into which each layer writes K and V of the rows. So biases, norms on keys, grouped heads, scaled embeddings, soft caps
and windows are the model's, and a run of all rows is the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.connectors.transformers.cache_spec import check_model, refused
from kvstore.segments import Rope, Rule, Verdict

MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})
"""The model types whose layers are built as ``Decoder.project`` expects."""
ATTENTIONS = ("sdpa", "eager")
"""Implementations of attention that take any mask."""


@dataclass(frozen=True, slots=True)
class PromptKV:
    """KV of a whole prompt: for each layer K (rotated) and V, of shape (1, heads, tokens, dim)."""

    keys: list[Any]
    values: list[Any]

    def at(self, layer: int, rows: Any) -> tuple[Any, Any]:
        """Returns K and V of these rows of a layer, each of shape (rows, heads, dim)."""
        return self.keys[layer][0, :, rows].transpose(0, 1), self.values[layer][0, :, rows].transpose(0, 1)

    def write(self, layer: int, rows: Any, k: Any, v: Any) -> None:
        """Writes K and V of these rows of a layer, each of shape (rows, heads, dim)."""
        self.keys[layer][0, :, rows] = k.transpose(0, 1)
        self.values[layer][0, :, rows] = v.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _PartialRows:
    """The cache that a layer sees: it adds K and V of ``rows`` and attends to those of the whole prompt."""

    kv: PromptKV
    rows: Any

    def update(self, k: Any, v: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Writes K and V of shape (1, heads, rows, dim). Called by the model's attention."""
        self.kv.write(layer, self.rows, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return self.kv.keys[layer], self.kv.values[layer]


class Decoder:
    """The layers of ``model``, for one thread. Raises InvalidRequest for a model that is not built as needed."""

    def __init__(self, model: Any) -> None:
        check_model(model)
        config = model.config
        if config.model_type not in MODELS:
            raise refused(model, f"blending is for {', '.join(sorted(MODELS))} and this is {config.model_type}")
        if config._attn_implementation not in ATTENTIONS:
            raise refused(
                model,
                f"blending attends with a mask of its own, which {config._attn_implementation} does not take "
                f"(load the model with attn_implementation={ATTENTIONS[0]!r})",
            )
        self.model = model
        self._config = config
        self._body = model.get_decoder()
        self._windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        self._by_type = "layer_type" in signature(self._body.rotary_emb.forward).parameters
        weight = self._body.embed_tokens.weight
        self._masks: tuple[Any, dict[int | None, Any]] = (None, {})  # rows, and their masks by window
        self.device, self.dtype = weight.device, weight.dtype
        if any(each.device != self.device for each in model.parameters()):
            raise refused(model, "blending runs on one device, and its layers are on several")
        attention = self._body.layers[0].self_attn
        self.kv_heads = attention.k_proj.out_features // attention.head_dim
        self.head_dim = attention.head_dim

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._body.layers)

    def rope(self) -> Rope:
        """Returns the model's RoPE, with its own frequencies. Raises InvalidRequest if keys cannot be moved by it."""
        if self._by_type:
            raise refused(self.model, "its layers rotate keys with different bases")
        return Rope.of(self._config, frequencies=self._body.rotary_emb.inv_freq.tolist())

    def empty(self, tokens: int) -> PromptKV:
        """Returns KV for a prompt of ``tokens``, not yet filled."""
        shape = (1, self.kv_heads, tokens, self.head_dim)
        made = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * self.layers)]
        return PromptKV(made[::2], made[1::2])

    def embed(self, ids: Any) -> Any:
        """Returns the hidden states before the first layer, of shape (1, rows, width), for a vector of token ids."""
        return self._body.embed_tokens(ids[None].to(self.device))

    def project(self, layer: int, hidden: Any) -> tuple[Any, Any]:
        """Returns K, not rotated, and V of rows before ``layer``, each of shape (rows, heads, dim)."""
        block = self._body.layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(hidden[0])
        k = attention.k_proj(normed).view(len(normed), self.kv_heads, self.head_dim)
        v = attention.v_proj(normed).view(len(normed), self.kv_heads, self.head_dim)
        norm = getattr(attention, "k_norm", None)
        return (k if norm is None else norm(k)), v

    def rotate(self, layer: int, k: Any, positions: Any) -> Any:
        """Returns K of shape (rows, heads, dim) rotated to ``positions``: in float32, rounded once."""
        cos, sin = self._tables(layer, torch.zeros(0, dtype=torch.float32, device=self.device), positions)
        first, second = k.float().chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (k.float() * cos[0, :, None] + turned * sin[0, :, None]).to(k.dtype)

    def run(self, layer: int, hidden: Any, rows: Any, kv: PromptKV) -> Any:
        """Computes ``layer`` for these rows (positions, ascending); writes their K and V into ``kv``.

        ``hidden`` and what is returned are hidden states of shape (1, rows, width).
        """
        return self._body.layers[layer](
            hidden,
            attention_mask=self._mask(layer, rows, kv.keys[layer].shape[2]),
            position_ids=rows[None],
            position_embeddings=self._tables(layer, hidden, rows),
            past_key_values=_PartialRows(kv, rows),
        )

    def logits(self, hidden: Any) -> Any:
        """Returns the logits of shape (rows, vocabulary) behind the last layer."""
        logits = self.model.lm_head(self._body.norm(hidden))[0]
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _tables(self, layer: int, like: Any, positions: Any) -> tuple[Any, Any]:
        """Returns cosines and sines of positions, of shape (1, rows, dim) and the type of ``like``."""
        kind = (self._config.layer_types[layer],) if self._by_type else ()
        cos, sin = self._body.rotary_emb(like, positions[None], *kind)
        return cos, sin

    def _mask(self, layer: int, rows: Any, tokens: int) -> Any:
        """Returns 0 where a row sees a token, else the least number; None where all rows see all before them."""
        window = self._windows[layer]
        if len(rows) == tokens and (window is None or window >= tokens) and self._config._attn_implementation == "sdpa":
            return None
        if self._masks[0] is not rows:  # layers between two checks have the same rows
            self._masks = (rows, {})
        known = self._masks[1]
        if window not in known:
            columns = torch.arange(tokens, device=rows.device)
            seen = columns <= rows[:, None]
            if window is not None:
                seen &= columns > rows[:, None] - window
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=rows.device)
            known[window] = mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]
        return known[window]


# Selective recomputation (CacheBlend, arXiv 2405.16444, section 4): the reference that an engine can be held against.
#
# Some rows of a prompt have KV that was computed in another context, and is slightly wrong in this one. Up to the
# first check layer all rows are computed. At a check layer the rule compares K, V or both of each reused row as
# computed here with what was loaded; the rows that deviate most stay, as many as the ratio says. The others keep what
# was loaded, from this layer on. Rows without KV (the question, what was not found) always stay.


Rows = tuple[Any, Any]
"""K and V of rows, each of shape (rows, heads, dim)."""
Score = Callable[[Rule, Rows, Rows], Any]
"""Takes the rule, rows as computed and as loaded; returns a number for each row: the highest are computed on."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The outcome of a run. ``hidden`` are the last layer's states of ``rows``, of shape (1, rows, width)."""

    hidden: Any
    rows: Any
    computed: tuple[int, ...]
    """Reused rows that were computed, in each layer."""
    reused: int
    """All reused rows."""

    @property
    def work(self) -> float:
        """The share of reused rows times layers that was computed, 0 to 1."""
        return sum(self.computed) / max(1, self.reused * len(self.computed))


def deviation(rule: Rule, new: Rows, old: Rows) -> Any:
    """Returns the squared distance of each row's K, V, or both (each divided by its mean)."""
    of_k, of_v = (((one - other).float() ** 2).sum((1, 2)) for one, other in zip(new, old, strict=True))
    if rule is Rule.BOTH:
        return sum(each / each.mean().clamp_min(torch.finfo(each.dtype).tiny) for each in (of_k, of_v))
    return of_k if rule is Rule.K else of_v


def recompute(
    decoder: Decoder,
    ids: Any,
    kv: PromptKV,
    reused: Any,
    verdict: Verdict | None,
    *,
    exact: int = 0,
    score: Score = deviation,
) -> Recomputed:
    """Completes ``kv``, the KV of the prompt ``ids`` (a vector), by the rule, check layers and ratios of ``verdict``.

    ``reused``, a vector of booleans, marks the rows of ``kv`` that were loaded for another context. The leading
    ``exact`` rows were loaded for this one and are not computed; all other rows are. None computes reused rows too.
    """
    ratios = {} if verdict is None else dict(zip(verdict.check_layers, verdict.ratios, strict=True))
    total, computed = int(reused.sum()), []
    rows = torch.arange(exact, len(ids), device=decoder.device)
    with torch.no_grad():
        hidden = decoder.embed(ids[exact:])
        for layer in range(decoder.layers):
            if verdict is not None and layer in ratios:
                asked = reused[rows].nonzero()[:, 0]
                k, v = decoder.project(layer, hidden[:, asked])
                points = score(verdict.rule, (decoder.rotate(layer, k, rows[asked]), v), kv.at(layer, rows[asked]))
                stay = ~reused[rows]
                stay[asked[points.topk(min(round(ratios[layer] * total), len(asked))).indices]] = True
                rows, hidden = rows[stay], hidden[:, stay]
            if len(rows):
                hidden = decoder.run(layer, hidden, rows, kv)
            computed.append(int(reused[rows].sum()))
    return Recomputed(hidden, rows, tuple(computed), total)


def alone(decoder: Decoder, ids: Any) -> list[Rows]:
    """Prefills ``ids``, a vector, as a prompt of its own; returns K, not rotated, and V of each layer."""
    kv, rows, found = decoder.empty(len(ids)), torch.arange(len(ids), device=decoder.device), []
    with torch.no_grad():
        hidden = decoder.embed(ids)
        for layer in range(decoder.layers):
            found.append(decoder.project(layer, hidden))
            hidden = decoder.run(layer, hidden, rows, kv)
    return found
