"""The workers benchmark: worker processes, fio's figures beside ours, and checks that can fail."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import caching, machine, workers
from benchmarks.case import Case, Figures, Unreachable, measure
from benchmarks.contents import WrongBytes
from benchmarks.fio import Figure
from benchmarks.paths import PLAIN
from benchmarks.rounds import MIB
from benchmarks.workers import Sweep, tables_of
from kvstore.errors import KVStoreError
from tests.benchmarks.sizes import tiny_options
from tests.kit.cases import for_each

pytestmark = pytest.mark.slow
SMALL = Case(workers=2, size_bytes=8 * MIB)
has_fio = pytest.mark.skipif(machine.fio_version() is None, reason="fio is not installed")


def truncate_one(root: Path) -> None:
    """Damages the first chunk found."""
    os.truncate(caching.files(root / "chunks")[0], 5000)


def test_workers_move_their_bytes_and_are_counted(tmp_root: Path) -> None:
    found = measure(SMALL, tmp_root, rounds=2, with_fio=False)
    for kind in ("write", "read"):
        assert len(found.aggregate[kind]) == 2 and min(found.aggregate[kind]) > 0
        assert min(found.cpu_s_per_gib[kind]) > 0
        # Both move as much, and the slower one's time counts for both.
        assert found.median(kind) * 1024 <= 2.01 * max(found.per_worker[kind]) * 2
    assert len(found.singles) == 2
    assert found.ratio("write") is None and found.ratio_direct() is None
    assert not (tmp_root / "root").exists()


def test_damage_between_put_and_get_ends_the_benchmark(tmp_root: Path) -> None:
    with pytest.raises(WrongBytes, match=r"tokens read: (0|16) of 32"):
        measure(SMALL, tmp_root, 1, with_fio=False, between=lambda: truncate_one(tmp_root / "root"))


def test_rounds_larger_than_memory_go_call_by_call(tmp_root: Path) -> None:
    case = replace(SMALL, workers=1).exceeding(20 * MIB)
    assert case.calls == 3
    calls: list[int] = []
    measure(
        case, tmp_root, 1, with_fio=False, between=lambda: calls.append(len(caching.files(tmp_root / "root/chunks")))
    )
    assert calls == [4, 8, 12] * 2
    damage = lambda: truncate_one(tmp_root / "root")  # noqa: E731
    with pytest.raises(WrongBytes):
        measure(case, tmp_root, 1, with_fio=False, between=damage)


@for_each("calls", [1, 2])
def test_plain_files_are_a_limit_beside_the_store(tmp_root: Path, calls: int) -> None:
    """Bytes without names or checksums, compared as ours are."""
    case = replace(SMALL, path=PLAIN, calls=calls)
    assert measure(case, tmp_root, 1, with_fio=False).median("read") > 0

    def damage() -> None:
        (tmp_root / "root" / PLAIN / "1-0-0").write_bytes(bytes(2 * MIB))

    with pytest.raises(WrongBytes):
        measure(case, tmp_root, 1, with_fio=False, between=damage)


@has_fio
def test_fio_runs_beside_us_in_each_round(tmp_root: Path) -> None:
    found = measure(replace(SMALL, model="", chunk_bytes=64 << 10), tmp_root, 2)
    assert len(found.fio["write"]) == len(found.fio["read"]) == 2
    assert found.fio["read"][0].gib_per_s > 0 and found.fio["read"][0].p99_ms >= found.fio["read"][0].p50_ms > 0
    ratio = found.ratio("read")
    assert ratio is not None and ratio > 0
    assert len(found.fio_each["write"]) == 2 and found.ratio("write", file_each=True)
    assert not (tmp_root / "fio").exists()


@for_each("path", ["grpc", "shared", "tcp"])
def test_each_way_to_a_worker_is_measured(tmp_root: Path, path: str) -> None:
    found = measure(replace(SMALL, path=path), tmp_root, 1, with_fio=False)
    assert found.median("read") > 0
    assert found.cpu_s_per_gib["read"][0] > 0


def test_memory_is_never_cold(tmp_root: Path) -> None:
    if machine.file_system(tmp_root) != "tmpfs":
        pytest.skip("needs a file system in memory")
    with pytest.raises(Unreachable, match="is ever cold"):
        measure(replace(SMALL, cache="cold"), tmp_root, 1, with_fio=False)


def test_cold_is_cold(tmp_path: Path) -> None:
    if not caching.can_be_cold(tmp_path):
        pytest.skip("needs a file system with a device below it")
    (tmp_path / "file").write_bytes(bytes(4 * MIB))
    assert caching.cached_share(tmp_path) == 1
    caching.evict(tmp_path)
    assert caching.cached_share(tmp_path) == 0


def test_a_store_that_cannot_be_opened_is_told(tmp_root: Path) -> None:
    (tmp_root / "root").write_text("a file where the root should be")
    with pytest.raises(KVStoreError, match="root"):
        measure(SMALL, tmp_root, 1, with_fio=False)


def test_the_table_is_vineyards_with_ratios() -> None:
    one = Figures(2 * MIB)
    for kind in ("write", "read"):
        one.aggregate[kind] = [2.0, 4.0, 3.0]
        one.per_worker[kind] = [1024.0, 2048.0, 1536.0]
        one.cpu_s_per_gib[kind] = [0.5, 0.5, 0.5]
        one.fio[kind] = [Figure(4.0, 0.25, 1.0, 2.0), Figure(4.0, 0.25, 1.0, 2.0), Figure(4.0, 0.25, 1.0, 2.0)]
    two = Sweep("Workers", (Case(workers=1), Case(workers=2)), x="workers")
    speed, costs = tables_of(two, [(two.cases[0], one), (two.cases[1], one)])
    assert speed.columns[:4] == ("workers", "write MiB/s", "read MiB/s", "aggregate write GiB/s")
    assert speed.column("write / fio") == [0.75, 0.75] and "read / fio direct" not in speed.columns
    assert "chunk MiB 2" in speed.note and "Llama" in speed.note
    assert costs.column("fio p50/p99") == ["1.00 / 2.00"] * 2


def test_the_command_takes_chosen_cases(tmp_root: Path) -> None:
    parser = argparse.ArgumentParser()
    workers.add_arguments(parser)
    chosen = ["--workers", "1,2", "--model", "opaque blocks", "--chunk-mib", "0.0625", "--size-mib", "4"]
    result = workers.run(tiny_options(tmp_root), parser.parse_args(chosen))
    assert result.tables[0].column("workers") == [1, 2]
    assert list(tmp_root.iterdir()) == []
    with pytest.raises(SystemExit):
        parser.parse_args(["--path", "pigeon"])
