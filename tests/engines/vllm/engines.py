"""vLLM engines as child processes, the servers beside them, and the prompts that tests give them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.patience import eventually
from tests.kit.programs import ended

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".cache/engines/vllm/bin/python"
HERE = Path(__file__).resolve().parent

START_S = 300.0
"""Generous: an engine takes some 15 s, and a busy machine several times as long."""
ANSWER_S = 120.0
BLOCK_TOKENS = 32
SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_)[^\s/]+")
"""What vLLM and Python's multiprocessing make there."""


def prompt(seed: int, count: int) -> list[int]:
    """Random tokens of the tiny model's vocabulary; the same ones for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, 512) for _ in range(count)]


def full_blocks(tokens: Sequence[int]) -> int:
    """Tokens of a prompt that can be loaded: its full blocks, one token being left to compute."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def engine_environment(folder: Path, *, processes: bool = True) -> dict[str, str]:
    """Returns the environment in which vLLM runs on a CPU without network access."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM", "COV"))}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "VLLM_CACHE_ROOT": str(folder / "cache/vllm"),
    }


def transfer(place: dict[str, Any], role: str = "kv_both", policy: str = "recompute") -> dict[str, Any]:
    """``kv_transfer_config`` for our connector."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": place,
    }


def run_script(workplace: Path, *words: str) -> None:
    """Runs a script of this folder where vLLM is installed."""
    script, *arguments = words
    subprocess.run(
        [str(PYTHON), str(HERE / script), *arguments],
        check=True,
        timeout=300,
        env=engine_environment(workplace),
        cwd=workplace,
    )


def make_model(workplace: Path, name: str, seed: int, **changes: object) -> Path:
    """A tiny model with weights from ``seed`` in a folder called ``name``."""
    folder = workplace / name
    run_script(workplace, "tiny_model.py", str(folder), "--seed", str(seed), "--changes", json.dumps(changes))
    return folder


def make_recurrent_model(workplace: Path, name: str) -> Path:
    """A tiny model with recurrent layers: ``lfm2`` or ``qwen3-next``."""
    folder = workplace / name
    run_script(workplace, "tiny_recurrent.py", str(folder), name)
    return folder


Adapter = tuple[str, int, str]
"""An adapter's name, number and path, as vLLM tells them apart."""


def make_adapter(workplace: Path, folder: Path, model: Path, seed: int) -> None:
    """An adapter of the tiny model with weights from ``seed``."""
    run_script(workplace, "tiny_adapter.py", str(model), str(folder), "--seed", str(seed))


