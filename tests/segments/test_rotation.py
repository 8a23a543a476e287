"""Keys are rotated as engines rotate them: against float64 (SEGMENTS.md, S12)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import InvalidRequest
from kvstore.segments import Rope, Style, rotate
from kvstore.segments.rope import rotate_planes
from tests.kit.cases import for_each

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BOUNDS = {BFLOAT16: 5e-3, np.dtype(np.float16): 6e-4, np.dtype(np.float32): 2e-7}
"""Largest rms error of keys, as a share of their rms."""
LAST = 131_072
types = for_each("dtype", BOUNDS)


def keys_of(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    """Random keys."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(rope: Rope, keys: npt.NDArray[Any], first: int) -> npt.NDArray[np.float64]:
    """The keys rotated as complex numbers in float64, by the angles that engines have: float32 products."""
    pairs = rope.dims // 2
    angles = np.arange(first, first + keys.shape[-3], dtype=np.float32)[:, None] * np.asarray(
        rope.frequencies, np.float32
    )
    turns = np.exp(1j * angles.astype(np.float64))[:, None] * rope.magnitude
    wide = keys.astype(np.float64)
    low, high = (
        (np.arange(pairs), np.arange(pairs) + pairs)
        if rope.style is Style.HALF
        else (np.arange(pairs) * 2, np.arange(pairs) * 2 + 1)
    )
    turned = (wide[..., low] + 1j * wide[..., high]) * turns
    wide[..., low], wide[..., high] = turned.real, turned.imag
    return wide


def rms(values: npt.NDArray[Any]) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


@types
@for_each("first", (0, 1000, 5000, LAST - 64))
@for_each("style", Style)
def test_s12_rotated_keys_are_within_their_bound_of_float64(dtype: np.dtype[Any], first: int, style: Style) -> None:
    rope = Rope(500_000.0, 128, style)
    keys = keys_of(dtype, (2, 64, 4, 128))
    wanted = exact(rope, keys, first)
    assert rms(rotate(rope, keys, first).astype(np.float64) - wanted) / rms(wanted) <= BOUNDS[dtype]


@for_each("dtype", (BFLOAT16, np.dtype(np.float16)))
def test_s12_every_value_of_a_16_bit_type_is_turned_by_nothing_into_itself(dtype: np.dtype[Any]) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    keys = np.stack((values, np.zeros_like(values)), -1).reshape(1, -1, 2)
    same = rotate(Rope(10_000.0, 2), keys, 0)[..., 0].ravel()
    assert (same + 0).tobytes() == (values + 0).tobytes()  # but for the sign of zero


def test_s12_only_the_given_rows_are_rotated() -> None:
    rope, array = Rope(10_000.0, 4), np.ones((2, 2, 6, 1, 4), np.float32)
    before = array.copy()
    rotate_planes(rope, array[:, 0, 2:4], 10)
    before[:, 0, 2:4] = rotate(rope, before[:, 0, 2:4], 10)
    assert (array == before).all()


def test_s5_types_that_cannot_be_rotated_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="scales of their own"):
        rotate(Rope(10_000.0, 4), np.ones((1, 1, 4), np.int8), 0)
    with pytest.raises(InvalidRequest, match="a head of this layout has 2 elements"):
        rotate(Rope(10_000.0, 4), np.ones((1, 1, 2), np.float32), 0)


@types
@for_each("style", Style)
def test_s12_what_is_no_number_or_infinite_stays_so_and_changes_no_other(dtype: np.dtype[Any], style: Style) -> None:
    rope, keys = Rope(10_000.0, 32, style), keys_of(dtype, (4, 1, 32))
    wanted = rotate(rope, keys, 1)
    keys[1, 0, 3], keys[2, 0, 5] = np.nan, np.inf
    found = rotate(rope, keys, 1).astype(np.float32)
    broken = ~np.isfinite(found)
    assert broken.sum() == 4 and np.isnan(found[1]).sum() == 2
    assert (found[~broken] == wanted.astype(np.float32)[~broken]).all()
