"""Native code and Python agree about every state that a chunk's file can be in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Cache
from kvstore.errors import HoldBroken, KVStoreError
from tests.kit.backends import names_of, replace_flipped
from tests.kit.native_modes import opened
from tests.kit.stores import SMALL, kv_of, same

SIZE = SMALL.chunk_tokens
CHUNKS = 4
TOKENS = np.arange(CHUNKS * SIZE)
KV = kv_of(SMALL, TOKENS)
SPOILT = 2
"""The chunk whose file is changed."""


def _aside(path: Path) -> Path:
    """Moves a file out of the root."""
    other = path.parents[2] / f"{path.name}.aside"
    path.rename(other)
    return other


def _link(path: Path) -> None:
    path.symlink_to(_aside(path))


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked_twice(path: Path) -> None:
    os.link(path, path.parents[2] / "second name")


def _resized(path: Path, change: int) -> None:
    content = path.read_bytes()
    _aside(path)
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))


STATES: dict[str, Callable[[Path], object]] = {
    "intact": lambda path: None,
    "absent": Path.unlink,
    "empty": lambda path: _resized(path, -path.stat().st_size),
    "one byte short": lambda path: _resized(path, -1),
    "one byte long": lambda path: _resized(path, 1),
    "header alone": lambda path: _resized(path, 4096 - path.stat().st_size),
    "flipped magic": lambda path: replace_flipped(path, 0),
    "flipped header": lambda path: replace_flipped(path, 70),
    "flipped header checksum": lambda path: replace_flipped(path, 4095),
    "flipped first byte": lambda path: replace_flipped(path, 4096),
    "flipped last byte": lambda path: replace_flipped(path, path.stat().st_size - 1),
    "symbolic link": _link,
    "dangling link": _dangling,
    "folder": _folder,
    "named pipe": _fifo,
    "second hard link": _linked_twice,
}
READABLE = ("intact", "second hard link")


def get(cache: Cache) -> int:
    count, array = cache.get(TOKENS)
    assert same(np.ascontiguousarray(array), np.ascontiguousarray(KV[:, :, :count])), "wrong bytes"
    return count // SIZE


def match(cache: Cache) -> int:
    return cache.match(TOKENS) // SIZE


def read_held(cache: Cache) -> int:
    out = np.empty_like(KV)
    with cache.hold(TOKENS) as hold:
        count = hold.read_into(out)
    assert same(np.ascontiguousarray(out[:, :, :count]), np.ascontiguousarray(KV[:, :, :count])), "wrong bytes"
    return count // SIZE


def view(cache: Cache) -> int:
    with cache.hold(TOKENS) as hold:
        views = hold.view()
    for at, each in enumerate(views):
        assert same(np.ascontiguousarray(each), np.ascontiguousarray(KV[:, :, at * SIZE : (at + 1) * SIZE]))
    return len(views)


def layers(cache: Cache) -> int:
    with cache.hold(TOKENS) as hold:
        try:
            for layer, k, v in hold.layers():
                count = len(k)
                assert same(k, KV[layer, 0, :count]) and same(v, KV[layer, 1, :count]), "wrong bytes"
        except HoldBroken as broken:
            return (broken.tokens_valid or 0) // SIZE
        return hold.tokens // SIZE


def put(cache: Cache) -> Any:
    result = cache.put(TOKENS, KV)
    return result.tokens_present // SIZE, get(cache)


def put_after_get(cache: Cache) -> Any:
    return get(cache), put(cache), get(cache)


CALLS = {call.__name__: call for call in (match, get, read_held, view, layers, put, put_after_get)}


def outcome(folder: Path, state: str, call: Callable[[Cache], Any], *, native: bool) -> Any:
    """What a store that was just opened returns, or the class of what it raises."""
    folder.mkdir()
    with opened(folder, native=native) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        name = names_of(store, cache, TOKENS)[SPOILT]
    STATES[state](folder / name)
    with opened(folder, native=native) as store:
        try:
            return call(store.namespace("m", SMALL))
        except KVStoreError as error:
            return type(error)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", CALLS)
def test_parity_of_call_on_file_in_any_state(tmp_root: Path, call: str, state: str) -> None:
    natively = outcome(tmp_root / "native", state, CALLS[call], native=True)
    plainly = outcome(tmp_root / "plain", state, CALLS[call], native=False)
    assert natively == plainly
    if call in ("get", "read_held", "view"):
        assert natively == (CHUNKS if state in READABLE else SPOILT)
