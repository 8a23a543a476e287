"""``kvstore bench``: runs the benchmarks that come with the source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

import kvstore
from kvstore.cli.app import Command
from kvstore.errors import Unavailable

SOURCE = Path(kvstore.__file__).resolve().parents[1]


@click.command(
    cls=Command,
    add_help_option=False,
    short_help="Measure the store beside fio, memory copies and other stores.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Run one benchmark, or all that make the results page; `kvstore bench list` lists them.

    The benchmarks are part of the source, not of an installed package: run it from a checkout, as `make bench` does, or
    as .venv/bin/kvstore after `make setup`.

    \b
    Examples:
      kvstore bench --quick
      kvstore bench throughput --workers 1,8,32 --chunk-mib 2,32 --cache cold
      kvstore bench throughput --help
    """
    if not (SOURCE / "benchmarks" / "__main__.py").is_file():
        if "--help" in arguments or "-h" in arguments:
            click.echo(click.get_current_context().get_help())
            return
        raise Unavailable(
            "the benchmarks are in the source, not in the installed package: run make bench in a checkout"
        )
    os.chdir(SOURCE)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *arguments])
