"""Attacks on the metadata file of one host: it is removed, damaged, or replaced by an older copy, and then mended."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from kvstore.format.places import METADATA
from tests.chaos.cast import Part
from tests.chaos.saboteur import Saboteur
from tests.kit.patience import eventually

MEND_S = (0.5, 8.0)
"""The time until somebody mends it."""
PAGE_BYTES = 4096
ADOPTED = (0, 1)
"""Exit codes of the operator: 1 is about chunks that changed while they were checked."""


class FileSaboteur(Saboteur):
    """``pauses_s`` has the mean time between two attacks on the file under the name "file"."""

    _operator: Part | None = None
    _copy: Path | None = None

    @property
    def _path(self) -> Path:
        return self._cast.roots[0] / METADATA

    def _attack_file(self) -> None:
        attacks = (self._remove, self._damage, self._remove_log, self._remove_memory, self._put_older)
        attack = self._chance.choice(attacks)
        try:
            attack()
        except FileNotFoundError:
            pass  # nobody has made it again yet
        self._note(f"file {attack.__name__.strip('_')}")
        self._then("file", self._between(*MEND_S), self._mend)

    def _remove(self) -> None:
        for path in self._cast.roots[0].glob(f"{METADATA}*"):
            path.unlink(missing_ok=True)

    def _remove_log(self) -> None:
        os.unlink(f"{self._path}-wal")

    def _remove_memory(self) -> None:
        os.unlink(f"{self._path}-shm")

    def _damage(self) -> None:
        """Loses pages in the middle of writes."""
        for path in (self._path, Path(f"{self._path}-wal")):
            with path.open("r+b") as file:
                for at in range(0, path.stat().st_size, PAGE_BYTES):
                    if self._chance.random() < 0.5:
                        file.seek(at)
                        file.write(self._chance.randbytes(PAGE_BYTES))

    def _put_older(self) -> None:
        """Puts a copy of before in its place, as a backup of the folder would; makes one if there is none."""
        copy, self._copy = self._copy, self._cast.folder / "older"
        if copy is None:
            shutil.copyfile(self._path, self._copy)
            return
        self._remove()
        shutil.copyfile(copy, self._path)

    def _mend(self) -> None:
        """Starts ``kvstore fsck --adopt``, unless it runs."""
        if self._operator is None:
            self._operator = self._cast.operator()
        self._operator.start()

    def _heal_metadata(self) -> None:
        """Until it says that it is done."""
        for _ in range(10):
            self._mend()
            eventually(lambda: not self._operator_runs, "the operator ends")
            if self._operator is not None and self._operator.codes[-1] in ADOPTED:
                return
            time.sleep(1.0)
        raise AssertionError(f"the operator never ended well: {self._cast.tail('operator')}")

    @property
    def _operator_runs(self) -> bool:
        return self._operator is not None and self._operator.is_running
