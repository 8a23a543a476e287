"""Options that say what a worker has above its root: ``--memory``, ``--disk``, ``--write`` and what goes along."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvstore.brief import size
from kvstore.cli.declared import option
from kvstore.cli.kinds import DURATION, SIZE, Size
from kvstore.errors import InvalidRequest
from kvstore.node.settings import MEMORY_BYTES_MIN, SYNC_S_MAX, SYNC_S_MIN, TierSettings
from kvstore.writes import WRITE_NAMES, WriteMode


class FolderSize(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """``FOLDER:SIZE``, such as ``/nvme/kv:200GiB``."""

    name = "folder:size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        folder, colon, size = str(value).rpartition(":")
        if not colon or not folder:
            self.fail(f"{value!r} is not a local disk: write FOLDER:SIZE, such as /nvme/kv:200GiB", param, ctx)
        return folder, Size().convert(size, param, ctx)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory and the local disk of a worker."""

    memory: int = option(
        "--memory",
        type=SIZE,
        default=0,
        help="Shared memory of each worker for hot chunks, such as 8GiB; engines on this host map it. By default none.",
    )
    disk: tuple[str, int] | None = option(
        "--disk",
        type=FolderSize(),
        help="Local disk tier, such as /nvme/kv:200GiB, for chunks that memory evicts after more than one use. "
        "Workers must not share the folder; kvstore up makes one in it, of that size, for each of its "
        "workers.",
    )
    write: str = option(
        "--write",
        type=click.Choice(WRITE_NAMES),
        default=WriteMode.BEHIND.value,
        show_default=True,
        help="With --memory, when a put is acknowledged: behind, once memory has it (a killed worker loses what "
        "is not on the root yet); through, once the root has it. --durability everysec "
        "and fsync always wait for the root.",
    )
    sync_interval_s: float = option(
        "--sync-interval",
        type=DURATION,
        default="1s",
        show_default=True,
        help="Shortest interval at which a worker tells its peers what its memory holds.",
    )

    def settings(self) -> TierSettings:
        """The node's settings. Raises InvalidRequest, which names the options."""
        if 0 < self.memory < MEMORY_BYTES_MIN:
            raise InvalidRequest(f"--memory {size(self.memory)}: expected 0, or at least {size(MEMORY_BYTES_MIN)}")
        if self.disk is not None and not self.memory:
            raise InvalidRequest("--disk without --memory: chunks of a local disk are read through memory; give both")
        if not SYNC_S_MIN <= self.sync_interval_s <= SYNC_S_MAX:
            raise InvalidRequest(
                f"--sync-interval is {self.sync_interval_s:g} s: expected {SYNC_S_MIN:g} s to {SYNC_S_MAX:g} s"
            )
        return TierSettings.of(self.memory, self.disk, self.write, self.sync_interval_s)

    def of_worker(self, number: int) -> Tiers:
        """Returns the tiers of one of several workers on a host, each with its own folder on the local disk."""
        if self.disk is None:
            return self
        folder, size_bytes = self.disk
        return replace(self, disk=(str(Path(folder, f"worker-{number}")), size_bytes))