@dataclass
class Answer:
    """The tokens that an engine generated for some prompts."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    reasons: list[str]
    seconds: float

    def check_same(self, other: Answer) -> None:
        """Asserts equal tokens, and equal log-probabilities to 5 decimals."""
        assert self.tokens == other.tokens
        for mine, others in zip(self.logprobs, other.logprobs, strict=True):
            assert [abs(a - b) < 0.5e-5 for a, b in zip(mine, others, strict=True)] == [True] * len(mine)


class Engine:
    """One engine. ``processes`` False: all in one process, which starts in a third of the time."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, processes: bool = False) -> None:
        read, write = os.pipe()
        self._log = folder / f"engine-{time.monotonic_ns()}.log"
        if not processes:
            settings = {"distributed_executor_backend": "uni", **settings}
        with open(self._log, "wb") as log:
            self.child = subprocess.Popen(
                [str(PYTHON), str(HERE / "engine.py"), json.dumps(settings), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                cwd=folder,
                env=engine_environment(folder, processes=processes),
                start_new_session=True,
                text=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def wait_ready(self) -> Engine:
        """Returns when it takes requests."""
        assert self._read(START_S) == {"ready": True}
        return self

    def generate(
        self, *prompts: list[int], tokens: int = 8, adapter: Adapter | None = None, priority: int = 0
    ) -> Answer:
        """Greedy continuations."""
        asked = {"prompts": list(prompts), "tokens": tokens, "adapter": adapter, "priority": priority}
        return Answer(**self._ask(asked))

    def load(self, prompt: list[int], expected: Answer, cached: int) -> None:
        """Asks until so many tokens are loaded: what engines stored before is in the root then."""

        def is_loaded() -> bool:
            self.forget()
            answer = self.generate(prompt)
            answer.check_same(expected)
            return answer.cached == [cached]

        eventually(is_loaded, f"{cached} tokens are loaded")

    def hinted(self, prompt: list[int], **hints: Any) -> Answer:
        """A greedy continuation of a request with hints in ``kv_transfer_params``."""
        return Answer(**self._ask({"prompts": [prompt], "tokens": 8, "adapter": None, "hints": {"kvstore": hints}}))

    def begin(self, *prompts: list[int], tokens: int = 8) -> None:
        """Asks without waiting for the answer."""
        self._send({"prompts": list(prompts), "tokens": tokens, "adapter": None})

    def end(self) -> Answer:
        """The answer to ``begin``."""
        return Answer(**self._read(ANSWER_S))

    def forget(self, *, connector: bool = False) -> None:
        """Empties the engine's own prefix cache, and the ``connector``'s as after an update of the weights."""
        assert self._ask({"reset": True, "connector": connector})["reset"]

    def counts(self) -> dict[str, float]:
        """vLLM's metrics."""
        found: dict[str, float] = self._ask({"stats": True})["stats"]
        return found

    def log(self) -> str:
        """Returns its output so far."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        kill_group(self.child)
        self._answers.close()
        if self.child.stdin is not None:
            try:
                self.child.stdin.close()
            except BrokenPipeError:
                pass

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        return self._read(ANSWER_S)

    def _send(self, request: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        # A killer, because a pipe has no deadline: the read ends when the engine does.
        killer = threading.Timer(timeout_s, self.child.kill)
        killer.start()
        try:
            line = self._answers.readline()
        finally:
            killer.cancel()
        assert line, f"the engine ended or took over {timeout_s:.0f} s; its last words:\n{self.log()[-6000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def kill_group(child: subprocess.Popen[Any]) -> None:
    """Sends SIGKILL to ``child`` and its group, and removes its shared memory.

    Python's resource tracker is spared: it ends by itself when the others are gone, and cleans up.
    """
    left: set[str] = set()
    ends_s = time.monotonic() + 20
    while group := _group(child):
        for folder, command in group.items():
            try:
                left.update(SHARED_MEMORY.findall((folder / "maps").read_text()))
                if "resource_tracker" not in command or time.monotonic() > ends_s:
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue  # ended meanwhile
        time.sleep(0.02)
    child.wait()
    for path in left:
        Path(path).unlink(missing_ok=True)


def _group(child: subprocess.Popen[Any]) -> dict[Path, str]:
    """The living processes of the group that ``child`` leads, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == child.pid and state != "Z":
                found[folder] = (folder / "cmdline").read_text()
        except OSError:
            continue  # no process, or ended meanwhile
    return found


@contextmanager
def running_engine(folder: Path, settings: dict[str, Any], *, processes: bool = False) -> Iterator[Engine]:
    """An engine that takes requests, killed at the end."""
    engine = Engine(folder, settings, processes=processes)
    try:
        yield engine.wait_ready()
    finally:
        engine.kill()


@contextmanager
def running_program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of our own commands, stopped at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'gc'}"},
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        assert child.stdout is not None
        child.stdout.close()


@contextmanager
def running_worker(root: Path, etcd: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts ``kvstore worker``; its address and its process."""
    with running_program(
        "kvstore.cli.main", "worker", "--root", str(root), "--etcd", etcd, "--listen", "127.0.0.1:0", *options
    ) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("ready "), line
        yield dict(field.split("=", 1) for field in line.split()[1:])["grpc"], child


class Server:
    """vLLM's OpenAI server. It is started at once, so that several can start together."""

    def __init__(
        self, workplace: Path, model: Path, *options: str, config: dict[str, object] | None = None, port: int = 0
    ) -> None:
        port = port or 20_000 + os.getpid() % 20_000
        words = ["--model", str(model), "--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager"]
        words += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024"]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        if config is not None:
            words += ["--kv-transfer-config", json.dumps(config)]
        self.url = f"http://127.0.0.1:{port}"
        self._log = workplace / f"server-{port}.log"
        with open(self._log, "wb") as log:
            self._child = subprocess.Popen(
                [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *words, *options],
                stdout=log,
                stderr=log,
                cwd=workplace,
                env=engine_environment(workplace),
                start_new_session=True,
            )

    def wait_ready(self) -> Server:
        """Returns when it answers."""
        ends_s = time.monotonic() + START_S
        while True:
            assert self._child.poll() is None and time.monotonic() < ends_s, self._log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)

    def processes(self) -> list[int]:
        """The server and its children."""
        return [int(folder.name) for folder in _group(self._child)]

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        kill_group(self._child)


@contextmanager
def running_server(
    workplace: Path, model: Path, *options: str, config: dict[str, object] | None = None, port: int = 0
) -> Iterator[str]:
    """vLLM's OpenAI server; its URL, once it answers."""
    server = Server(workplace, model, *options, config=config, port=port)
    try:
        yield server.wait_ready().url
    finally:
        server.kill()


def counters(url: str) -> dict[str, float]:
    """Counters of ``/metrics`` by name, summed over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.partition("{")[0].partition(" ")[0], line.rsplit(" ", 1)[1]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def stored_files(root: Path) -> set[Path]:
    """The published blocks of a root."""
    return {path for path in (root / "chunks").rglob("*") if path.is_file()}


def wait_stored(root: Path, count: int) -> set[Path]:
    """The published blocks, once there are ``count``: engines store behind the request."""
    eventually(lambda: len(stored_files(root)) >= count, f"{count} blocks are stored")
    return stored_files(root)


def fsck(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ``kvstore fsck``, which exits with 0 if it finds nothing wrong."""
    return ended(sys.executable, "-m", "kvstore.cli.main", "fsck", str(root), *options, timeout=120, cwd=REPOSITORY)


def collect(root: Path, *options: str) -> None:
    """Runs one round of ``kvstore-gc`` beside the processes of this host."""
    words = ("tests.kit.collecting", "--root", str(root), "--once", *options)
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'gc'}"}
    done = ended(sys.executable, "-m", *words, timeout=ANSWER_S, cwd=REPOSITORY, env={**os.environ, **path})
    assert done.returncode == 0, done.stdout + done.stderr


def check_clean(root: Path) -> None:
    """``kvstore fsck`` finds nothing wrong."""
    done = fsck(root)
    assert done.returncode == 0, done.stdout + done.stderr


def mend(root: Path) -> None:
    """Quarantines chunks that a test damaged and no engine met, and deletes the quarantine."""
    assert fsck(root, "--repair").returncode == 1
    for path in (root / "quarantine").iterdir():
        path.unlink()
    check_clean(root)
