"""Geometry of the KV tensors in one namespace, and the sizes that follow from it.

Separate from the namespace because it is all that the data paths need: which bytes of the caller's array
belong to each section of each chunk.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any, Literal

import ml_dtypes
import numpy as np

from kvstore.core.validate import brief
from kvstore.errors import InvalidRequest

DType = Literal[
    "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"
]
DTYPES: dict[DType, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "int8": np.dtype(np.int8),
}

LAYERS_MAX = 1024
CHUNK_TOKENS_MAX = 65_536
CHUNK_BYTES_MAX = 1 << 30


def checked_dtype(name: str) -> DType:
    """Returns ``name`` as an element type. Raises InvalidRequest."""
    for each in DTYPES:
        if isinstance(name, str) and each == name:  # an array would be compared item by item
            return each
    raise InvalidRequest(f"layout dtype={brief(name)}: expected one of {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of KV in one namespace: ``(layers, 2, tokens, kv_heads, head_dim)``, K then V, C order.

    ``chunk_tokens`` is the number of tokens in one chunk, the unit of storage.  ``dtype`` is one of
    float16, bfloat16, float32, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, int8; ``checked_dtype``
    makes one of a string.

    Raises InvalidRequest for sizes that are not positive integers, an unknown dtype, or a chunk over 1 GiB.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType = "bfloat16"
    chunk_tokens: int = 256

    # What follows from these, kept because each call asks for it a dozen times.
    numpy_dtype: np.dtype[Any] = field(init=False, compare=False, repr=False)
    """The element type as numpy knows it (bfloat16 and float8 come from ml_dtypes)."""
    itemsize: int = field(init=False, compare=False, repr=False)
    """Bytes of one element."""
    token_bytes: int = field(init=False, compare=False, repr=False)
    """Bytes of one token in one tensor (K or V) of one layer."""
    kv_bytes_per_token: int = field(init=False, compare=False, repr=False)
    """Bytes of one token in all tensors of all layers."""
    section_count: int = field(init=False, compare=False, repr=False)
    """Sections in a chunk: K and V of each layer, in the order K0 V0 K1 V1 ..."""
    section_bytes: int = field(init=False, compare=False, repr=False)
    """Bytes of one section: one tensor of one layer for ``chunk_tokens`` tokens."""
    chunk_bytes: int = field(init=False, compare=False, repr=False)
    """Payload bytes of one chunk."""

    def __post_init__(self) -> None:
        for name, most in (
            ("layers", LAYERS_MAX),
            ("kv_heads", 1 << 20),
            ("head_dim", 1 << 24),
            ("chunk_tokens", CHUNK_TOKENS_MAX),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidRequest(f"layout {name}={brief(value)}: expected an integer from 1 to {most}")
        checked_dtype(self.dtype)
        dtype = DTYPES[self.dtype]
        token_bytes, section_count = self.kv_heads * self.head_dim * dtype.itemsize, 2 * self.layers
        section_bytes = self.chunk_tokens * token_bytes
        for name, found in (
            ("numpy_dtype", dtype),
            ("itemsize", dtype.itemsize),
            ("token_bytes", token_bytes),
            ("kv_bytes_per_token", section_count * token_bytes),
            ("section_count", section_count),
            ("section_bytes", section_bytes),
            ("chunk_bytes", section_count * section_bytes),
        ):
            object.__setattr__(self, name, found)
        if self.chunk_bytes > CHUNK_BYTES_MAX:
            raise InvalidRequest(
                f"a chunk of this layout has {self.chunk_bytes} bytes, over the limit of {CHUNK_BYTES_MAX}: "
                f"lower chunk_tokens (now {self.chunk_tokens})"
            )

    @property
    def short(self) -> str:
        """The shape of one chunk and the type of its elements, for people: ``32x2x256x8x128 bfloat16``."""
        return f"{'x'.join(map(str, self.shape(self.chunk_tokens)))} {self.dtype}"

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV array of ``tokens`` tokens. Raises InvalidRequest."""
        count = -1
        with suppress(TypeError):  # an array has an index, and it fails
            count = index(tokens)
        if isinstance(tokens, bool) or count < 0:
            raise InvalidRequest(f"shape of {brief(tokens)} tokens: expected a whole number, 0 or more")
        return (self.layers, 2, count, self.kv_heads, self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain JSON values."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Layout:
        """The inverse of to_dict. Raises InvalidRequest where a field is missing, unknown or out of range."""
        try:
            return cls(**fields)
        except TypeError as cause:
            raise InvalidRequest(f"not a layout: {fields!r} ({cause})") from cause
