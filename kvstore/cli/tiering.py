"""The options that say what a worker has above its root: ``--memory``, ``--disk``, ``--write`` and what goes along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.cli.kinds import DURATION, SIZE, Size
from kvstore.node.settings import TierSettings
from kvstore.writes import WriteMode

F = TypeVar("F", bound=Callable[..., Any])


class FolderSize(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """``FOLDER:SIZE``, such as ``/nvme/kv:200GiB``."""

    name = "folder:size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        folder, colon, size = str(value).rpartition(":")
        if not colon or not folder:
            self.fail(f"{value!r} is no local disk: write FOLDER:SIZE, such as /nvme/kv:200GiB", param, ctx)
        return folder, Size().convert(size, param, ctx)


def tier_options(command: F) -> F:
    """Gives ``tiers``, a TierSettings."""

    @click.option(
        "--memory",
        type=SIZE,
        default=0,
        metavar="SIZE",
        help="Shared memory of each worker for hot chunks, such as 8GiB; engines on this host map it. By default none.",
    )
    @click.option(
        "--disk",
        type=FolderSize(),
        metavar="FOLDER:SIZE",
        help="A local disk below the memory, such as /nvme/kv:200GiB: what memory drops and was used more than once. "
        "The folder is one worker's alone; kvstore up makes one in it, of that size, for each of its workers.",
    )
    @click.option(
        "--write",
        type=click.Choice([mode.value for mode in WriteMode]),
        default=WriteMode.BEHIND.value,
        show_default=True,
        help="With --memory, when a put is acknowledged: behind, when memory has it (a killed worker loses what is not "
        "on the root yet); through and around, when the root has it. --durability fsync never waits for less.",
    )
    @click.option(
        "--root-priority-min",
        type=click.IntRange(0, 100),
        default=0,
        show_default=True,
        help="With --memory: chunks put with a lower priority stay in memory and on the local disk.",
    )
    @click.option(
        "--sync-interval",
        type=DURATION,
        default="1s",
        show_default=True,
        help="How often at most a worker tells the others what its memory holds.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        memory: int,
        disk: tuple[str, int] | None,
        write: str,
        root_priority_min: int,
        sync_interval: float,
        **kwargs: Any,
    ) -> Any:
        tiers = TierSettings.of(memory, disk, write, root_priority_min, sync_interval)
        return command(*args, tiers=tiers, **kwargs)

    return wrapped  # type: ignore[return-value]


def tier_arguments(tiers: TierSettings, number: int) -> list[str]:
    """The same for worker ``number`` of this host, which has a folder of its own on the local disk."""
    if not tiers.memory_bytes:
        return []
    arguments = ["--memory", str(tiers.memory_bytes), "--write", tiers.write.value]
    arguments += ["--root-priority-min", str(tiers.root_priority_min), "--sync-interval", f"{tiers.sync_interval_s}s"]
    if tiers.disk_folder:
        arguments += ["--disk", f"{Path(tiers.disk_folder, f'worker-{number}')}:{tiers.disk_bytes}"]
    return arguments
