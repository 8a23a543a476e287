"""The memory of this host, or the lowest limit of a cgroup of this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.memory import arena
from kvstore.memory.arena import memory_free_bytes, memory_most_bytes, memory_there_bytes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(arena, "CGROUPS", tmp_path)
    monkeypatch.setattr(arena, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 64 * GIB // 4096)
    return tmp_path


def limit(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_it_is_the_hosts_less_what_is_left_to_others(cgroups: Path) -> None:
    assert (memory_there_bytes(), memory_most_bytes()) == (64 * GIB, 63 * GIB)
    limit(cgroups / "memory.max", "max\n")
    limit(cgroups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_there_bytes() == 64 * GIB


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_sees_its_own_limit_at_the_top(cgroups: Path, name: str) -> None:
    limit(cgroups / name, f"{4 * GIB}\n")
    assert (memory_there_bytes(), memory_most_bytes()) == (4 * GIB, 7 * GIB // 2)


@pytest.mark.parametrize(
    ("line", "above"),
    [("0::/a.slice/b.service", "a.slice"), ("4:memory:/a/b", "memory/a"), ("4:cpu:/x\n0::/a/b", "a")],
)
def test_a_service_is_limited_by_its_cgroup_and_by_those_around_it(cgroups: Path, line: str, above: str) -> None:
    limit(cgroups / "membership", f"{line}\n")
    name = "memory.limit_in_bytes" if ":memory:" in line else "memory.max"
    limit(cgroups / above / name, f"{8 * GIB}\n")
    assert memory_there_bytes() == 8 * GIB
    limit(cgroups / above / os.path.basename(line) / name, f"{2 * GIB}\n")
    assert memory_there_bytes() == 2 * GIB


def test_what_the_system_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arena, "MEMINFO", tmp_path / "meminfo")
    assert memory_free_bytes() is None
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:    2048 kB\n")
    assert memory_free_bytes() == 2 << 20
