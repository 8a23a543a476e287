"""Opening a store, in this process or through a worker; the same Store from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from kvstore.census.selection import Selection
from kvstore.client.cache import Cache
from kvstore.client.dropping import close_when_dropped
from kvstore.client.limits import ClientLimits
from kvstore.client.local import LocalPort
from kvstore.client.port import Port
from kvstore.encodings.keys import KeyFile
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.layout import Layout
from kvstore.meta.etcd import EtcdTls, EtcdUser
from kvstore.namespace import Namespace
from kvstore.node.limits import Limits
from kvstore.node.opening import open_member
from kvstore.node.settings import TierSettings
from kvstore.progress import Progress, unwatched
from kvstore.results import Cleared, PinRecord
from kvstore.root.identity import SHARD_BITS_DEFAULT
from kvstore.security.tls import ClientTls
from kvstore.writes import WriteMode

if TYPE_CHECKING:
    from kvstore.client.control import Control

DURABILITIES = ("none", "fsync")


class Store:
    """A store, in this process or behind workers. Close it, or use it as a context. Thread-safe.

    Where neither is done, a ResourceWarning says so once its last cache, hold and pin are gone, and it is closed then.
    """

    def __init__(self, port: Port, when_dropped: finalize[..., Port] | None = None) -> None:
        """``when_dropped`` closes a port that this store is responsible for."""
        self._port = port
        self._when_dropped = when_dropped

    def namespace(
        self,
        name: str,
        layout: Layout,
        fingerprint: str = "",
        tenant: str = "",
        attributes: Mapping[str, str] | None = None,
        write: WriteMode | str | None = None,
    ) -> Cache:
        """The cache of one model's KV.

        ``fingerprint`` is a digest of the weights; ``attributes`` are further settings that change the bytes (RoPE
        scaling, quantisation, parallel rank and size): caches that differ in any of these share nothing.  ``write`` is
        how puts of this cache are acknowledged that do not say (``Cache.put``); by default as the node is set.
        Raises LayoutMismatch where ``name`` exists for this tenant with another layout, Unavailable.
        """
        if not isinstance(layout, Layout):
            raise InvalidRequest(f"layout is a {type(layout).__name__}: expected kvstore.Layout")
        mode = None if write is None else WriteMode.of(write)
        namespace = Namespace.of(name, layout, fingerprint, tenant, attributes)
        self._port.open_namespace(namespace)
        return Cache(self._port, namespace, mode)

    def namespaces(self) -> list[Namespace]:
        """All namespaces ever used on this store."""
        return self._port.namespaces()

    def pins(self) -> list[PinRecord]:
        """All live pins."""
        return self._port.pins()

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin by its id; False where there is none."""
        if not isinstance(pin_id, str):
            raise InvalidRequest(f"pin id is a {type(pin_id).__name__}: expected the text that pin gave")
        return self._port.unpin(pin_id)

    def clear(
        self,
        selection: Selection,
        *,
        progress: Progress = unwatched,
        dry_run: bool = False,
        pinned: bool = False,
    ) -> Cleared:
        """Deletes what a selection names (``kvstore.census.selection.Selection``): by namespace, tenant, fingerprint,
        age, or who wrote it and when; on the root, and from the memory and local disks of all nodes.

        Pinned chunks stay, and are counted, unless ``pinned``; ``dry_run`` only counts.  ``progress(done, total)``, in
        shards, may raise to end it.  Stop those first that still write what is to go: what they write meanwhile
        stays.  Twice is harmless.  Raises InvalidRequest where nothing is meant, Unavailable where nodes could not be
        told: clear again.
        """
        return self._port.clear_selected(selection, progress, dry_run=dry_run, pinned=pinned)

    def stats(self) -> dict[str, int | float]:
        """What this node, or the workers behind it, did; ``kvstore.counts`` says what each number counts."""
        return self._port.stats()

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        """The same of each worker by address, or the error of one that does not answer; "" is this process's node."""
        return self._port.stats_each()

    @property
    def control(self) -> Control:
        """Steers the workers behind this store: where things lie, long acts, drain, limits, health.

        Raises InvalidRequest on a store that was opened in this process.
        """
        return self._port.control()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self._port.place}>"

    def close(self) -> None:
        """Ends holds, session, threads and connections. Idempotent."""
        if self._when_dropped is not None:
            self._when_dropped.detach()
        self._port.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(
    root: str | PathLike[str],
    etcd: str | Sequence[str] | None = None,
    *,
    durability: str = "none",
    limits: Limits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    root_options: Mapping[str, Any] | None = None,
    create: bool = True,
    shard_bits: int = SHARD_BITS_DEFAULT,
    memory: int = 0,
    disk: tuple[str, int] | None = None,
    write: str = "behind",
    root_priority_min: int = 0,
    label: str = "",
    keys: str | PathLike[str] | None = None,
) -> Store:
    """Opens the root at ``root`` (a path or URL) in this process.

    With ``etcd`` (``host:port``, several with commas or as a list) this process is a node of the cluster.  Without it,
    processes that open one folder of a local disk share holds and pins. ``durability="fsync"`` makes each put durable
    before it returns; by default a host crash may lose recent chunks, which is a miss.  ``create=False`` refuses to
    make a new root; a new one gets ``2 ** shard_bits`` folders (0 to 16; the default suits ten million chunks, take
    more for more).  ``root_options`` go to fsspec; ``etcd_tls`` and ``etcd_user`` say how to reach a protected etcd.

    With ``memory``, so many bytes of it keep hot chunks: a ``get`` of those is a copy, a ``view`` none.  ``disk`` is
    a folder of this process alone and how many bytes it may take: what memory drops and was used more than once
    goes there.  With memory a put returns when memory has it, and it is written to the root soon (``write="behind"``:
    a killed process loses what was not written yet); ``"through"`` and ``"around"`` wait for the root, and leave a copy
    in memory, or none. ``durability="fsync"`` always waits.  Chunks of a lower priority than ``root_priority_min``
    never reach the root.  kvstore/memory/MEMORY.md has the rules.

    ``label`` is what a roll-out is called: it is on record beside all that this process writes, and
    ``kvstore clear --written-by label=...`` takes that back.
    ``keys`` is a file with the keys of tenants whose chunks are encrypted on the root and the local disk
    (kvstore/encodings/ENCODINGS.md); it is read again when it changes.

    Raises RootMismatch (no such root, wrong mount, unknown version), PermissionDenied, Unavailable, InvalidRequest.
    """
    if durability not in DURABILITIES:
        raise InvalidRequest(f"durability={durability!r}: expected one of {', '.join(DURABILITIES)}")
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidRequest(f"limits are a {type(limits).__name__}: expected kvstore.node.limits.Limits")
    member = open_member(
        fspath(root) if isinstance(root, PathLike) else root,
        etcd,
        durable=durability == "fsync",
        limits=limits,
        etcd_tls=etcd_tls,
        etcd_user=etcd_user,
        root_options=root_options,
        create=create,
        shard_bits=shard_bits,
        settings=TierSettings.of(memory, disk, write, root_priority_min),
        label=label,
        keys=KeyFile(keys).load() if keys is not None else None,
    )
    port = LocalPort(member)
    return Store(port, close_when_dropped(port, member.close, str(root)))


