"""Blocks of the vLLM connector: messages between scheduler and workers, LoRA adapters, and runs of blocks."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore.background import Tasks
from kvstore.connectors.common import weights_fingerprint
from kvstore.connectors.vllm.namespaces import Boundaries, Cluster, Kind
from kvstore.errors import InvalidRequest
from kvstore.hints import DEFAULT, Hints

# LoRA adapters by content: requests share KV with those that use the same adapter files, in any engine.
#
# vLLM's block hashes have an adapter's name and path, and not its weights. So the keys of its requests end with a
# digest of its files, as long as these are surely the files that vLLM loaded: nobody may have changed them since the
# engine started, because it loads adapters later than that, and again whenever it had no room for one. A worker looks
# once more before it stores what was computed. Whatever is not sure is a miss, and is not stored.


log = logging.getLogger(__name__)

MARGIN_S = 10.0
"""How much a file server's clock may lag behind this host's for a change to be noticed by its time."""
QUEUE_MAX = 4096
DIGESTS_MAX = 4096
SETTINGS_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Seal:
    """The files of an adapter as they were at one moment: name, inode, size and times of each."""

    path: str
    files: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def of(cls, path: str) -> Seal:
        """Raises OSError for a path that is no folder, or cannot be looked at."""
        found = []
        with os.scandir(path) as entries:
            for each in sorted(entries, key=lambda entry: entry.name):
                stat = each.stat()
                found.append((each.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        return cls(path, tuple(found))

    @property
    def changed_ns(self) -> int:
        """The time of the last change to any of the files."""
        return max((file[-1] for file in self.files), default=0)

    def holds(self) -> bool:
        """True if the files are the same now."""
        try:
            return Seal.of(self.path) == self
        except OSError:
            return False


@dataclass(slots=True)
class Check:
    """One request's adapter, being looked at; complete once ``done`` is set."""

    seal: Seal | None = None
    digest: bytes = b""
    """16 bytes; empty if nothing may be shared."""
    done: threading.Event = field(default_factory=threading.Event)


class Adapters:
    """The adapters of one engine. Used by one thread; ``begin`` never blocks: another looks at files and hashes them.

    ``told`` is what else decides over an adapter's KV: the engine's settings for all of them.
    """

    def __init__(self, told: str, started_ns: int | None = None) -> None:
        self._told = told
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._paths: dict[int, str] = {}
        """The path of each adapter's number, by which vLLM tells adapters apart; empty if it had two."""
        self._digests: dict[tuple[Seal, bool], bytes] = {}
        self._said: set[str] = set()
        self._thread: Tasks | None = None

    def begin(self, lora: Any) -> Check:
        """Starts to look at the adapter of a request."""
        check = Check()
        number, path = lora.lora_int_id, lora.lora_path
        if self._paths.setdefault(number, path) != path or getattr(lora, "load_inplace", False):
            self._paths[number] = ""  # vLLM may have either of two under this number
        is_3d = bool(getattr(lora, "is_3d_lora_weight", False))
        if self._thread is None:
            self._thread = Tasks("kvstore-vllm-adapter", 1, QUEUE_MAX)
        if not self._paths[number] or not self._thread.submit(partial(self._serve, check, path, is_3d)):
            check.done.set()
        return check

    def close(self) -> None:
        """Ends the thread; one that is stuck ends with the process."""
        if self._thread is not None:
            self._thread.close(0.0)

    def _serve(self, check: Check, path: str, is_3d: bool) -> None:
        try:
            seal = Seal.of(path)
            if seal.changed_ns > self._started_ns - int(MARGIN_S * 1e9):
                raise InvalidRequest("its files are younger than the engine, which may have loaded others")
            key = (seal, is_3d)
            if key not in self._digests:
                digest = self._digest(path, is_3d)
                if not seal.holds():
                    raise InvalidRequest("its files change")
                while len(self._digests) >= DIGESTS_MAX:
                    del self._digests[next(iter(self._digests))]
                self._digests[key] = digest
            check.digest, check.seal = self._digests[key], seal
        except (InvalidRequest, OSError) as error:
            if path not in self._said and len(self._said) < DIGESTS_MAX:
                self._said.add(path)
                log.warning("kvstore: requests with the adapter at %.200s share nothing: %s", path, error)
        finally:
            check.done.set()

    def _digest(self, path: str, is_3d: bool) -> bytes:
        settings = Path(path, SETTINGS_FILE).read_bytes()
        told = f"{self._told}\n{is_3d}\n{weights_fingerprint(path)}\n".encode()
        return blake2b(told + settings, digest_size=16).digest()


