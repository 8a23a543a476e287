"""From a URL to a member: opens the root, checks that it is the right one, joins the cluster if there is one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from kvstore.codec import codec
from kvstore.codec.codec import KeyFile
from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.core.executor import Deadline, Executor
from kvstore.core.write_mode import Durability
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.engine import Engine
from kvstore.engine.follower import GcFollower, StartFence
from kvstore.engine.gc_state import ClusterGcState
from kvstore.engine.host import HostMember
from kvstore.engine.settings import AS_SHIPPED, NO_TIERS, NOT_BOUNDED, AskedBound, Limits, NodeOptions, TierSettings
from kvstore.errors import InvalidRequest, PermissionDenied, RootMismatch
from kvstore.host.tables import check_left, why_not_shared
from kvstore.meta.cluster import bind_root, bound_root, forget_command
from kvstore.meta.etcd import EtcdMetadata, EtcdTls, EtcdUser, check_access
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import Session, SessionManager
from kvstore.meta.store import MetadataStore
from kvstore.root.fences import begin_reserve, with_reserve
from kvstore.root.identity import (
    BOUND_BYTES_MIN,
    FREE_SHARE,
    SHARD_BITS_DEFAULT,
    RootId,
    RootIdentity,
    create_or_open,
    default_bound,
    newest_number,
)
from kvstore.root.interface import Root
from kvstore.root.open import check_place, open_root
from kvstore.root.posix import DiskFull, PosixRoot
from kvstore.tiers.arena import PAGE_BYTES, SealedArena

log = logging.getLogger(__name__)

T = TypeVar("T")

BESIDE_CLUSTER = "it belongs to a cluster"


def open_member(
    url: str,
    etcd: str | Sequence[str] | None = None,
    *,
    durability: Durability = Durability.NONE,
    limits: Limits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    root_options: Mapping[str, Any] | None = None,
    create: bool = True,
    shard_bits: int = SHARD_BITS_DEFAULT,
    settings: TierSettings = NO_TIERS,
    keys: KeyFile | None = None,
    compress: bool = False,
    asked: AskedBound = NOT_BOUNDED,
) -> ClusterMember:
    """A node on the root at ``url``, in the cluster of ``etcd`` if given. Raises as ``kvstore.open`` says."""
    check_place(url, root_options)
    check_access(etcd, etcd_tls, etcd_user)
    if compress:
        codec.check_compression()  # before the root is made and memory is taken
    options = NodeOptions(durability, settings, keys, compress)
    limits, clock, ids = limits or Limits(), SystemClock(), RandomIds()
    if etcd and asked.is_explicit:
        raise _not_bounded(url, "a cluster has collectors of its own")
    with ExitStack() as undo:
        cluster = None
        if etcd:
            cluster = EtcdMetadata(etcd, tls=etcd_tls, user=etcd_user, timeout_s=limits.meta_deadline_s)
            undo.callback(cluster.close)
            bound_root(cluster, url)  # before the root: a cluster that does not answer must not leave an empty folder
        root = _on_a_thread(lambda: open_root(url, root_options, create=create), limits, clock)
        undo.callback(root.close)
        known = bound_root(cluster, root.url) if cluster else None
        expect = RootId(known) if known else None
        try:
            identity = _on_a_thread(
                lambda: create_or_open(root, ids, shard_bits=shard_bits, create=create, expect=expect), limits, clock
            )
        except RootMismatch as mismatch:
            if expect is None:
                raise
            raise RootMismatch(
                f"{mismatch} If the root was deleted or replaced on purpose, run: "
                + forget_command(root.url, etcd or ())
            ) from mismatch
        if cluster:
            _on_a_thread(lambda: check_left(root), limits, clock)
            bind_root(cluster, root.url, identity.root)
        host, why = (None, None) if cluster else _host_of(root, asked, limits, clock, ids)
        if host is not None:
            undo.callback(host.leave)
        if why is not None and asked.is_explicit:
            raise _not_bounded(url, why)
        meta = cluster or MemoryMetadata(clock=clock)
        undo.callback(meta.close)
        member = join(
            root, identity, meta, options, limits=limits, clock=clock, ids=ids, host=host,
            in_cluster=cluster is not None, is_beside_cluster=why == BESIDE_CLUSTER,
        )  # fmt: skip
        undo.pop_all()
        return member


def join(
    root: Root,
    identity: RootIdentity,
    meta: MetadataStore,
    options: NodeOptions = AS_SHIPPED,
    *,
    limits: Limits,
    clock: Clock,
    ids: Ids,
    in_cluster: bool = False,
    host: HostMember | None = None,
    is_beside_cluster: bool = False,
) -> ClusterMember:
    """A member over a root and metadata that are open; closes them when it is closed. Raises Unavailable.

    In a cluster nodes share ``meta``, which records where the root is. ``host`` is for a root that the
    processes of this host share without etcd.
    """
    etcd_keys, sessions = Keys(identity.root), [ids.fresh()]
    memory_bytes = options.tiers.memory_bytes // PAGE_BYTES * PAGE_BYTES
    node = Engine(
        root,
        identity,
        session=partial(itemgetter(0), sessions),
        durability=options.durability,
        limits=limits,
        clock=clock,
        ids=ids,
        arena=SealedArena(memory_bytes).open() if memory_bytes else None,
        settings=options.tiers,
        keys=options.keys,
        compress=options.compress,
        gc_state=host.view if host is not None else None,
    )

    def stages_in(session: bytes) -> None:
        node.staging.leave(sessions[0])
        sessions[0] = session  # never staged under before: rule W2
        if host is not None:
            host.table.stages_in(session)

    def began(session: Session) -> None:
        stages_in(session.id)
        if in_cluster:
            # Again for each session: an etcd that came back empty knows neither this root nor where it is.
            bind_root(meta, root.url, identity.root, limits.meta_deadline_s)

    def ended(_: Session) -> None:
        # Puts go on without a session, under an id that etcd never knew: what lies in the folder of a session that has
        # ended is left by puts that began in it, and a collector may clear it soon.
        stages_in(ids.fresh())

    presence = SessionManager(meta, etcd_keys, clock=clock, ids=ids, ttl_s=options.session_ttl_s)
    presence.attach(began, ended)
    if host is not None:
        presence.attach(lambda session: session.only_while(node.holds.expire))
    if isinstance(node.gc_view, ClusterGcState):
        fence = StartFence(node, meta, etcd_keys) if in_cluster else None
        follower = GcFollower(node, node.gc_view, meta, etcd_keys, fence)

        def follow(session: Session) -> None:
            follower.begin(session)
            try:
                threading.Thread(target=follower.run, args=(session,), name="kvstore-follower", daemon=True).start()
            except RuntimeError:  # the process may have no more threads
                follower.end(session)
                raise

        presence.attach(follow, follower.end)
    member = ClusterMember(node, meta, presence, in_cluster=in_cluster, host=host, is_beside_cluster=is_beside_cluster)
    member.start(options.tiers)
    return member


def _max_bytes(root: Root, asked: AskedBound, ids: Ids, clock: Clock) -> int | None:
    """The capacity that this process asks for. By default it is the root's, which the process that made it chose."""
    if asked.max_bytes != "auto":
        with suppress(RootMismatch):
            default_bound(root, ids=ids, clock=clock)  # later it would be a share of what this process leaves free
        return asked.max_bytes
    max_bytes = default_bound(root, ids=ids, clock=clock)
    log.info(
        "bound.default root=%s max_bytes=%s: %g of what was free when the root was made, at least %d "
        "(kvstore.open(max_bytes=))",
        root.url,
        max_bytes,
        FREE_SHARE,
        BOUND_BYTES_MIN,
    )
    return max_bytes


