"""The caller's KV arrays as sections: the bytes of each chunk, without a copy where memory allows it.

An array has shape ``(layers, 2, tokens, kv_heads, head_dim)``. K or V of one layer is a *plane*. Within a plane the
tokens of a chunk are one run of bytes. Planes need not be adjacent, so a slice along tokens of a larger array works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.brief import kind_of
from kvstore.buffers import aligned
from kvstore.errors import InvalidRequest
from kvstore.layout import Layout
from kvstore.sections import Planes

KvArray = npt.NDArray[Any]


def source_array(kv: Any, layout: Layout, tokens: int) -> KvArray:
    """Returns ``kv`` as an array of exactly ``tokens`` tokens with contiguous planes; copies it only if they are not.

    Raises InvalidRequest for another shape or type.
    """
    array = _checked(kv, layout, "kv")
    if array.shape[2] != tokens:
        raise InvalidRequest(
            f"kv has {array.shape[2]} tokens: expected {tokens}, one for each token after prefix; "
            f"its shape is {array.shape}, expected {layout.shape(tokens)}"
        )
    return array if _has_contiguous_planes(array) else np.ascontiguousarray(array)


def target_array(out: Any, layout: Layout) -> KvArray:
    """Returns ``out`` as an array to read into.

    Raises InvalidRequest for another shape or type, for read-only memory, and for planes that share memory.
    """
    array = _checked(out, layout, "out")
    if not array.flags.writeable:
        raise InvalidRequest("out is read-only: give a writable array")
    if _overlaps(array):
        # Bytes read into one plane would look like damage in another, and the chunk would be quarantined for it.
        raise InvalidRequest(
            "out has layers, or K and V, that share memory: give an array with separate memory for each"
        )
    return array


def layer_arrays(out: Sequence[Any], layout: Layout, tokens: int) -> list[KvArray]:
    """Returns the part for ``tokens`` of each array to read layers into: three or more, or one for each layer.

    Raises InvalidRequest as ``target_array`` does, and for arrays that are too small, or share memory.
    """
    one, arrays = replace(layout, layers=1), list[KvArray]()
    if not isinstance(out, Iterable) or (isinstance(out, np.ndarray) and not out.ndim):
        raise InvalidRequest(f"out is {kind_of(out)}: expected three arrays or more")
    for array in out:
        whole = target_array(np.expand_dims(array, 0) if isinstance(array, np.ndarray) else array, one)
        if whole.shape[2] < tokens or not _has_contiguous_planes(whole):
            raise InvalidRequest(
                f"out has an array of shape {array.shape}: expected contiguous K and V of at least {tokens} tokens"
            )
        arrays.append(whole[0, :, :tokens])
    if len(arrays) < (needed := min(3, layout.layers)):
        raise InvalidRequest(f"out has {len(arrays)} arrays: expected {needed} or more, as two layers are read ahead")
    planes = sorted((plane.__array_interface__["data"][0], plane.nbytes) for array in arrays for plane in array)
    if any(start + size > following for (start, size), (following, _) in pairwise(planes)):
        raise InvalidRequest("out has arrays that share memory: give separate ones")
    return arrays


def fillable(array: KvArray) -> KvArray:
    """Returns the array itself if sections can be read straight into it, else a contiguous one to copy from."""
    return array if _has_contiguous_planes(array) else new_array(array.shape, array.dtype)


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> KvArray:
    """Returns an array that is not cleared. It begins at a page, where the kernel copies faster."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(aligned(size_bytes), np.uint8).view(dtype).reshape(shape)


def _checked(kv: Any, layout: Layout, what: str) -> KvArray:
    if not isinstance(kv, np.ndarray):
        raise InvalidRequest(f"{what} is {kind_of(kv)}: expected a numpy array of {layout.dtype}")
    expected = layout.numpy_dtype
    # Raw bits are accepted as a plain integer type of the same size: frameworks export bfloat16 and float8 that way.
    is_raw = kv.dtype.kind == "u" and kv.dtype.itemsize == expected.itemsize and kv.dtype.isnative
    if kv.dtype != expected and not is_raw:
        raise InvalidRequest(
            f"{what} has dtype {kv.dtype}: expected {layout.dtype} (or uint{8 * expected.itemsize} holding its bits)"
        )
    if kv.ndim != 5 or kv.shape[:2] != (layout.layers, 2) or kv.shape[3:] != (layout.kv_heads, layout.head_dim):
        raise InvalidRequest(
            f"{what} has shape {kv.shape}: expected "
            f"({layout.layers}, 2, tokens, {layout.kv_heads}, {layout.head_dim}): layers, K and V, tokens, heads, dim"
        )
    return kv


def _overlaps(array: KvArray) -> bool:
    """True if contiguous planes share memory."""
    if array.flags.c_contiguous or not _has_contiguous_planes(array):
        return False
    starts = np.sort(Planes(array, 1).addresses())
    return bool((np.diff(starts) < array[0, 0].nbytes).any())


def _has_contiguous_planes(array: KvArray) -> bool:
    """True if K and V of each layer are each one run of memory in token order."""
    return bool(array[0, 0].flags.c_contiguous) and array.dtype.isnative
