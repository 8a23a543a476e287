"""Prefill of Hugging Face transformers models through a store.

    past = prefill_with_store(model, input_ids, store)
    model.generate(input_ids, past_key_values=past)

``input_ids`` go to ``generate`` whole; it computes only what ``past`` does not hold.
"""

from __future__ import annotations

from kvstore.connectors.transformers.namespace import model_cache
from kvstore.connectors.transformers.prefill import prefill_with_store

__all__ = ["model_cache", "prefill_with_store"]