def _not_bounded(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"max_bytes and ttl: {url} cannot be bounded by the processes that open it: {why}. Run kvstore-gc --root {url} "
        "--etcd ENDPOINTS --interval 60s --max-bytes SIZE --ttl TIME on one host of the cluster"
    )


def _host_of(
    root: Root, asked: AskedBound, limits: Limits, clock: Clock, ids: Ids
) -> tuple[HostMember | None, str | None]:
    """This process as one of those that share the root without etcd; or, where that cannot be, None and the reason.

    In that case no other process sees its holds and pins: on a network file system, or on a cluster's root.
    """
    if not isinstance(root, PosixRoot):
        return None, "it is not a folder of this host"

    def join_host() -> tuple[HostMember | None, str | None]:
        why = why_not_shared(root.path) or (BESIDE_CLUSTER if newest_number(root) else None)
        if why is not None:
            return None, why
        begin_reserve(root, ids)
        try:
            return with_reserve(root, lambda: HostMember(root, _max_bytes(root, asked, ids, clock), asked.ttl_s)), None
        except PermissionDenied as error:
            return None, str(error)
        except DiskFull as error:
            if asked.is_explicit:
                raise
            return None, str(error)

    host, why = _on_a_thread(join_host, limits, clock)
    if why is not None:
        log.log(
            logging.WARNING if why == BESIDE_CLUSTER else logging.INFO,
            "host.alone %s %s: no other process sees what this one holds and pins, and it collects nothing; give etcd "
            "to share the root",
            root.url,
            why,
        )
    return host, why


def _on_a_thread(work: Callable[[], T], limits: Limits, clock: Clock) -> T:
    """Does something with the root on a thread of its own, because even looking at a dead mount may never return."""
    executor = Executor(1, 1, 1, limits.stall_s, clock)
    try:
        return executor.run(work, Deadline(clock, limits.write_deadline_s))
    finally:
        executor.close(timeout_s=0.0)
