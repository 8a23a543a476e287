"""Writes docs/commands.md from the commands themselves:  .venv/bin/python .ci/commands.py

A test fails when the page is not what this writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from kvstore.cli.app import app
from kvstore_gc.cli import command as collector

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEAD = """# Commands

Made from the commands by `make docs`; do not edit. `kvstore COMMAND --help` prints the same. Every command that prints
results has `--json`. Exit codes: 0 done, 1 the check failed, 2 wrong use or could not run, 130 Ctrl-C.

## Which store

`KVSTORE_ROOT`, `KVSTORE_CONNECT` and `KVSTORE_ETCD` stand for `--root`, `--connect` and `--etcd`, in commands that
have them. An option wins over the variables: with `--connect`, `KVSTORE_ROOT` is not read, and so on. Only
`KVSTORE_ETCD` still counts beside `--root`, and `--etcd ""` turns that off. Without options, `KVSTORE_CONNECT` wins
over `KVSTORE_ROOT`.

## Completion in a shell

Put one of these lines into the shell's start file:

```text
~/.bashrc                    eval "$(_KVSTORE_COMPLETE=bash_source kvstore)"
~/.zshrc                     eval "$(_KVSTORE_COMPLETE=zsh_source kvstore)"
~/.config/fish/config.fish   _KVSTORE_COMPLETE=fish_source kvstore | source
```

`kvstore-gc` has `_KVSTORE_GC_COMPLETE`.

## All commands

| command | what it does |
|---|---|
"""


def commands(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """All commands of a program, each as the context in which click would show its help; groups are left out."""
    context = click.Context(command, info_name=name, parent=parent)
    if not isinstance(command, click.Group):
        yield context
        return
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        assert found is not None
        yield from commands(child, found, context)


def cell(text: str) -> str:
    """Text for a cell of a table: on one line, with nothing in it that Markdown or HTML would take for its own."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def description(command: click.Command) -> str:
    """The help of a command; what click leaves unwrapped becomes a block of text."""
    parts = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            parts.append("```text\n" + inspect.cleandoc(paragraph.removeprefix("\b")) + "\n```")
        else:
            parts.append(paragraph.strip().replace("<", "&lt;").replace("*", "\\*"))
    return "\n\n".join(parts)


def section(context: click.Context) -> str:
    """The heading, help and options of one command."""
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    rows = [record for option in context.command.params if (record := option.get_help_record(context)) and record[1]]
    table = "".join(f"| `{names.replace('|', '/')}` | {cell(help)} |\n" for names, help in rows)
    options = f"\n| option | |\n|---|---|\n{table}" if table else ""
    return f"\n## {context.command_path}\n\n`{usage}`\n\n{description(context.command)}\n{options}"


def page() -> str:
    """The whole page."""
    found = [*commands("kvstore", app), *commands("kvstore-gc", collector)]
    table = "".join(
        f"| [`{each.command_path}`](#{each.command_path.replace(' ', '-')}) "
        f"| {cell(each.command.get_short_help_str(limit=300))} |\n"
        for each in found
    )
    return HEAD + table + "".join(section(each) for each in found)


if __name__ == "__main__":
    PAGE.write_text(page())