# Messages between the scheduler's half of the connector and the workers' halves, once per engine step.


IDLE_S = 0.005
"""The longest wait in a step that computes nothing: without one, vLLM runs hundreds of such steps while KV is loaded.
A request that comes meanwhile waits no longer than this."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one cluster: the keys they are stored under, and the engine's numbers for them, one per group."""

    cluster: int
    """The index in ``Shape.clusters``."""
    keys: list[bytes]
    blocks: list[tuple[int, ...]]
    first: int = 0
    """The index of the first among the cluster's blocks of its prompt; the others follow it."""
    seal: Seal | None = None
    """The adapter that computed them: they are stored only if its files are still the same."""
    hints: Hints = DEFAULT
    """How long they are worth keeping."""
    descents: list[bytes] = field(default_factory=list)
    """A packed descent for each block, b"" for none; empty if no block has one, or to load."""

    def picked(self, offsets: Sequence[int]) -> Run:
        """Returns some of these blocks; ``first`` becomes that of a part without gaps."""
        return replace(
            self,
            keys=[self.keys[at] for at in offsets],
            blocks=[self.blocks[at] for at in offsets],
            first=self.first + (offsets[0] if offsets else 0),
            descents=[self.descents[at] for at in offsets] if self.descents else [],
        )


@dataclass(frozen=True, slots=True)
class Load:
    """KV to be read for one request."""

    number: int
    request: str
    runs: list[Run]


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every worker."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Run] = field(default_factory=list)
    is_idle: bool = False
    """True if the engine computes nothing in this step: then a worker may wait for a moment."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' message to the scheduler: loads that ended, on how many workers, and keys that could not be read."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: dict[int, set[bytes]] = field(default_factory=dict)
    timed_out: bool = False
    digests: set[tuple[int, bytes]] = field(default_factory=set)
    stored: dict[bytes, int] = field(default_factory=dict)
    """Keys that are in the store now, with the parts that stored them, as bits; only if events are told."""
    unstored: set[bytes] = field(default_factory=set)
    """Keys that could not be stored, or only in part. Empty unless events are told."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Returns both reports in one."""
        assert isinstance(other, Report)
        ended: dict[int, int] = dict(self.ended)
        for number, count in other.ended.items():
            ended[number] = ended.get(number, 0) + count
        failed = dict(self.failed)
        for number, keys in other.failed.items():
            failed[number] = failed.get(number, set()) | keys
        stored = dict(self.stored)
        for key, parts in other.stored.items():
            stored[key] = stored.get(key, 0) | parts
        digests, unstored = self.digests | other.digests, self.unstored | other.unstored
        return Report(ended, failed, self.timed_out or other.timed_out, digests, stored, unstored)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not (self.ended or self.digests or self.stored or self.unstored)


def block_key(hashed: Any, group: int, ending: bytes) -> bytes:
    """Returns the key of a block: vLLM's chained hash, and a cluster's first group, since groups have other layers.

    ``ending`` has what vLLM's hash lacks: 16 bytes if weights were replaced in memory, or for an adapter.
    """
    return bytes(hashed) + bytes([group]) + ending


# A request's blocks by key: which ones to look up, to load and to store, from its hashes and its block tables.


State = tuple[int, int, int]
"""The group, the block and the tokens of a recurrent state, as vLLM hands it over."""


@dataclass(frozen=True, slots=True)
class Named:
    """The source of the keys of a request's blocks: vLLM's hashes of its tokens, and an ending for all."""

    hashes: Sequence[bytes]
    ending: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """The boundaries of a request, in tokens. They decide which of its blocks later hits may need."""

    prompt_tokens: int
    parting: int
    """Tokens that the prompt shares with a stored one, if a hit could not have all of them: others may share them."""
    is_parting: bool
    """True if blocks before ``parting`` that the engine has itself are to be stored, too."""


