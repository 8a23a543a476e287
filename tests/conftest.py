"""Shared by all tests: Hypothesis profiles, roots on fast memory, and a guard against leftovers.

Servers of one kind live in the conftest.py of the folder that needs them; this file starts nothing.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.kit import locking

# What is imported and collected lives to the end of the run: looking through it again and again found nothing.
gc.disable()
locking.install()  # before kvstore is imported: some modules make locks then

import kvstore  # noqa: E402, F401  # before any test imports gRPC, which asks once whether forks are its business
from kvstore.client import pool as client_arena  # noqa: E402
from kvstore.tiers import arena  # noqa: E402

# A shell that starts the run in the background has it ignore Ctrl-C, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHM = Path("/dev/shm")
SHM_FREE_MIN_BYTES = 512 << 20
AHEAD_BYTES = 1 << 20
LEFTOVER_GRACE_S = 40.0
"""More than a worker takes to end whose ``up`` and etcd were killed: its drain, its flush, and 15 s for the rest."""


# The default is the same on every run, so that a red suite means a change broke it; `thorough` searches.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "thorough", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _scratch() -> Path | None:
    """Memory-backed storage for roots, if the machine has enough of it; None: the disk."""
    if SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= SHM_FREE_MIN_BYTES:
        return SHM
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with many slow tests first: a run of several processes ends with the last file of any."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Spares the garbage collector the thousands of tests, which live to the end of the run."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def little_memory_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets arenas take few pages ahead: all of them are a fourth of the suite's system time, and hardly used.

    The tests of arenas have all.
    """

    def some(memory: memoryview, writing: bool, closing: threading.Event) -> None:
        populate(memory[:AHEAD_BYTES], writing, closing)

    if request.path.name == "test_arena.py":
        yield
        return
    populate = arena.populate
    with pytest.MonkeyPatch.context() as patched:
        for module in (arena, client_arena):
            patched.setattr(module, "populate", some)
        yield


@pytest.fixture(scope="session", autouse=True)
def priority_of_the_run() -> Iterator[None]:
    """Keeps the priority of a test process: a collector that ran in it would lower that of all later tests.

    Later tests, and the servers that they start, then get too little of a busy machine.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "nice", lambda increment: os.getpriority(os.PRIO_PROCESS, 0))
        yield


@pytest.fixture(autouse=True)
def locks_in_order() -> Iterator[None]:
    """Fails a test in which a thread took two locks against their order (tests/kit/locking.py)."""
    yield
    found = sorted(set(locking.violations))
    locking.violations.clear()
    assert not found, "locks were taken against their order:\n  " + "\n  ".join(found)


@pytest.fixture
def tmp_root() -> Iterator[Path]:
    """An empty directory for one root, in memory where the machine allows, gone after the test."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir=_scratch(), ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def tmp_root_url(tmp_root: Path) -> str:
    """The directory as users name it."""
    return f"file://{tmp_root}"


@pytest.fixture(scope="module")
def module_root() -> Iterator[Path]:
    """A root like ``tmp_root``, shared by the tests of one module: for servers that they share."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir=_scratch(), ignore_cleanup_errors=True) as path:
        yield Path(path)


# Leftovers. Every process that a test starts inherits RUN_TAG in its environment, so one that outlived its parent (and
# has init for a parent now) is still known as ours.

RUN_TAG = f"KVSTORE_TEST_RUN={os.getpid()}-{time.time_ns()}"


def _our_processes() -> dict[int, str]:
    """Command lines of the live processes that this test process started, directly or not, by pid."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            ours = int(status[1]) == os.getpid() or RUN_TAG.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or somebody else's
        # A zombie has ended; the standard library's own servants end with the interpreter, not before.
        servant = "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
        if ours and status[0] != "Z" and not servant:
            found[int(folder.name)] = f"{command or '?'} (state {status[0]})"
    return found


def _our_threads() -> list[str]:
    """Live threads that run code of this package or of etcd's client."""
    found = []
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        module = str(getattr(target, "__module__", None) or type(thread).__module__)
        if thread.name.startswith(("kvstore", "etcd")) or module.split(".")[0] in ("kvstore", "kvstore_gc", "pyetcd"):
            found.append(f"{thread.name} (from {module})")
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fails the run when a process or thread that a test started is still there after the last fixture is gone."""
    name, _, value = RUN_TAG.partition("=")
    os.environ[name] = value
    yield
    deadline_s = time.monotonic() + LEFTOVER_GRACE_S
    while (processes := _our_processes()) or _our_threads():
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    left = [f"process {pid}: {command}" for pid, command in processes.items()]
    left += [f"thread {thread}" for thread in _our_threads()]
    assert not left, "tests left these running:\n  " + "\n  ".join(left)
