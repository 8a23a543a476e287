"""Keys rotated to their positions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.native import library as native
from kvstore.segments.rope import Float32s, Rope, Style

Keys = npt.NDArray[Any]

TYPES = {np.dtype(getattr(ml_dtypes, name, name)): number for number, name in enumerate(native.ROTATED)}
"""The types of keys that can be rotated, and their numbers in native code."""


def check_keys(rope: Rope, dtype: np.dtype[Any], head_dim: int) -> None:
    """Raises InvalidRequest if keys of this type and size cannot be rotated."""
    if dtype not in TYPES:
        raise InvalidRequest(
            f"keys of type {dtype} cannot be rotated: rows that are quantised have scales of their own; expected "
            "bfloat16, float16 or float32"
        )
    if rope.dims > head_dim:
        raise InvalidRequest(f"rope dims={rope.dims}: a head of this layout has {head_dim} elements")


def rotate_planes(rope: Rope, keys: Keys, first: int) -> None:
    """Rotates ``keys`` in place: shape ``(planes, tokens, heads, head_dim)``, row i to position ``first + i``.

    Each plane is contiguous; the planes need not be adjacent.
    """
    check_keys(rope, keys.dtype, keys.shape[3])
    assert keys.ndim == 4 and keys.flags.writeable
    for rows, cosines, sines in rope.tables(first, keys.shape[1]):
        turn(rope, keys[:, rows], cosines, sines)


def turn(rope: Rope, keys: Keys, cosines: Float32s, sines: Float32s) -> None:
    """Rotates all planes by the tables, each of shape ``(tokens, dims/2)``."""
    planes, tokens, heads, head_dim = keys.shape
    if not (planes and tokens):
        return
    assert keys[0].flags.c_contiguous and cosines.flags.c_contiguous and sines.flags.c_contiguous
    start: int = keys.__array_interface__["data"][0]
    addresses = (start + np.arange(planes) * keys.strides[0]).astype(np.uint64)
    native.library.kv_rotate(
        addresses.__array_interface__["data"][0],
        planes,
        cosines.__array_interface__["data"][0],
        sines.__array_interface__["data"][0],
        tokens,
        heads,
        head_dim,
        rope.dims // 2,
        TYPES[keys.dtype],
        rope.style is Style.INTERLEAVED,
    )


def rotate(rope: Rope, keys: Keys, first: int) -> Keys:
    """Returns ``keys`` of shape ``(..., tokens, heads, head_dim)`` rotated, row i to position ``first + i``."""
    rotated, planes = _copied(rope, keys)
    rotate_planes(rope, planes, first)
    return rotated


def unrotated(rope: Rope, keys: Keys, first: int) -> Keys:
    """Returns rotated ``keys`` as they were before, for engines that give no others: right to their type's rounding."""
    restored, planes = _copied(rope, keys)
    for rows, cosines, sines in rope.tables(first, planes.shape[1]):
        # The tables are rounded: what undoes them is the inverse matrix, not their transpose.
        norms = cosines * cosines + sines * sines
        inverse = (np.divide(each, norms, dtype=np.float32) for each in (cosines, -sines))
        turn(rope, planes[:, rows], *inverse)
    return restored


def _copied(rope: Rope, keys: Keys) -> tuple[Keys, Keys]:
    """Returns a copy, and the same memory as planes."""
    if keys.ndim < 3:
        raise InvalidRequest(f"keys have shape {keys.shape}: expected (..., tokens, heads, head_dim)")
    check_keys(rope, keys.dtype, keys.shape[-1])
    copy = np.array(keys, order="C")
    return copy, copy.reshape(-1, *keys.shape[-3:])