def connect(
    *workers: str,
    etcd: str | Sequence[str] | None = None,
    root: str | None = None,
    limits: ClientLimits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    bulk: str | None = None,
    write: WriteMode | str | None = None,
    tls: ClientTls | None = None,
    token_file: str | Path | None = None,
) -> Store:
    """Connects to workers (``host:port``, one or several), or to those that etcd lists.

    Calls are spread over the workers that live; one that dies is left out until it is back.
    ``root`` is the root's id, needed only where etcd knows several.
    ``bulk`` says which way chunks go: ``shared`` (memory and files of the same host), ``tcp`` (a connection of its
    own), ``grpc``, or ``auto`` (the default): the first of them that there is.  ``write`` says when puts
    return that do not say it themselves: ``"behind"``, once a worker has their bytes (what it cannot store then is
    lost, and a miss), ``"through"`` or ``"around"``, once the root has them; by default as the worker is set.

    ``tls=kvstore.ClientTls(ca_file, cert_file, key_file, server_name)`` is for workers that speak TLS, and
    ``token_file=PATH`` for those that ask for a token; both are read again when their files change.

    Raises InvalidRequest. A worker that does not answer is a miss for reads, Unavailable for anything else.
    """
    from kvstore.client.remote import remote_port  # gRPC only where it is used

    port = remote_port(
        workers,
        etcd=etcd,
        root=root,
        limits=limits,
        etcd_tls=etcd_tls,
        etcd_user=etcd_user,
        bulk=bulk,
        write=write,
        tls=tls,
        token_file=token_file,
    )
    return Store(port, close_when_dropped(port, port.parts.close, ", ".join(workers) or f"etcd {etcd}"))
