"""The contender's end of the pipe: ``python -m benchmarks.competitors.child PIPE MEMORY`` (two descriptors).

Messages are JSON, one a line.  The first opens: ``{"do": "open", "place", "workload", "folder", "threads"}``; then
``prepare``, ``put``, a way to read, ``clear``, each with its turn; the end of the pipe closes.  Each answer is
``{"taken_s": seconds, "cpu_s": processor seconds}`` or ``{"failed": reason}``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.competitors.contender import Contender, Memory, Workload, make


def main() -> int:
    """Serves until the pipe ends."""
    contender: Contender | None = None
    with socket.socket(fileno=int(sys.argv[1])) as pipe, pipe.makefile("rw") as lines:
        try:
            for line in lines:
                asked: dict[str, Any] = json.loads(line)
                answer: dict[str, Any]
                try:
                    if contender is None:
                        contender = _opened(asked)
                        answer = {"reads": contender.reads}
                    else:
                        taken_s, cpu_s = _done(contender, asked["do"], asked["turn"])
                        answer = {"taken_s": taken_s, "cpu_s": cpu_s}
                except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
                    answer = {"failed": _reason(error)}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
        finally:
            if contender is not None:
                contender.close()
    return 0


def _reason(error: Exception) -> str:
    """The message of an exception, or its origin if it has none."""
    if str(error):
        return f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def _opened(asked: dict[str, Any]) -> Contender:
    workload = Workload(**asked["workload"])
    memory = Memory(int(sys.argv[2]), workload.size_bytes)
    return make(asked["place"], workload, memory, Path(asked["folder"]), asked["threads"])


def _done(contender: Contender, what: str, turn: int) -> tuple[float, float]:
    """Returns seconds on the clock and of processors that it took, before uncopied results are copied."""
    if what == "clear":
        contender.clear()
        return 0.0, 0.0
    if what == "prepare":
        contender.prepare(turn)
        return 0.0, 0.0
    if what != "put" and what not in contender.reads:
        raise ValueError(f"{what!r} is none of put, {', '.join(contender.reads)}, prepare, clear")
    work = getattr(contender, what)
    cpu_s, began_s = _cpu_s(contender), time.perf_counter()
    work(turn)
    taken_s = time.perf_counter() - began_s
    cpu_s = _cpu_s(contender) - cpu_s
    if what != "put":
        contender.deliver()
    return taken_s, cpu_s


def _cpu_s(contender: Contender) -> float:
    """Processor seconds so far, of all threads here and in its servers."""
    # The clock of another process, as clock_getcpuclockid(3) makes its id on Linux.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in contender.servers)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a peer that do not end must not keep us
