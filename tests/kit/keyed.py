"""Key files, and nodes that use them, for tests of encryption."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.codec.codec import KeyFile
from kvstore.core.layout import Layout

LAYOUT = Layout(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=128)
TENANT = "acme"


def secret(name: str) -> bytes:
    """32 bytes that follow from a key's name."""
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def write_keys(path: Path, current: str | None, *names: str, tenant: str = TENANT) -> Path:
    """A key file with these keys of one tenant; ``current`` need not be among them."""
    every = {*names, current} - {None}
    keys = {name: base64.b64encode(secret(name)).decode() for name in every if name}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"tenants": {tenant: {"current": current, "keys": keys}}}))
    fresh.chmod(0o600)
    fresh.replace(path)  # in one step, as an operator should
    return path


def key_file(path: Path, current: str | None, *names: str, tenant: str = TENANT) -> KeyFile:
    """The key file, loaded, and looked at again whenever it is asked."""
    return KeyFile(write_keys(path, current, *names, tenant=tenant), look_s=0.0).load()


def kv_of(tokens: npt.NDArray[np.int64], seed: int = 0, layout: Layout = LAYOUT) -> npt.NDArray[np.generic]:
    """KV that compresses a little."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal(layout.shape(len(tokens))).astype(layout.numpy_dtype)
