"""A check that kvstore's commands understand a command line, without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

import click

from kvstore.cli.app import app
from kvstore_gc.cli import command as collector


def understood(words: Sequence[str], where: str, *, whole: bool = True) -> None:
    """Fails, naming ``where``, unless the command has these options; variables count as addresses.

    With ``whole`` false it may lack options that must be given: a sentence names those that matter.
    """
    program, *arguments = [re.sub(r"\$\{?\(?\w+[)}]?", "10.0.0.1", word) for word in words]
    command: click.Command | None = collector
    if PurePath(program).name == "kvstore":
        with click.Context(app, info_name="kvstore") as context:
            command = app.get_command(context, arguments[0])
        assert command is not None, f"{where}: no command {arguments[0]}"
        arguments = arguments[1:]
    assert command is not None
    try:
        command.make_context(command.name or program, arguments, resilient_parsing=False)
    except click.exceptions.Exit:
        pass  # --help
    except click.MissingParameter as wrong:
        assert not whole, f"{where}: {wrong.format_message()}"
    except click.UsageError as wrong:
        raise AssertionError(f"{where}: {wrong.format_message()}") from wrong
