"""Process 1 of a machine: starts programs as told on standard input, restarts those that end, and takes all with it.

It is a separate program without imports from the project, because it runs inside the namespaces. It ends when standard
input ends, whoever closed it: then the kernel kills all processes of the machine, and its mounts, network and shared
memory go with them. So nothing can be left behind, not even by a test run that was killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from dataclasses import dataclass, field
from typing import Any

TICK_S = 0.05
PRIVATE = ("/run", "/dev/shm", "/mnt")
"""Folders that every machine has for itself."""


@dataclass
class Service:
    """A program, started again ``again_s`` after its end, as systemd's Restart=always; None: not at all."""

    argv: list[str]
    log: str
    environment: dict[str, str]
    again_s: float | None
    pid: int = 0
    due_s: float = 0.0
    starts: int = 0
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.pid = os.posix_spawnp(
            self.argv[0],
            self.argv,
            {**os.environ, **self.environment},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, f"{self.log}.out", flags, 0o644),
                (os.POSIX_SPAWN_OPEN, 2, f"{self.log}.log", flags, 0o644),
            ],
            setsigdef=[signal.SIGINT, signal.SIGPIPE],
            setsid=True,
        )

    def ended(self, code: int) -> None:
        self.pid = 0
        self.codes.append(code)
        self.due_s = time.monotonic() + (self.again_s or 0.0)


class Machine:
    """All services, and the commands on them."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}

    def obey(self, command: dict[str, Any]) -> object:
        act, name = command["do"], command.get("name", "")
        if act == "start":
            service = Service(command["argv"], command["log"], command["environment"], command["again_s"])
            self._services[name] = service
            service.start()
            return service.pid
        service = self._services[name]
        if act == "signal":
            if service.pid:
                os.kill(service.pid, command["number"])
            return service.pid
        if act == "retire":
            service.again_s = None  # ended on purpose: it must stay so
            return service.pid
        assert act == "look", act
        return {"pid": service.pid, "starts": service.starts, "codes": service.codes}

    def look_after(self) -> None:
        """Records which processes ended (process 1 inherits orphans), and restarts those that are due."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            for each in self._services.values():
                if each.pid == pid:
                    each.ended(os.waitstatus_to_exitcode(status))
        for each in self._services.values():
            if not each.pid and each.again_s is not None and time.monotonic() >= each.due_s:
                each.start()


def main() -> None:
    for folder in PRIVATE:
        mounted = os.spawnvp(os.P_WAIT, "mount", ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder])
        assert mounted == 0, folder
    # Sockets of programs lie in the folder for temporary files: two machines must not meet there.
    os.environ["TMPDIR"] = "/run"
    machine = Machine()
    rest = b""
    while True:
        machine.look_after()
        if not select.select([0], [], [], TICK_S)[0]:
            continue
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            machine.look_after()
            os.write(1, json.dumps(machine.obey(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
