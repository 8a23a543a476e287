"""A store, in this process (opened in ``local.py``) or behind workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import finalize

from kvstore.census.selection import Selection, checked_selection
from kvstore.client.cache import Cache, close_when_dropped
from kvstore.client.limits import ClientLimits
from kvstore.client.operation import Operation
from kvstore.client.pool import Bulk, BulkName, Credentials
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


class Store:
    """A store, in this process or behind workers. Thread-safe.

    ``kvstore.open`` and ``kvstore.connect`` return one. Close it, or use it as a context; a store that is dropped is
    closed with a ResourceWarning, once its last cache, hold and pin are gone.

    Examples
    --------
    >>> import kvstore
    >>> with kvstore.open("memory://") as example:
    ...     example.namespaces()
    []
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

        Caches that differ in any argument share nothing.

        Parameters
        ----------
        name
            Name of the model, up to 256 bytes of UTF-8.
        layout
            Shape of the KV, and tokens per chunk.
        fingerprint
            Digest of the weights. Always give one: without it, other weights under this name share chunks.
        tenant
            Tenants share nothing.
        attributes
            Further settings that change the bytes, such as RoPE scaling, quantisation, parallel rank and size.
        write
            Default write mode of this cache's puts; None is the node's.

        Raises
        ------
        LayoutMismatch
            The name exists for this tenant with another layout.
        Unavailable
            The store does not answer.

        Examples
        --------
        >>> llama = kvstore.Layout(layers=32, kv_heads=8, head_dim=128)
        >>> store.namespace("llama-3.1-8b", llama, fingerprint="sha256 of the weights").layout.chunk_tokens
        256
        """
        if not isinstance(layout, Layout):
            raise InvalidRequest(f"layout is {kind_of(layout)}: expected kvstore.Layout")
        check_exact(attributes)
        mode = None if write is None else WriteMode.of(write)
        namespace = Namespace.of(name, layout, fingerprint, tenant, attributes)
        self._port.open_namespace(namespace)
        return Cache(self._port, namespace, mode)

    def namespaces(self) -> list[Namespace]:
        """Returns all namespaces ever used on this store.

        Examples
        --------
        >>> [each.name for each in store.namespaces()]
        ['my-model']
        """
        return self._port.namespaces()

    def pins(self) -> list[PinRecord]:
        """Returns all live pins.

        Examples
        --------
        >>> with cache.pin(tokens, owner="job-7"):
        ...     [(pin.owner, pin.tokens) for pin in store.pins()]
        [('job-7', 96)]
        """
        return self._port.pins()

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin by its id.

        Returns
        -------
        bool
            False if there is no such pin.

        Examples
        --------
        >>> pin = cache.pin(tokens)
        >>> store.unpin(pin.id), store.unpin(pin.id)
        (True, False)
        """
        if not isinstance(pin_id, str):
            raise InvalidRequest(f"pin id is {kind_of(pin_id)}: expected the text that pin gave")
        return pin_id.isascii() and self._port.unpin(pin_id)

    def clear(
        self, selection: Selection, *, dry_run: bool = False, pinned: bool = False, worker: str | None = None
    ) -> Operation:
        """Begins to delete selected chunks on the root, and in all memories and disks.

        First stop all writers of such chunks: chunks written during the operation stay. Clearing twice is harmless.

        Parameters
        ----------
        selection
            Namespaces by digest, tenant or fingerprint.
        dry_run
            Only count.
        pinned
            Delete pinned chunks as well; by default they stay and are counted.
        worker
            Address of the worker that does it; by default the best one.

        Returns
        -------
        Operation
            It counts shards. Its ``counts`` are "chunks", "bytes", "pinned", "failed" (clear again) and "unconfirmed"
            (nodes that did not answer).

        Raises
        ------
        InvalidRequest
            The selection is empty.
        Overloaded, Unavailable
            Retry later.

        Examples
        --------
        >>> operation = store.clear(kvstore.Selection(namespace=cache.namespace.digest), dry_run=True)
        >>> operation.wait(timeout=60), operation.counts["chunks"]
        (True, 6)
        """
        chosen = checked_selection(selection)
        dry_run, pinned = checked_flag("dry_run", dry_run), checked_flag("pinned", pinned)
        return self._port.clear_selected(chosen, dry_run=dry_run, pinned=pinned, worker=checked_worker(worker))

    def operations(self) -> list[Operation]:
        """Returns the operations of this process, or of all workers that answer: unfinished, and lately finished ones.

        The newest are first. Raises Unavailable if no worker answers.

        Examples
        --------
        >>> cache.prefetch(tokens).wait(timeout=60)
        True
        >>> store.operations()[0].state == "done"
        True
        """
        return self._port.operations()

    def stats(self) -> dict[str, int | float]:
        """Returns the counters of this node, or of the workers behind it.

        ``kvstore.core.metrics`` describes each of them.

        Examples
        --------
        >>> store.stats()["chunks_written"]
        6
        """
        return self._port.stats()

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        """Returns ``stats`` of each worker by address, or its error without an answer.

        The address "" is the node of this process.

        Examples
        --------
        >>> store.stats_each()[""]["chunks_written"]
        6
        """
        return self._port.stats_each()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self._port.place}>"

    def close(self) -> None:
        """Ends holds, session, threads and connections. Idempotent.

        Examples
        --------
        >>> example = kvstore.open("memory://")
        >>> example.close()
        >>> example.namespaces()
        Traceback (most recent call last):
        kvstore.errors.StoreClosed: ...
        """
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

    Calls are spread over the live workers; one that does not answer is skipped until it is back.

    Parameters
    ----------
    workers
        Addresses; none with ``etcd``.
    etcd, etcd_tls, etcd_user
        Endpoints of an etcd that lists the workers, and the access to it.
    root
        The root's id, required only if etcd knows several.
    limits
        Deadlines, and limits on connections and memory of this client.
    bulk
        Transport of chunk bytes: ``"shared"`` (memory and files of the same host), ``"tcp"`` (a separate connection),
        ``"grpc"``, or ``"auto"`` (the default): the first of these that works; None reads KVSTORE_BULK from the
        environment. Where a worker cannot be reached on it, bytes go over gRPC.
    write
        Default write mode of puts: ``"behind"`` returns once a worker's memory has the bytes (without memory it is
        ``"through"``), ``"through"`` once the root has them; None is the worker's default.
    tls, token_file
        ``kvstore.ClientTls(ca_file, cert_file, key_file, server_name)`` for workers with TLS, and a file with a token
        for those that require one. Both are reloaded when their files change.

    Raises
    ------
    InvalidRequest
        An argument is invalid. If a worker does not answer, a read is a miss, and other calls raise Unavailable.

    Examples
    --------
    >>> with kvstore.connect(address) as connected:
    ...     connected.namespace("my-model", layout).match(tokens)
    0
    """
    # gRPC only where it is used.
    from kvstore.client.failover import check_address
    from kvstore.client.remote import Discovery, RemoteTransport
    from kvstore.meta.etcd import EtcdMetadata

    check_access(etcd, etcd_tls, etcd_user)
    if bool(workers) == bool(etcd):
        raise InvalidRequest("connect needs workers (host:port, one or several) or etcd=host:port: give one of the two")
    if root is not None and not etcd:
        raise InvalidRequest("root= chooses one of the roots in etcd: give etcd=host:port as well")
    limits = ClientLimits() if limits is None else limits
    if not isinstance(limits, ClientLimits):
        raise InvalidRequest(
            f"limits are {kind_of(limits)}: expected kvstore.ClientLimits (kvstore.Limits are for kvstore.open)"
        )
    way, mode = Bulk.of(bulk), None if write is None else WriteMode.of(write)
    credentials = Credentials(tls, token_file)
    texts = [text.split(",") if isinstance(text, str) else [text] for text in workers]
    addresses = [check_address(each) for several in texts for each in several]
    discovery = None
    if etcd:
        discovery = Discovery(EtcdMetadata(etcd, tls=etcd_tls, user=etcd_user, timeout_s=limits.probe_s), root)
    try:
        port = RemoteTransport(addresses, limits, discovery=discovery, bulk=way, write=mode, credentials=credentials)
    except BaseException:
        if discovery is not None:
            discovery.close()
        raise
    return Store(port, close_when_dropped(port, port.parts.close, ", ".join(workers) or f"etcd {etcd}"))
