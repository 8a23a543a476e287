"""Stores for tests: a member over any root, small layouts, and KV whose bytes follow from the tokens before it."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.client.cache import close_when_dropped
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.codec.codec import KeyFile
from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.core.write_mode import Durability
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.open import join
from kvstore.engine.settings import NO_TIERS, Limits, NodeOptions, TierSettings
from kvstore.format.header import checksum
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import PATIENCE_S

TINY = Layout(layers=2, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)
SMALL = Layout(layers=3, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16)
ONE_QUANTUM_S = 1_000_000_000
"""No quantum ends during a test: what was put just before its end is renewed a moment later, in the background."""
LASTING = NodeOptions(session_ttl_s=3600)
"""No session ends because the machine stood still."""


class SetClock:
    """Wall time that a test sets; monotonic time is real, since threads wait on it."""

    def __init__(self, now_s: float) -> None:
        self.wall_s = now_s

    def now_s(self) -> float:
        return self.wall_s

    def monotonic_s(self) -> float:
        return SystemClock().monotonic_s()


def member_of(store: Store) -> ClusterMember:
    """The member behind a store in this process."""
    port = store._port
    assert isinstance(port, LocalTransport)
    return port._store.member


def member_on(
    root: Root,
    limits: Limits | None = None,
    clock: Clock | None = None,
    durability: Durability = Durability.NONE,
    tiers: TierSettings = NO_TIERS,
    meta: MetadataStore | None = None,
    keys: KeyFile | None = None,
    *,
    compress: bool = False,
    in_cluster: bool = False,
) -> ClusterMember:
    """Opens a member on ``root``, with its own metadata if none are given."""
    clock, ids = clock or SystemClock(), RandomIds()
    identity = create_or_open(root.inner if isinstance(root, FaultyRoot) else root, ids)
    meta = meta or MemoryMetadata(clock=clock)
    options = NodeOptions(durability, tiers=tiers, keys=keys, compress=compress)
    return join(root, identity, meta, options, limits=limits or Limits(), clock=clock, ids=ids, in_cluster=in_cluster)


def store_on(root: Root | Path, limits: Limits | None = None) -> Store:
    """A store on ``root``, closed like any other."""
    opened = PosixRoot(root) if isinstance(root, Path) else root
    member = member_on(opened, limits)
    port = LocalTransport(member)
    return Store(port, close_when_dropped(port, member.close, opened.url))


def hasty_while_faulty(root: FaultyRoot, member: ClusterMember, limits: Limits) -> None:
    """Gives the member's calls these deadlines while its root has rules, and ample ones while it has none.

    A loaded machine then ends no call that must succeed.
    """
    ample = replace(
        limits,
        match_deadline_s=PATIENCE_S,
        read_deadline_s=PATIENCE_S,
        write_deadline_s=PATIENCE_S,
        hold_max_s=max(limits.hold_max_s, PATIENCE_S),
    )

    def adjust(has_rules: bool) -> None:
        member.node.limits = limits if has_rules else ample

    root.before_rules = adjust
    adjust(root.has_rules)


def kv_of(layout: Layout, tokens: npt.NDArray[Any] | range | list[int], seed: bytes = b"") -> npt.NDArray[Any]:
    """KV that the tokens determine, each chunk by all tokens up to its end; so no two prefixes have equal bytes."""
    ids = np.asarray(tokens, dtype="<u4")
    array = np.empty(layout.shape(len(ids)), layout.numpy_dtype)
    raw = array.view(np.uint8)
    for start in range(0, len(ids), layout.chunk_tokens):
        part = ids[: start + layout.chunk_tokens]
        digest = hashlib.blake2b(seed + part.tobytes(), digest_size=8).digest()
        stop = min(start + layout.chunk_tokens, len(ids))
        shape = raw[:, :, start:stop].shape
        generator = np.random.default_rng(int.from_bytes(digest, "little"))
        raw[:, :, start:stop] = generator.integers(0, 256, shape, dtype=np.uint8)
    return array


def same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    """Bit for bit equal, NaNs included."""
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def resealed(whole: bytes, offset: int, value: bytes) -> bytes:
    """A chunk file with a header field changed and the header's checksum made right again."""
    header = bytearray(whole[:4096])
    header[offset : offset + len(value)] = value
    header[-8:] = struct.pack("<Q", checksum(bytes(header[:-8])))
    return bytes(header) + whole[4096:]


def fresh(folder: Path) -> Path:
    """Makes an empty folder within ``folder``: a root of its own for each round of a loop."""
    return Path(tempfile.mkdtemp(dir=folder))


def flip(file: Path, at: int = -1) -> None:
    """Turns a bit of a file, in place: the last byte's if none is named."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def chunk_files(root: Path) -> list[Path]:
    """All published chunk files under a root."""
    return sorted((root / "chunks").glob("*/*"))


def counted(store: Store, name: str, action: Callable[[], object]) -> int:
    """By how much a counter rises during ``action``."""
    before = store.stats().get(name, 0)
    action()
    return int(store.stats().get(name, 0) - before)


def in_turn(layout: Layout, tokens: int) -> list[npt.NDArray[Any]]:
    """Three arrays that layers are read into in turn: one by one, since each has to wait for its place."""
    return [np.empty((2, tokens, layout.kv_heads, layout.head_dim), layout.numpy_dtype) for _ in range(3)]


LARGE = Layout(layers=1, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=150)
"""Sections of 300 KiB: more than one piece of a read, and not a multiple of it."""


MANY = Layout(layers=600, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=32)
"""More sections than one system call takes."""


UNALIGNED = Layout(layers=2, kv_heads=3, head_dim=7, dtype="int8", chunk_tokens=13)


LAYOUTS = {"tiny": TINY, "small": SMALL, "large": LARGE, "many": MANY, "odd": UNALIGNED}