class Runs:
    """Cuts requests into blocks. ``hash_tokens`` is how many tokens vLLM hashes at a time."""

    def __init__(self, clusters: Sequence[Cluster], hash_tokens: int) -> None:
        self.clusters = clusters
        self.hash_tokens = hash_tokens
        self.unit = math.lcm(*(each.block_tokens for each in clusters))
        """The least number of tokens that is whole blocks in every cluster."""
        self._boundaries = Boundaries.of(self.unit, clusters)

    def known_tokens(self, named: Named) -> int:
        """Returns the tokens that have keys."""
        return len(named.hashes) * self.hash_tokens

    def keys(self, named: Named, number: int, first: int, end: int) -> list[bytes]:
        """Returns the keys of a cluster's full blocks that begin in ``[first, end)`` tokens."""
        cluster = self.clusters[number]
        size, per_block = cluster.block_tokens, cluster.block_tokens // self.hash_tokens
        indices = range(first // size, min(end // size, len(named.hashes) // per_block))
        return [
            block_key(named.hashes[(index + 1) * per_block - 1], cluster.groups[0], named.ending) for index in indices
        ]

    def loads(self, named: Named, tables: Sequence[Sequence[int]], first: int, end: int) -> list[Run]:
        """Returns the blocks that a hit of ``end`` tokens needs, without those before ``first``."""
        runs = []
        for number, cluster in enumerate(self.clusters):

            def needs(index: int, least: int = cluster.first_block(end)) -> bool:
                return index >= least

            runs += self._cut(named, number, tables, (first, end), needs)
        return runs

    def stores(self, named: Named, tables: Sequence[Sequence[int]], first: int, end: int, ends: Ends) -> list[Run]:
        """Returns the blocks in ``[first, end)`` tokens that later hits may need, without states."""
        runs = []
        for number, cluster in enumerate(self.clusters):
            begin = first
            if ends.is_parting and cluster.kind is Kind.WINDOW:
                begin = min(first, cluster.first_block(ends.parting) * cluster.block_tokens)

            def needs(index: int, cluster: Cluster = cluster) -> bool:
                return self._boundaries.needs(cluster, index, ends.prompt_tokens, ends.parting)

            if cluster.kind is not Kind.STATE:
                runs += self._cut(named, number, tables, (begin, end), needs)
        return runs

    def states(self, named: Named, offered: Sequence[State], computed: int, end: int) -> list[Run]:
        """Returns the states that a step brings to a boundary behind ``computed`` tokens and up to ``end``.

        Which blocks they are in only vLLM knows: their places in the tables change.
        """
        runs = []
        for number, cluster in enumerate(self.clusters):
            found = {(tokens, group): block for group, block, tokens in offered if group in cluster.groups}
            for boundary in sorted({tokens for tokens, _ in found}):
                blocks = tuple(found.get((boundary, group), 0) for group in cluster.groups)
                # It offers what was loaded, too, and what ends within a block.
                if all(blocks) and computed < boundary <= end and boundary % cluster.block_tokens == 0:
                    first = boundary - cluster.block_tokens
                    keys = self.keys(named, number, first, boundary)
                    runs.append(Run(number, keys, [blocks], first // cluster.block_tokens))
        return runs

    def _cut(
        self,
        named: Named,
        number: int,
        tables: Sequence[Sequence[int]],
        between: tuple[int, int],
        needs: Callable[[int], bool],
    ) -> list[Run]:
        """Returns a cluster's full blocks between two tokens that are needed and exist, in runs without gaps.

        ``tables`` are the request's blocks of each group; block 0 is one outside the window.
        """
        cluster, runs = self.clusters[number], list[Run]()
        mine = list(zip(*(tables[group] for group in cluster.groups), strict=False))
        start = between[0] // cluster.block_tokens
        keys = self.keys(named, number, *between)
        for index, (key, blocks) in enumerate(zip(keys, mine[start:], strict=False), start):
            if not all(blocks) or not needs(index):
                continue
            if not runs or runs[-1].first + len(runs[-1].keys) != index:
                runs.append(Run(number, [], [], index))
            runs[-1].keys.append(key)
            runs[-1].blocks.append(blocks)
        return runs
