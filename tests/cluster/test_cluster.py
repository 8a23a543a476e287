"""Three hosts through everything that happens to a cluster: ``make cluster-test``; skipped where it cannot run.

One cluster lives through all of it, in this order, with an engine on each host that never stops. After each scene the
engines must be served as before without anybody's help, every accepted pin must be listed and readable from each host,
and no byte may have been wrong; what is away, cut off or full may cost misses. At the end the root must be sound.

KVSTORE_CLUSTER_TRACE names a trace to take instead of a generated one; KVSTORE_CLUSTER_KEEP keeps the logs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import (
    CRON_S,
    HOSTS,
    PYTHON,
    ROOT,
    WORKER,
    Cluster,
    Host,
    kvstore,
    running_cluster,
    why_not,
)
from tests.cluster.members import ETCD
from tests.cluster.moosefs import CHUNKS
from tests.cluster.story import Story, rounds_of
from tests.kit.patience import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

AWAY_S = 15.0
CUT_OFF_S = 22.0
"""Longer than a session lives without etcd."""
FROZEN_S = 8.0
FULL_S = 8.0
BETWEEN_HOSTS_S = 3.0
READY_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-cluster-"))
    try:
        began_s = time.monotonic()
        with running_cluster(folder) as made:
            print(f"\nthree hosts, etcd, MooseFS, TLS: serving after {time.monotonic() - began_s:.1f} s")
            yield made
    finally:
        if "KVSTORE_CLUSTER_KEEP" not in os.environ:
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def story(cluster: Cluster) -> Iterator[Story]:
    told = Story(cluster)
    told.begin()
    yield told


def test_ordinary_day_is_served(story: Story) -> None:
    with story.scene("ordinary day") as scene:
        time.sleep(8.0)
    assert scene.figures is not None
    assert scene.figures.hit_ratio > 0 and scene.pins


def test_host_without_power_comes_back(story: Story) -> None:
    lost = story.cluster.hosts[1]
    with story.scene("host2 has no power") as scene:
        story.cluster.cut_power(lost)
        time.sleep(AWAY_S)
        meanwhile = story.diary.between(scene.began_s + 5.0, time.monotonic())
        story.boot(lost)
        scene.healed()
    assert meanwhile.requests and meanwhile.hit_ratio > 0, "the others went on"


def test_cut_off_host_pins_nothing_and_joins_again(story: Story) -> None:
    alone = story.cluster.hosts[2]
    with story.scene("host3 is cut off") as scene:
        story.cluster.unplug(alone)
        time.sleep(CUT_OFF_S)
        promised = story.diary.pinned_by(alone.name, scene.began_s + 1.0, time.monotonic())
        story.cluster.plug(alone)
        scene.healed()
    assert not promised, "a pin needs a majority of etcd"


def test_frozen_leader_of_etcd_is_replaced(story: Story) -> None:
    cluster = story.cluster
    with story.scene("etcd's leader frozen") as scene:
        frozen = cluster.leader()
        cluster.freeze(frozen)
        eventually(lambda: cluster.leader() is not frozen, "another leader", READY_S)
        time.sleep(FROZEN_S)
        cluster.thaw(frozen)
        scene.healed()


def test_full_file_system_serves_stored_chunks(story: Story) -> None:
    cluster = story.cluster
    with story.scene("file system full") as scene:
        cluster.fill()
        full_s = time.monotonic()
        time.sleep(FULL_S)
        meanwhile = story.diary.between(full_s, time.monotonic())
        cluster.empty()
        scene.healed()
    assert meanwhile.hit_ratio > 0, "what is there can be read"


def test_rolling_upgrade_under_load(story: Story) -> None:
    with story.scene("rolling upgrade") as scene:
        for host in story.cluster.hosts:
            _upgrade(story.cluster, host)
            time.sleep(BETWEEN_HOSTS_S)
        story.cluster.restart_master()
        scene.healed()
    assert scene.figures is not None
    assert scene.figures.hit_ratio > 0


def test_root_is_sound_at_the_end(story: Story) -> None:
    cluster = story.cluster
    story.end()
    time.sleep(len(HOSTS) * CRON_S)  # the cron job's next rounds, which also tidy up after the ones that were killed
    rounds = [each for host in cluster.hosts for each in rounds_of(host.machine.logs / "cron.out")]
    last = max(rounds, key=lambda each: float(each["started_s"]))
    assert not last["unfinished"] and not last["sweeps"]["left"], last
    audited = [
        json.loads(line)
        for host in cluster.hosts
        for line in (host.machine.logs / "audit.log").read_text().splitlines()
    ]
    assert {each["event"] for each in audited} == {"act"}, "somebody was denied something"
    first = cluster.hosts[0]
    checked = first.machine.run([*kvstore("fsck"), ROOT, "--json"], READY_S, PYTHON)
    assert sum(each["reaped"]["chunks"] for each in rounds) > 0, "collectors deleted nothing"
    assert checked.code == 0, checked.out
    listing = [*kvstore("ls"), "--workers", "--json", *cluster.etcd_options(first)]
    workers = json.loads(first.machine.must(listing, READY_S, PYTHON))
    assert len(workers["workers"]) == len(HOSTS), workers


def _upgrade(cluster: Cluster, host: Host) -> None:
    """Ends what runs on a host, politely, and starts it again, as new versions of it would be."""
    seen = cluster.ready_count(host)
    assert host.machine.stop(WORKER) == 0, host.machine.said(WORKER)
    cluster.start_worker(host)
    host.machine.stop(ETCD)
    host.member.start()
    host.machine.stop(CHUNKS)
    host.files.start_chunks()
    cluster.wait_ready(host, seen)
