"""The frequencies of RoPE under each scaling that leaves them the same for all prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

Float32s = npt.NDArray[np.float32]

REFUSED = {
    "dynamic": "its frequencies depend on the length of the prompt",
    "longrope": "its frequencies depend on the length of the prompt",
    "su": "its frequencies depend on the length of the prompt",
    "mrope": "its positions have three parts",
}
"""Scalings under which a key cannot be stored once and moved, with the reason."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Radians per position of each pair, and the factor of rotated keys."""

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


def scaled(theta: float, dims: int, scaling: Mapping[str, Any]) -> Scaled:
    """The frequencies of ``dims`` / 2 pairs; ``scaling`` has the names of a ``rope_scaling``. Raises InvalidRequest."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if scaling.get("mrope_section"):
        kind = "mrope"
    if kind in REFUSED:
        raise InvalidRequest(f"RoPE scaling {kind!r} is refused: {REFUSED[kind]}, so its keys cannot be moved")
    if kind not in SCALINGS:
        raise InvalidRequest(f"RoPE scaling {kind!r} is refused: known are {', '.join(SCALINGS)}")
    try:
        frequencies, magnitude = SCALINGS[kind](theta, dims, scaling)
    except KeyError as cause:
        raise InvalidRequest(f"RoPE scaling {kind!r} has no {cause.args[0]}: expected it in rope_scaling") from cause
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as cause:
        raise InvalidRequest(f"RoPE scaling {dict(scaling)!r} has a wrong value: {cause}") from cause
    return Scaled(tuple(frequencies.tolist()), magnitude)


def _powers(theta: float, dims: int) -> Float32s:
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _default(theta: float, dims: int, _: Mapping[str, Any]) -> tuple[Float32s, float]:
    return np.float32(1) / _powers(theta, dims), 1.0


def _linear(theta: float, dims: int, scaling: Mapping[str, Any]) -> tuple[Float32s, float]:
    return np.float32(1) / _powers(theta, dims) / np.float32(scaling["factor"]), 1.0


def _llama3(theta: float, dims: int, scaling: Mapping[str, Any]) -> tuple[Float32s, float]:
    factor, low, high = (np.float32(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    before = float(scaling["original_max_position_embeddings"])
    plain = np.float32(1) / _powers(theta, dims)
    lengths = np.float32(2 * math.pi) / plain
    longest, shortest = before / float(low), before / float(high)
    found = np.where(lengths > longest, plain / factor, plain)
    smooth = (np.float32(before) / lengths - low) / (high - low)
    between = ~(lengths < shortest) & ~(lengths > longest)
    smoothed = (np.float32(1) - smooth) * found / factor + smooth * found
    return np.where(between, smoothed, found).astype(np.float32), 1.0


def _yarn(theta: float, dims: int, scaling: Mapping[str, Any]) -> tuple[Float32s, float]:
    factor = float(scaling["factor"])
    before = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return dims * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = ((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    kept = np.float32(1) - ramp
    powers = _powers(theta, dims)
    apart, near = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    return near * (np.float32(1) - kept) + apart * kept, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale and all_dims:
        return magnitude(float(scale)) / magnitude(float(all_dims))
    return magnitude(1.0)


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
