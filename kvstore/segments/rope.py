"""RoPE settings of a model, read from its configuration, and the rotation of keys by them.

The frequencies are those of engines, except for a unit in the last place of a few: 0.008 radians at most
at position 131,072. An engine gives its own as ``frequencies``, and then keys are right at any position.
Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the ``llama3`` scaling of Llama 3.1 as transformers
computes it (``modeling_rope_utils.py``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvstore.core.validate import brief, kind_of
from kvstore.errors import InvalidRequest
from kvstore.native import library as native

# RoPE settings in the configurations of models, in Hugging Face's names, and the models whose keys cannot be moved.


INTERLEAVED = ("codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj", "helium")
"""Model types of transformers that rotate neighbouring elements; the others here rotate the halves of a head."""
RECURRENT = (
    *("conv_kernel", "linear_conv_kernel_dim", "linear_num_value_heads", "lru_width", "mamba_d_state", "ssm_cfg"),
    *("ssm_state_size", "state_size", "time_step_rank", "wkv_hidden_size"),
)
"""Settings of models that keep a recurrent state, which has no rows for a segment's tokens."""
QUANTISED = ("kv_cache_dtype", "kv_cache_quant_algo", "kv_cache_scheme")
"""Settings of quantised KV, in a configuration or its ``quantization_config``."""
FULL = ("full_attention", "attention")


class _Settings:
    """Settings by name, of an object or a mapping; None if it has no such setting."""

    def __init__(self, config: Any) -> None:
        find = getattr(config, "get_text_config", None)
        config = find() if callable(find) else config
        if isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        if config is None or isinstance(config, str | bytes | int | float):
            raise InvalidRequest(f"model_config is {kind_of(config)}: expected a model's configuration")
        self._config = config

    def __getitem__(self, name: str) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)


def settings(model_config: Any) -> tuple[float, int, str, dict[str, Any]]:
    """Returns theta, rotated dims, style and scaling. Raises InvalidRequest for a model whose keys cannot be moved."""
    config = _Settings(model_config)
    for reason in (_recurrence(config), _windows(config), _attention(config), _quantisation(config)):
        if reason:
            raise InvalidRequest(f"segments of this model are refused: {reason}")
    scaling = _scaling(config)
    theta = scaling.get("rope_theta") or config["rope_theta"] or config["rotary_emb_base"]
    if not theta:
        raise _refused("its configuration has no rope_theta, so its positions are not those of RoPE")
    dims = _dims(config, scaling)
    style = "interleaved" if config["model_type"] in INTERLEAVED or config["rope_interleave"] else "half"
    return float(theta), dims, style, {key: value for key, value in scaling.items() if value is not None}


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"segments of this model are refused: {reason}")


def _scaling(config: _Settings) -> dict[str, Any]:
    found = config["rope_parameters"] or config["rope_scaling"] or {}
    if not isinstance(found, Mapping):
        raise _refused(f"its rope_scaling is {kind_of(found)}, not a mapping")
    kinds = [each for each in found.values() if isinstance(each, Mapping)]
    if kinds:  # by the type of layer
        if any(dict(each) != dict(kinds[0]) for each in kinds):
            raise _refused("its layers have different RoPE settings")
        found = kinds[0]
    scaling = dict(found)
    if "original_max_position_embeddings" not in scaling and scaling.get("rope_type", scaling.get("type")) == "yarn":
        before = config["original_max_position_embeddings"] or config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = before
    return scaling


def _dims(config: _Settings, scaling: Mapping[str, Any]) -> int:
    head_dim = config["head_dim"]
    if not head_dim:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if not width or not heads:
            raise _refused("its configuration has neither head_dim nor hidden_size and num_attention_heads")
        head_dim = width // heads
    if config["rotary_dim"]:
        return int(config["rotary_dim"])
    share = scaling.get("partial_rotary_factor") or config["partial_rotary_factor"] or config["rotary_pct"] or 1.0
    return int(head_dim * share)


def _recurrence(config: _Settings) -> str:
    signs = [name for name in RECURRENT if config[name]]
    return f"it keeps a recurrent state ({signs[0]} is set)" if signs else ""


def _windows(config: _Settings) -> str:
    layers = config["layer_types"] or config["layers_block_type"]
    others = sorted({str(kind) for kind in layers or () if kind not in FULL})
    if others:
        return f"it has layers of type {others[0]!r}, and only full attention has been shown to blend"
    if not layers and config["sliding_window"] and config["use_sliding_window"] is not False:
        return (
            f"it attends within a sliding window ({config['sliding_window']} tokens), which has not been shown to blend"
        )
    if config["attention_chunk_size"]:
        return "it attends within chunks, which have not been shown to blend"
    return ""


