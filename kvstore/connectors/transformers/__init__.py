"""Prefill of Hugging Face transformers models through a store.

    past = prefill_with_store(model, input_ids, store)
    model.generate(input_ids, past_key_values=past)

``input_ids`` go to ``generate`` whole; it computes only what ``past`` does not hold.

``prefill_blended`` also reuses documents at another place than they were computed at (docs/blending.md).
"""

from __future__ import annotations

from kvstore.connectors.transformers.blend import Blended, prefill_blended, put_segments
from kvstore.connectors.transformers.cache_spec import BlendedCache, model_cache
from kvstore.connectors.transformers.prefill import prefill_with_store

__all__ = ["Blended", "BlendedCache", "model_cache", "prefill_blended", "prefill_with_store", "put_segments"]
