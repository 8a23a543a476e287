"""A digest of the weights that a model in memory computes with.

Of the tensors themselves, not of their files: weights are merged, quantised and trained after loading, and a model may
have no files at all. Every byte is hashed once per model object, and again when a tensor was replaced or written to.
"""

from __future__ import annotations

import threading
import weakref
from hashlib import blake2b
from typing import Any

import torch
import xxhash

from kvstore.brief import kind_of
from kvstore.errors import InvalidRequest

SCHEME = "tensors-xxh3:"
"""Prefix of every fingerprint made here."""
SAMPLES = 64
"""Number of elements of each tensor that every call samples, in addition to torch's own counter of writes."""

_GIVE_ONE = "give a digest of the weights as fingerprint="
_remembered: weakref.WeakKeyDictionary[Any, tuple[bytes, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def weights_fingerprint(model: Any) -> str:
    """Returns the digest of all parameters and buffers of ``model``, a torch module.

    The first call takes as long as hashing them all (tens of GB/s on the host, the speed of the bus from a device),
    later calls milliseconds. A change is detected by torch's version counters, the tensors' places and a sample of each
    tensor's elements: only a write past the counters (``.data``) that misses the whole sample goes unnoticed.

    Raises InvalidRequest if weights cannot be read, as when they are offloaded to another device.
    """
    tensors = _tensors(model)
    with _lock:
        state = _state(tensors)
        remembered = _remembered.get(model)
        if remembered is None or remembered[0] != state:
            remembered = (state, _digest(tensors))
            _remembered[model] = remembered
        return remembered[1]


def _tensors(model: Any) -> dict[str, Any]:
    """Returns all tensors by name, each once: tied weights have several names."""
    found: dict[str, Any] = dict(model.named_buffers())  # includes those that are not saved: RoPE's frequencies
    found.update(model.state_dict(keep_vars=True))
    distinct: dict[int, tuple[str, Any]] = {}
    for name, tensor in sorted(found.items()):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest(f"the model's state {name} is {kind_of(tensor)} and no tensor: {_GIVE_ONE}")
        if tensor.device.type == "meta":
            raise InvalidRequest(f"the weights {name} are not in memory (device meta, offloaded): {_GIVE_ONE}")
        distinct.setdefault(id(tensor), (name, tensor.detach()))
    return dict(distinct.values())


def _state(tensors: dict[str, Any]) -> bytes:
    """Returns bytes that change when a tensor is replaced or written to."""
    digest = blake2b(digest_size=16)
    samples: dict[Any, list[Any]] = {}
    for name, tensor in tensors.items():
        version = 0 if tensor.is_inference() else tensor._version
        digest.update(f"{name}\0{tensor.data_ptr()}\0{version}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        elements = _as_bytes(name, tensor).view(-1, tensor.itemsize)
        samples.setdefault(tensor.device, []).append(elements[:: max(1, len(elements) // SAMPLES)].flatten())
    for parts in samples.values():  # one transfer per device
        digest.update(torch.cat(parts).cpu().numpy().data)
    return digest.digest()


def _digest(tensors: dict[str, Any]) -> str:
    whole = blake2b(digest_size=16)
    for name, tensor in tensors.items():
        content = xxhash.xxh3_128_digest(_as_bytes(name, tensor).cpu().numpy().data)
        whole.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode() + content)
    return SCHEME + whole.hexdigest()


def _as_bytes(name: str, tensor: Any) -> Any:
    try:
        return tensor.contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as cause:
        raise InvalidRequest(
            f"the bytes of the weights {name} ({type(tensor).__name__}) cannot be read: {_GIVE_ONE}"
        ) from cause