def _attention(config: _Settings) -> str:
    if config["kv_lora_rank"]:
        return "its attention is latent (kv_lora_rank is set): the stored rows are not keys of heads"
    if config["alibi"] or str(config["position_embedding_type"] or "rope") not in ("rope", "rotary"):
        return "its positions are not those of RoPE"
    kinds = config["no_rope_layers"]
    if kinds and not all(kinds):
        return "some of its layers have no RoPE, others have"
    return ""


def _quantisation(config: _Settings) -> str:
    inner = config["quantization_config"]
    inner = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", {})
    for name in QUANTISED:
        value = config[name] or inner.get(name)
        if value and value not in ("auto", "bfloat16", "float16", "float32"):
            return f"its KV is quantised ({name} is set): rows with scales cannot be rotated"
    return ""


# The frequencies of RoPE under each scaling that leaves them the same for all prompts.


Float32s = npt.NDArray[np.float32]

REFUSED = {
    "dynamic": "its frequencies depend on the length of the prompt",
    "longrope": "its frequencies depend on the length of the prompt",
    "su": "its frequencies depend on the length of the prompt",
    "mrope": "its positions have three parts",
}
"""Scalings under which a key cannot be stored once and moved, with the reason."""


def scaled(theta: float, dims: int, scaling: Mapping[str, Any]) -> tuple[Float32s, float]:
    """The frequencies of ``dims`` / 2 pairs in radians per position, and the factor of rotated keys.

    ``scaling`` has the names of a ``rope_scaling``. Raises InvalidRequest.
    """
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if scaling.get("mrope_section"):
        kind = "mrope"
    if kind in REFUSED:
        raise InvalidRequest(f"RoPE scaling {kind!r} is refused: {REFUSED[kind]}, so its keys cannot be moved")
    if kind not in SCALINGS:
        raise InvalidRequest(f"RoPE scaling {kind!r} is refused: known are {', '.join(SCALINGS)}")
    try:
        return SCALINGS[kind](theta, dims, scaling)
    except KeyError as cause:
        raise InvalidRequest(f"RoPE scaling {kind!r} has no {cause.args[0]}: expected it in rope_scaling") from cause
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as cause:
        raise InvalidRequest(f"RoPE scaling {dict(scaling)!r} has a wrong value: {cause}") from cause


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
    """Factor of rotated keys: 1, except for yarn."""

    def __post_init__(self) -> None:
        if not isinstance(self.dims, int) or self.dims < 2 or self.dims % 2:
            raise InvalidRequest(f"rope dims={self.dims!r}: expected an even number, the rotated elements of a head")
        if not isinstance(self.theta, int | float) or not self.theta > 0:
            raise InvalidRequest(f"rope theta={self.theta!r}: expected a positive number")
        try:
            object.__setattr__(self, "style", Style(self.style))
        except ValueError as cause:
            raise InvalidRequest(f"rope style={self.style!r}: expected half or interleaved") from cause
        computed, magnitude = scaled(float(self.theta), self.dims, self.scaling or {})
        frequencies = np.asarray(self.frequencies or computed.tolist(), np.float32)
        if frequencies.shape != (self.dims // 2,) or not np.isfinite(frequencies).all():
            raise InvalidRequest(
                f"rope has frequencies of shape {frequencies.shape}: expected {self.dims // 2} finite numbers, one for "
                "each rotated pair"
            )
        object.__setattr__(self, "scaling", dict(self.scaling or {}))
        object.__setattr__(self, "frequencies", tuple(frequencies.tolist()))
        object.__setattr__(self, "magnitude", magnitude)

    @classmethod
    def of(cls, model_config: Any, frequencies: Sequence[float] = ()) -> Rope:
        """The settings of a model, from its configuration: an object or mapping with Hugging Face's names.

        ``frequencies`` are the engine's own, such as ``model.model.rotary_emb.inv_freq.tolist()``. Raises
        InvalidRequest, saying why, if keys of this model cannot be moved: dynamic and LongRoPE scaling, recurrent
        state, sliding windows, latent attention, quantised KV, no RoPE.
        """
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


# Keys rotated to their positions.


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
    if keys.ndim < 3:
        raise InvalidRequest(f"keys have shape {keys.shape}: expected (..., tokens, heads, head_dim)")
    rotated = np.array(keys, order="C")
    rotate_planes(rope, rotated.reshape(-1, *keys.shape[-3:]), first)
    return rotated
