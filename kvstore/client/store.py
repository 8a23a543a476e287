"""A store, in this process (opened in ``local.py``) or behind workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import finalize

from kvstore.census.selection import Selection, checked_selection
from kvstore.client.cache import Cache, close_when_dropped
from kvstore.client.limits import ClientLimits
from kvstore.client.operation import Operation
from kvstore.client.pool import Bulk, BulkName
from kvstore.client.transport import Transport
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.core.results import PinRecord
from kvstore.core.validate import checked_flag, checked_worker, kind_of
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.errors import InvalidRequest, KVStoreError, StoreClosed
from kvstore.meta.etcd import EtcdTls, EtcdUser, check_access
from kvstore.security.tls import ClientTls
from kvstore.segments.gate import check_exact

if TYPE_CHECKING:
    from kvstore.client.control import Control


class Store:
    """A store, in this process or behind workers. Close it, or use it as a context. Thread-safe.

    A store that is dropped without that is closed, with a ResourceWarning, once its last cache, hold and pin are gone.
    """

    def __init__(self, port: Transport, when_dropped: finalize[..., Transport] | None = None) -> None:
        """``when_dropped`` closes a port that this store is responsible for."""
        self._port = port
        self._when_dropped = when_dropped
        self._is_closed = False

    def namespace(
        self,
        name: str,
        layout: Layout,
        fingerprint: str = "",
        tenant: str = "",
        attributes: Mapping[str, str] | None = None,
        write: WriteMode | WriteModeName | None = None,
    ) -> Cache:
        """Returns the cache of one model's KV.

        ``fingerprint`` is a digest of the weights. ``attributes`` are further settings that change the bytes (RoPE
        scaling, quantisation, parallel rank and size). Caches that differ in any of these share nothing. ``write`` is
        the default write mode of this cache's puts (``Cache.put``); None is the node's. Raises LayoutMismatch if
        ``name`` exists for this tenant with another layout, Unavailable.
        """
        if not isinstance(layout, Layout):
            raise InvalidRequest(f"layout is {kind_of(layout)}: expected kvstore.Layout")
        check_exact(attributes)
        mode = None if write is None else WriteMode.of(write)
        namespace = Namespace.of(name, layout, fingerprint, tenant, attributes)
        self._port.open_namespace(namespace)
        return Cache(self._port, namespace, mode)

    def namespaces(self) -> list[Namespace]:
        """Returns all namespaces ever used on this store."""
        return self._port.namespaces()

    def pins(self) -> list[PinRecord]:
        """Returns all live pins."""
        return self._port.pins()

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin by its id; False if there is none."""
        if not isinstance(pin_id, str):
            raise InvalidRequest(f"pin id is {kind_of(pin_id)}: expected the text that pin gave")
        return pin_id.isascii() and self._port.unpin(pin_id)

    def clear(
        self, selection: Selection, *, dry_run: bool = False, pinned: bool = False, worker: str | None = None
    ) -> Operation:
        """Begins to delete selected chunks (``kvstore.Selection``) on the root and in all memories and disks.

        A selection names chunks by namespace, tenant, fingerprint, age, or who wrote them and when. Pinned chunks stay,
        and are counted, unless ``pinned``. ``dry_run`` only counts. The operation counts shards; its ``counts`` are
        "chunks", "bytes", "pinned", "failed" (clear again) and "unconfirmed" (nodes that did not answer). First stop
        all writers of such chunks: chunks written during the operation stay. Clearing twice is harmless. ``worker`` is
        the address of the worker that does it; by default the best one. Raises InvalidRequest for a selection of
        nothing, Overloaded, Unavailable.
        """
        chosen = checked_selection(selection)
        dry_run, pinned = checked_flag("dry_run", dry_run), checked_flag("pinned", pinned)
        return self._port.clear_selected(chosen, dry_run=dry_run, pinned=pinned, worker=checked_worker(worker))

    def operations(self) -> list[Operation]:
        """Returns the operations of this process, or of all workers that answer: unfinished, and lately finished ones.

        The newest are first. Raises Unavailable if no worker answers.
        """
        return self._port.operations()

    def stats(self) -> dict[str, int | float]:
        """Returns the counters of this node, or of the workers behind it; ``kvstore.core.metrics`` describes each."""
        return self._port.stats()

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        """Returns ``stats`` of each worker by address, or its error without an answer; "" is this process's node."""
        return self._port.stats_each()

    @property
    def control(self) -> Control:
        """Returns the control of the workers behind this store: places, limits, health.

        Raises InvalidRequest on a store that was opened in this process.
        """
        return self._port.control()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self._port.place}>"

    def close(self) -> None:
        """Ends holds, session, threads and connections. Idempotent."""
        if self._when_dropped is not None:
            self._when_dropped.detach()
        self._is_closed = True
        self._port.close()

    def __enter__(self) -> Store:
        if self._is_closed:
            raise StoreClosed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    *workers: str,
    etcd: str | Sequence[str] | None = None,
    root: str | None = None,
    limits: ClientLimits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    bulk: Bulk | BulkName | None = None,
    write: WriteMode | WriteModeName | None = None,
    tls: ClientTls | None = None,
    token_file: str | Path | None = None,
) -> Store:
    """Connects to workers (``host:port``, one or several), or to those that etcd lists.

    Calls are spread over the live workers; one that dies is skipped until it is back. ``root`` is the root's id,
    required only if etcd knows several. ``bulk`` is the path of chunk bytes: ``shared`` (memory and files of the same
    host), ``tcp`` (a separate connection), ``grpc``, or ``auto`` (the default): the first of these that works.
    ``write`` is the default write mode of puts: ``"behind"`` returns once a worker's memory has the bytes (without
    memory it is ``"through"``), ``"through"`` once the root has them; None is the worker's default.

    ``tls=kvstore.ClientTls(ca_file, cert_file, key_file, server_name)`` is for workers with TLS, ``token_file=PATH``
    for those that require a token. Both are reloaded when their files change.

    Raises InvalidRequest. If a worker does not answer, a read is a miss and anything else raises Unavailable.
    """
    from kvstore.client.remote import remote_port  # gRPC only where it is used

    check_access(etcd, etcd_tls, etcd_user)
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
