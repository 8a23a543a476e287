"""Options that all benchmarks share, and the folder they work in."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import GIB, MIB, SHM

SHM_FREE_MIN_BYTES = 6 * GIB


@dataclass(frozen=True)
class Options:
    """The shared options. ``directory`` is for runs in the page cache, ``disk`` for those that must reach a device."""

    directory: Path
    disk: Path
    rounds: int
    quick: bool

    @contextmanager
    def folder(self, *, on_disk: bool = False) -> Iterator[Path]:
        """A new folder, deleted afterwards."""
        place = self.disk if on_disk else self.directory
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=place, ignore_cleanup_errors=True) as path:
            yield Path(path)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the shared options to a parser."""
    parser.add_argument(
        "--directory",
        type=Path,
        default=default_directory(),
        help="where warm figures are taken (default: %(default)s)",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where cold and fsync figures are taken (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="counted rounds of each figure (default: 5; with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases: some minutes for everything")


def options_of(arguments: argparse.Namespace) -> Options:
    """The shared options as given. Raises ValueError if they are invalid."""
    rounds = arguments.rounds if arguments.rounds is not None else 3 if arguments.quick else 5
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: expected 1 or more")
    for folder in (arguments.directory, arguments.disk):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: name one that exists")
    return Options(arguments.directory, arguments.disk, rounds, arguments.quick)


def default_directory() -> Path:
    """Returns a file system in memory if there is one with space, else the folder of temporary files."""
    if SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= SHM_FREE_MIN_BYTES:
        return SHM
    return Path(tempfile.gettempdir())


def show_progress(line: str) -> None:
    """Shows on a terminal how far a benchmark is."""
    if sys.stderr.isatty():
        print(f"... {line}", file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    """Whole numbers from 0, with commas, for ``type=``."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 0")
    return found


def counts(text: str) -> list[int]:
    """Whole numbers from 1, with commas."""
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1")
    return found


def sizes_mib(text: str) -> list[int]:
    """Sizes in MiB, fractions too, with commas; as bytes."""
    found = [int(float(part) * MIB) for part in text.split(",")]
    if min(found) < 1024:
        raise argparse.ArgumentTypeError(f"{text}: expected MiB, 1 KiB or more")
    return found


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names out of a list, with commas."""
    all_known = list(known)

    def names(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",")]
        for name in found:
            if name not in all_known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of: {', '.join(all_known)}")
        return found

    return names
