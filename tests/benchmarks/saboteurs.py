"""Contenders with one defect each, for the child process: each is the plain-file contender except for one thing."""

from __future__ import annotations

import os
import subprocess
import time

from benchmarks.competitors.own import Files

STARTED = "started"
"""The file in which ``Leaver`` notes whom it started."""


class OneBit(Files):
    def get(self, turn: int) -> None:
        super().get(turn)
        self.memory.target[-1] ^= 1


class ReadsNothing(Files):
    def get(self, turn: int) -> None:
        pass


class KeepsTheFirst(Files):
    def clear(self) -> None:
        pass

    def put(self, turn: int) -> None:
        if not any(self.folder.iterdir()):
            super().put(turn)


class Raises(Files):
    def get(self, turn: int) -> None:
        raise RuntimeError("out of luck")


class Asserts(Files):
    def get(self, turn: int) -> None:
        assert turn < 0


class Dies(Files):
    def get(self, turn: int) -> None:
        os.write(2, b"these are its last words\n")
        os._exit(7)


class Hangs(Files):
    def get(self, turn: int) -> None:
        time.sleep(1000)


class Leaver(Files):
    """Starts a program and ends without ending it."""

    def put(self, turn: int) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (self.folder.parents[1] / STARTED).write_text(str(child.pid))
        os._exit(1)
