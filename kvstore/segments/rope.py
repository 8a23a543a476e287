"""RoPE settings of a model, read from its configuration, and the rotation of keys by them.

The frequencies are those of engines, but for a unit in the last place of a few: 0.008 radians at most
at position 131,072. An engine gives its own as ``frequencies``, and then keys are right at any position.
Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the ``llama3`` scaling of Llama 3.1 as transformers
computes it (``modeling_rope_utils.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.brief import brief
from kvstore.errors import InvalidRequest
from kvstore.segments.scaling import Scaled, scaled

Float32s = npt.NDArray[np.float32]

POSITION_MAX = 1 << 22
"""Positions below it: as many tokens as a prompt may have, and exact in float32."""
PART_POSITIONS = 128
PARTS_MAX = 512
"""Parts of tables that are kept: 32 MiB for 128 rotated elements, the first 65,536 positions."""


class Style(enum.Enum):
    """The pairs of elements of a head that are rotated together."""

    HALF = "half"
    """Element i with i + dims/2, as Llama, Mistral, Qwen and Gemma do."""
    INTERLEAVED = "interleaved"
    """Element 2i with 2i + 1, as GPT-J, Cohere and GLM do."""


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE over the first ``dims`` elements of each head, an even number; the rest of a head is not rotated.

    ``scaling`` has the fields of a configuration's ``rope_scaling``, of type default, linear, llama3 or yarn.
    ``frequencies`` are the engine's own (dims/2 of them, radians per position); by default they are computed.
    Raises InvalidRequest, saying why, for settings under which keys cannot be moved.
    """

    theta: float
    dims: int
    style: Style = Style.HALF
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    frequencies: tuple[float, ...] = ()
    magnitude: float = field(init=False, default=1.0)
    """Factor of rotated keys: 1, but for yarn."""

    def __post_init__(self) -> None:
        if not isinstance(self.dims, int) or self.dims < 2 or self.dims % 2:
            raise InvalidRequest(f"rope dims={self.dims!r}: expected an even number, the rotated elements of a head")
        if not isinstance(self.theta, int | float) or not self.theta > 0:
            raise InvalidRequest(f"rope theta={self.theta!r}: expected a positive number")
        try:
            object.__setattr__(self, "style", Style(self.style))
        except ValueError as cause:
            raise InvalidRequest(f"rope style={self.style!r}: expected half or interleaved") from cause
        found: Scaled = scaled(float(self.theta), self.dims, self.scaling or {})
        frequencies = np.asarray(self.frequencies or found.frequencies, np.float32)
        if frequencies.shape != (self.dims // 2,) or not np.isfinite(frequencies).all():
            raise InvalidRequest(
                f"rope has frequencies of shape {frequencies.shape}: expected {self.dims // 2} finite numbers, one for "
                "each rotated pair"
            )
        object.__setattr__(self, "scaling", dict(self.scaling or {}))
        object.__setattr__(self, "frequencies", tuple(frequencies.tolist()))
        object.__setattr__(self, "magnitude", found.magnitude)

    @classmethod
    def of(cls, model_config: Any, frequencies: Sequence[float] = ()) -> Rope:
        """The settings of a model, from its configuration: an object or mapping with Hugging Face's names.

        ``frequencies`` are the engine's own, such as ``model.model.rotary_emb.inv_freq.tolist()``. Raises
        InvalidRequest, saying why, if keys of this model cannot be moved: dynamic and LongRoPE scaling, recurrent
        state, sliding windows, latent attention, quantised KV, no RoPE.
        """
        from kvstore.segments.configs import settings  # which needs nothing but the configuration

        theta, dims, style, scaling = settings(model_config)
        try:
            return cls(theta, dims, Style(style), scaling, tuple(map(float, frequencies)))
        except (TypeError, ValueError, OverflowError) as cause:
            if isinstance(cause, InvalidRequest):
                raise
            raise InvalidRequest(f"frequencies={brief(frequencies)}: expected numbers") from cause

    @property
    def digest(self) -> str:
        """A digest of all that changes rotated keys: 32 hexadecimal digits."""
        state = blake2b(digest_size=16, person=b"kvstore.rope.1")
        state.update(f"{self.dims} {self.style.value} {self.magnitude!r} ".encode())
        state.update(np.asarray(self.frequencies, "<f4").tobytes())
        return state.hexdigest()

    def tables(self, first: int, count: int) -> Iterator[tuple[slice, Float32s, Float32s]]:
        """Cosines and sines for ``count`` positions from ``first`` on, in parts: which rows of them, and two read-only
        arrays of shape ``(rows, dims/2)``.

        The angle is a float32 product, as engines compute it; cosine and sine are right to half a unit of float32.
        """
        if not 0 <= first <= first + count <= POSITION_MAX:
            raise InvalidRequest(f"positions {first} to {first + count}: expected 0 to {POSITION_MAX}")
        return self._parts(first, first + count)

    def _parts(self, first: int, end: int) -> Iterator[tuple[slice, Float32s, Float32s]]:
        at = first
        while at < end:
            start = at - at % PART_POSITIONS
            stop = min(start + PART_POSITIONS, end)
            cosines, sines = _part(self.frequencies, self.magnitude, start)
            rows = slice(at - start, stop - start)
            yield slice(at - first, stop - first), cosines[rows], sines[rows]
            at = stop


@lru_cache(maxsize=PARTS_MAX)
def _part(frequencies: tuple[float, ...], magnitude: float, start: int) -> tuple[Float32s, Float32s]:
    """Cosines and sines for ``PART_POSITIONS`` positions: they take longer than the keys of a layer take to rotate."""
    positions = np.arange(start, start + PART_POSITIONS, dtype=np.float32)
    angles = (positions[:, None] * np.asarray(frequencies, np.float32)).astype(np.float64)
    tables = tuple((each(angles) * magnitude).astype(np.float32) for each in (np.cos, np.sin))
    for table in tables:
        table.flags.writeable = False
    return tables[0], tables[1]
