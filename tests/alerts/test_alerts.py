"""Every alert fires under its condition: real workers, collector and etcd, watched by a real Prometheus.

The conditions are caused one after the other on one stage, in the order of this file, because a stage for each would
take an hour. Each test waits for its own alerts; the last one finds alerts that no test covers.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore import ClientTls, Layout
from kvstore.core.write_mode import WriteModeName
from kvstore.errors import KVStoreError
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from tests.alerts.prometheus import PATIENCE_S, Prometheus
from tests.alerts.stage import AUDIT_BYTES, DISK_BYTES, ROOT_BYTES, Hanging, Program, Stage, filled, stopped, tmpfs
from tests.kit.certificates import Authority, Pair
from tests.kit.patience import eventually
from tests.kit.watch_page import series_names
from tests.kit.watch_queries import DASHBOARDS, panels, shown
from tests.watch.test_alert_rules import alerts

NEEDED = ("prometheus", "bindfs", "mount")
pytestmark = [
    pytest.mark.alerts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems"),
    pytest.mark.skipif(
        bool([name for name in NEEDED if shutil.which(name) is None]), reason=f"needs {', '.join(NEEDED)} (Debian)"
    ),
]

LAYOUT = Layout(layers=8, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=32)
"""Chunks of 256 KiB."""
MEMORY_BYTES = 32 << 20
ALL_THREADS = 96
"""More calls at once than a worker allows."""


EMPTY_PANELS = {"Certificates"}
"""Nobody has one before the test of a secured worker."""


def tokens(number: int, chunks: int) -> list[int]:
    """A prompt like no other."""
    return list(range(number * 10_000, number * 10_000 + chunks * LAYOUT.chunk_tokens))


def kv(chunks: int) -> npt.NDArray[np.float16]:
    return np.random.default_rng(1).standard_normal(LAYOUT.shape(chunks * LAYOUT.chunk_tokens)).astype(np.float16)


@dataclass
class Scene:
    """The stage with everything on it that is well at first."""

    folder: Path
    root: Path
    disk: Path
    hanging: Hanging
    etcd: EmbeddedEtcd
    stage: Stage
    prometheus: Prometheus
    worker: Program
    """Has memory and a local disk; its root can hang."""
    plain: Program
    """Has neither; its root can hang as well."""
    collector: Program
    watched: list[str]

    def start(self, *options: str, etcd: EmbeddedEtcd | None = None, module: str = "kvstore.cli.main") -> Program:
        """A worker on the root itself."""
        place = ("--root", str(self.root), "--etcd", (etcd or self.etcd).endpoints)
        return self.stage.start("worker", *place, *options, module=module)

    def collect(self, *options: str) -> Program:
        return self.stage.collect("--root", str(self.root), "--etcd", self.etcd.endpoints, "--interval", "1s", *options)

    def watch(self, program: Program) -> None:
        """Has a worker scraped too."""
        self.watched.append(program.said["metrics"])
        self.prometheus.watch("workers", self.watched)

    def end(self, program: Program) -> None:
        """Ends a worker that was scraped."""
        self.watched.remove(program.said["metrics"])
        self.prometheus.watch("workers", self.watched)
        program.end()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("alerts")
    with ExitStack() as undo:
        root = undo.enter_context(tmpfs(folder / "root", ROOT_BYTES))
        disk = undo.enter_context(tmpfs(folder / "disk", DISK_BYTES))
        hanging = Hanging(root, folder / "hanging")
        undo.callback(hanging.close)
        etcd = undo.enter_context(EmbeddedEtcd(folder / "etcd"))
        stage = Stage(folder)
        undo.callback(stage.close)
        prometheus = Prometheus(folder)
        common = ("--root", str(hanging.mounted), "--etcd", etcd.endpoints, "--listen", "127.0.0.1:0")
        tiers = ("--memory", str(MEMORY_BYTES), "--disk", f"{disk / 'tier'}:{64 << 20}")
        worker = stage.start("worker", *common, *tiers)
        plain = stage.start("worker", *common)
        collector = stage.collect("--root", str(root), "--etcd", etcd.endpoints, "--interval", "1s")
        prometheus.watch("collectors", [collector.said["metrics"]])
        scene = Scene(folder, root, disk, hanging, etcd, stage, prometheus, worker, plain, collector, [])
        scene.watch(worker)
        scene.watch(plain)
        with prometheus.running():
            yield scene


def cache_of(program: Program, **options: object) -> tuple[kvstore.Store, kvstore.Cache]:
    store = kvstore.connect(program.said["grpc"], **options)  # type: ignore[arg-type]
    return store, store.namespace("model", LAYOUT)


def test_nothing_fires_while_all_is_well_and_every_metric_is_documented(scene: Scene) -> None:
    store, cache = cache_of(scene.worker)
    with store:
        cache.put(tokens(1, 8), kv(8), cache=False)
        assert cache.match(tokens(1, 8)) == len(tokens(1, 8))
        assert cache.get(tokens(1, 8))[0] == len(tokens(1, 8))
    eventually(lambda: len(scene.prometheus.query("up == 1")) == 3)
    time.sleep(5.0)
    assert scene.prometheus.firing() == set()
    ours = {name for name in scene.prometheus.names() if name.startswith("kvstore_")}
    assert len(ours) > 100 and not ours - series_names()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_finds_something_and_every_panel_a_number(scene: Scene, dashboard: Path) -> None:
    empty, ends_s = set[str](), time.monotonic() + PATIENCE_S
    store, cache = cache_of(scene.worker)
    with store:
        while True:
            assert cache.match(tokens(1, 8)) == len(tokens(1, 8))
            for panel in panels(dashboard):
                found = [scene.prometheus.query(shown(target["expr"])) for target in panel["targets"]]
                numbers = [float(series["value"][1]) for each in found for series in each]
                (empty.discard if all(found) and any(map(math.isfinite, numbers)) else empty.add)(panel["title"])
            if empty <= EMPTY_PANELS or time.monotonic() > ends_s:
                break
            time.sleep(1.0)
    assert empty <= EMPTY_PANELS


def test_files_that_somebody_damaged(scene: Scene) -> None:
    store, cache = cache_of(scene.plain)
    with store:
        cache.put(tokens(2, 8), kv(8))
        before = {path for path in scene.root.glob("chunks/*/*") if path.stat().st_mtime > 0}
        for path in before:
            with open(path, "r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(100))
        assert cache.get(tokens(2, 8))[0] == 0
    scene.prometheus.wait_fired("KVStoreDamageFound", "KVStoreMissesByDamage")


def test_a_worker_that_is_secured_and_what_is_tried_on_it(scene: Scene) -> None:
    authority = Authority(scene.folder / "tls")
    server = authority.server(lives=datetime.timedelta(days=3))
    one, other = authority.issue("one"), authority.issue("other")
    access, audit = scene.folder / "access.json", scene.folder / "audit"
    rules = {
        "identities": {"cert:one": {"acme": "write"}, "cert:server": {"*": "read"}},
        "quotas": {"acme": {"requests_per_s": 0.2}},
    }
    access.write_text(json.dumps(rules))
    access.chmod(0o600)
    with tmpfs(audit, AUDIT_BYTES):
        secured = scene.start(
            *("--listen", "127.0.0.1:0", "--access", str(access), "--audit-log", str(audit / "audit.log")),
            *("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)),
            "--no-private",
        )
        scene.watch(secured)

        def at(who: Pair) -> kvstore.Store:
            tls = ClientTls(str(authority.ca), str(who.cert), str(who.key))
            return kvstore.connect(secured.said["grpc"], tls=tls, bulk="grpc")

        scene.prometheus.wait_fired("KVStoreCertificateExpires")
        with at(one) as store:
            cache = store.namespace("secret", LAYOUT, tenant="acme")
            for number in range(300):  # over its quota from the second on: a miss, or refused
                with suppress(KVStoreError):
                    cache.refcount(tokens(number, 1))
        with at(other) as store, filled(audit):
            for _ in range(300):
                with suppress(KVStoreError):
                    store.namespace("secret", LAYOUT, tenant="acme")
        access.write_text('{"identities": ')
        with at(one) as store:
            for _ in range(20):  # it is looked at when somebody calls, now and then
                time.sleep(0.2)
                with suppress(KVStoreError):
                    store.namespace("secret", LAYOUT, tenant="acme")
        scene.prometheus.wait_fired("KVStoreDenials", "KVStoreQuotaRefusals", "KVStoreAuditLost", "KVStoreFileRefused")
        scene.end(secured)


def test_a_worker_with_a_defect_whose_etcd_is_not_that_of_its_root(scene: Scene) -> None:
    with EmbeddedEtcd(scene.folder / "foreign") as foreign:
        wrong = scene.start("--listen", "127.0.0.1:0", etcd=foreign, module="tests.alerts.defective")
        scene.watch(wrong)
        scene.prometheus.wait_fired("KVStoreNotProtected")
        store, cache = cache_of(wrong, bulk="grpc")
        with store, suppress(KVStoreError):
            cache.match(tokens(3, 1))
        scene.prometheus.wait_fired("KVStoreCallsFailing")
        scene.end(wrong)


def test_a_local_disk_that_is_full_of_other_things(scene: Scene) -> None:
    chunks = 2 * MEMORY_BYTES // LAYOUT.chunk_bytes
    store, cache = cache_of(scene.worker)
    with store, filled(scene.disk):
        for number in range(chunks // 8):
            cache.put(tokens(100 + number, 8), kv(8), write="through")
            cache.get(tokens(100 + number, 8))
            cache.get(tokens(100 + number, 8))
        scene.prometheus.wait_fired("KVStoreLocalDiskFailing")
        cache.clear()


def test_a_root_that_hangs(scene: Scene) -> None:
    store, cache = cache_of(scene.worker)
    plain_store, plain = cache_of(scene.plain, write="behind")
    with store, plain_store, ThreadPoolExecutor(ALL_THREADS) as threads, scene.hanging.hung():

        def asked(number: int) -> None:
            with suppress(KVStoreError):
                cache.match(tokens(10_000 + number, 4))

        def put(cache: kvstore.Cache, number: int, chunks: int, write: WriteModeName | None) -> None:
            with suppress(KVStoreError):
                cache.put(tokens(20_000 + number, chunks), kv(chunks), write=write)

        threads.submit(put, plain, 0, 4, None)
        for number in range(4):
            threads.submit(put, cache, 1 + number, MEMORY_BYTES // LAYOUT.chunk_bytes // 4, "behind")
        scene.prometheus.wait_fired("KVStoreBehindQueueFull")  # as long as it is not sure that the root hangs
        for number in range(2 * ALL_THREADS):
            threads.submit(asked, number)
        scene.prometheus.wait_fired(
            "KVStoreRootHangs", "KVStoreWorkerNotServing", "KVStoreCallsSlow", "KVStoreShedding"
        )
        scene.prometheus.wait_fired("KVStorePutsLost", within_s=90.0)


def test_an_etcd_that_freezes(scene: Scene) -> None:
    with stopped(scene.etcd.pid):
        scene.prometheus.wait_fired("KVStoreEtcdUnreachable", "KVStoreLeaseMarginSmall", "KVStoreGcRoundFailed")


def test_a_root_that_others_fill(scene: Scene) -> None:
    store, cache = cache_of(scene.plain)
    with store:
        cache.clear()
        cache.put(tokens(4, 32), kv(32))
        with cache.pin(tokens(4, 32)) as pin, filled(scene.root, left_bytes=128 << 10):
            assert pin.tokens  # or the collector would make room
            scene.prometheus.wait_fired("KVStoreRootNearlyFull", "KVStorePutsRefusedFull")


def test_a_node_that_announces_nothing_and_then_no_collector(scene: Scene) -> None:
    eventually(lambda: scene.prometheus.query("min(kvstore_protected)")[0]["value"][1] == "1")
    scene.collector.end()
    store, cache = cache_of(scene.worker)
    with store:
        greedy = scene.collect("--ttl", "1s")
        scene.prometheus.watch("collectors", [greedy.said["metrics"]])
        with stopped(scene.plain.child.pid):  # until its session ends
            cache.put(tokens(5, 8), kv(8), cache=False)
            scene.prometheus.wait_fired("KVStoreGcBlocked")
    greedy.end()
    scene.prometheus.wait_fired("KVStoreGcNotRunning")


def test_a_worker_that_is_started_again_and_again_and_then_is_gone(scene: Scene) -> None:
    said = scene.plain.said
    for number in range(3):
        scene.plain.end(signal.SIGKILL)
        scene.plain = scene.start("--listen", said["grpc"], "--metrics", said["metrics"])
        changes = f'changes(process_start_time_seconds{{instance="{said["metrics"]}"}}[15m]) > {number}'
        eventually(lambda asked=changes: bool(scene.prometheus.query(asked)))  # type: ignore[misc]
    scene.prometheus.wait_fired("KVStoreWorkerRestarts")
    scene.plain.end(signal.SIGKILL)
    scene.prometheus.wait_fired("KVStoreWorkerDown")


def test_no_alert_was_forgotten(scene: Scene) -> None:
    assert scene.prometheus.awaited == set(alerts())
