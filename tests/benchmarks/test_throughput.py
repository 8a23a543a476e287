"""The throughput harness: its movers notice wrong bytes, and processes, mixes and job files give figures."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import kvstore
from benchmarks.harness import baselines
from benchmarks.harness.load import BlockMover, ChunkMover, Load, WrongBytes, mover
from benchmarks.harness.machine import MIB
from benchmarks.harness.throughput import Case, measure, measure_mix, read_jobs
from kvstore import Layout
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each

LAYOUT = Layout(2, 1, 64, "int8", 16)
LOADS = {"chunks": Load(LAYOUT.chunk_bytes, 3, LAYOUT, seed=1), "blocks": Load(4096, 5, None, seed=1)}
SMALL = Case(workers=2, size_bytes=8 * MIB)


@for_each("kind", [*LOADS])
def test_movers_verify_each_call(tmp_root: Path, kind: str) -> None:
    with kvstore.open(str(tmp_root)) as store:
        moves = mover(store, LOADS[kind])
        assert isinstance(moves, ChunkMover | BlockMover)
        for call in range(2):
            moves.prepare(call)
            moves.put()
            moves.get()
            moves.verify()
        moves.prepare_one(0)
        moves.put_one()
        moves.get_one()
        moves.out.reshape(-1)[-7] ^= 1
        with pytest.raises(WrongBytes, match="wrong bytes"):
            moves.verify()
        (bench,) = store.namespaces()
        store.namespace(bench.name, bench.layout).clear()
        moves.get()
        with pytest.raises(WrongBytes, match="read: 0 of"):
            moves.verify()
        with pytest.raises(WrongBytes):
            moves.get_one()


@pytest.mark.slow
def test_workers_are_measured_without_fio(tmp_root: Path) -> None:
    found = measure(SMALL, tmp_root, rounds=2, with_fio=False)
    for kind in ("write", "read"):
        assert len(found.aggregate[kind]) == 2 and min(found.aggregate[kind]) > 0
        assert min(found.cpu_s_per_gib[kind]) > 0
        # Both move the same size, and the slower one's time counts for both.
        assert found.median(kind) * 1024 <= 2.01 * max(found.per_worker[kind]) * 2
    assert len(found.singles) == 2
    assert found.ratio("write") is None and found.ratio_direct() is None
    assert not (tmp_root / "root").exists()


@pytest.mark.slow
def test_corruption_between_put_and_get_ends_the_run(tmp_root: Path) -> None:
    def truncate() -> None:
        os.truncate(baselines.files(tmp_root / "root" / "chunks")[0], 5000)

    with pytest.raises(WrongBytes, match=r"tokens read: (0|16) of 32"):
        measure(SMALL, tmp_root, 1, with_fio=False, between=truncate)


@pytest.mark.slow
@for_each("path", ["grpc", "shared", "tcp"])
def test_each_path_to_a_worker_is_measured(tmp_root: Path, path: str) -> None:
    found = measure(replace(SMALL, path=path), tmp_root, 1, with_fio=False)
    assert found.median("read") > 0
    assert found.cpu_s_per_gib["read"][0] > 0


@pytest.mark.slow
@for_each("read_share, kinds", [(0.0, ["write"]), (1.0, ["read"])])
def test_a_mix_calls_in_the_given_share(tmp_root: Path, read_share: float, kinds: list[str]) -> None:
    found = measure_mix(replace(SMALL, seconds=0.5, read_share=read_share), tmp_root, with_fio=False)
    assert [kind for kind, taken in found.taken_s.items() if taken] == kinds
    assert [kind for kind, rate in found.gib_per_s.items() if rate] == kinds


def test_a_job_file_holds_the_options(tmp_path: Path) -> None:
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps([{"workers": [1, 2], "seconds": 30, "read-share": 0.7}, {"path": "shared"}]))
    first, second = read_jobs(file)
    assert (first.workers, first.seconds, first.read_share) == ([1, 2], 30.0, 0.7)
    assert second.path == ["shared"]
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(InvalidRequest):
            read_jobs(file)
