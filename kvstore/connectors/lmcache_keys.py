"""The names of LMCache's objects in the store: one namespace per model, one block per object.

LMCache passes a store the model's name, the rank, the object group, the user's salt and the chunk's hash. None of these
changes with the weights, and shapes and types are known only from each object. So the namespace takes a fingerprint
from the settings, and the key takes shapes and types from the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from kvstore.connectors import common
from kvstore.connectors.common import TimeoutS, key_of, packed, text

THREADS_MAX = 64
KINDS_MAX = 256
"""Kinds of objects whose parts of a key are remembered, because many objects of one call share them."""
OPAQUE = ""
"""The tensors of an object that is only bytes, such as a compressed one."""


class LMCacheSettings(common.EngineSettings, frozen=True, kw_only=True):
    """The settings in LMCache's configuration."""

    lock_s: TimeoutS = 120.0
    """A lock that LMCache never unlocks ends after this time; at most the node's own limit of 300."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=THREADS_MAX)] = 4
    """Threads that load; half as many look up, and half as many store."""
    serde: str = ""
    """A name for the output of LMCache's ``serde``; without it only the same process finds such objects."""


def name_of(key: Any, made_of: str, opaque: str) -> bytes:
    """Returns the key of a block: LMCache's key and its tensors; ``opaque`` distinguishes bytes of different origin."""
    parts = packed(key.chunk_hash, text(f"{key.kv_rank:#x}"))
    return key_of(parts + _shared(str(key.object_group_id), key.cache_salt, made_of, opaque))


@lru_cache(KINDS_MAX)
def _shared(group: str, salt: str, made_of: str, opaque: str) -> bytes:
    fields = [group, salt, made_of, opaque] if made_of == OPAQUE else [group, salt, made_of]
    return packed(*map(text, fields))


def tensors_of(meta: Any) -> str:
    """Returns the tensors of an object by its metadata, as ``tensors`` does."""
    if meta.shapes is None:
        return _tensors((tuple(meta.shape),), (meta.dtype,))
    return _tensors(tuple(map(tuple, meta.shapes)), tuple(meta.dtypes))


@lru_cache(KINDS_MAX)
def _tensors(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
    return tensors(shapes, dtypes)


def tensors(shapes: Iterable[Iterable[int]], dtypes: Iterable[Any]) -> str:
    """Returns shapes and types of an object's tensors as text; ``OPAQUE`` if it is only bytes, or unknown."""
    parts = [(tuple(shape), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if not parts or (len(parts) == 1 and len(parts[0][0]) == 1 and parts[0][1] == "torch.uint8"):
        return OPAQUE
    return ";".join(f"{dtype}:{','.join(map(str, shape))}" for shape, dtype in parts)


def bytes_of(made: Any) -> memoryview:
    """Returns the memory of one of LMCache's objects."""
    return memoryview(made.byte_array).cast("B")


def places_by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the places of each name."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return places
