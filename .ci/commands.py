"""Writes docs/commands.md from the commands themselves:  .venv/bin/python .ci/commands.py

A test fails when the page is not what this writes.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from kvstore.cli.app import app
from kvstore_gc.cli import command as collector

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEAD = """# Commands

`.ci/commands.py` generates this page from the commands; do not edit it.
`kvstore COMMAND --help` prints the same text.
Every command that prints results has `--json`.
Exit codes: 0 success, 1 a check failed, 2 usage error or could not run, 130 interrupted by Ctrl-C.

## Which store

`KVSTORE_ROOT`, `KVSTORE_CONNECT` and `KVSTORE_ETCD` are the defaults of `--root`, `--connect` and `--etcd`.
An option overrides the variables: with `--connect`, `KVSTORE_ROOT` is not read, and vice versa.
`KVSTORE_ETCD` applies in addition to `--root`; `--etcd ""` turns it off.
If both variables are set and no option is given, `KVSTORE_CONNECT` is used.

## Shell completion

Put one of these lines in your shell's startup file:

```text
~/.bashrc                    eval "$(_KVSTORE_COMPLETE=bash_source kvstore)"
~/.zshrc                     eval "$(_KVSTORE_COMPLETE=zsh_source kvstore)"
~/.config/fish/config.fish   _KVSTORE_COMPLETE=fish_source kvstore | source
```

For `kvstore-gc`, use `_KVSTORE_GC_COMPLETE`.

## All commands

| command | what it does |
|---|---|
"""
COMMON = """
## Common options

These options mean the same in each command that has them.
Each command below lists its own options first, then the names of the common ones.

| option | |
|---|---|
"""
COMMON_MIN = 3
"""Commands that must have an option in the same words."""


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


def rows_of(context: click.Context) -> dict[str, str]:
    """The options of one command as rows of a table, by name."""
    found = {}
    for option in context.command.params:
        record = option.get_help_record(context)
        if record and record[1]:
            names = record[0].replace("|", "/")
            found[re.sub(r" .*", "", names)] = f"| `{names}` | {cell(record[1])} |\n"
    return found


def common_rows(found: list[click.Context]) -> dict[str, str]:
    """Options that mean the same in several commands: they are shown once."""
    counts = Counter(row for context in found for row in rows_of(context).items())
    return {name: row for (name, row), count in counts.items() if count >= COMMON_MIN}


def section(context: click.Context, common: dict[str, str]) -> str:
    """The heading, help and options of one command."""
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    rows = rows_of(context)
    shared = [name for name, row in rows.items() if common.get(name) == row]
    table = "".join(row for name, row in rows.items() if name not in shared)
    options = f"\n| option | |\n|---|---|\n{table}" if table else ""
    if shared:
        options += f"\n[Common options](#common-options): {', '.join(f'`{name}`' for name in shared)}.\n"
    return f"\n## {context.command_path}\n\n`{usage}`\n\n{description(context.command)}\n{options}"


def page() -> str:
    """The whole page."""
    found = [*commands("kvstore", app), *commands("kvstore-gc", collector)]
    common = common_rows(found)
    table = "".join(
        f"| [`{each.command_path}`](#{each.command_path.replace(' ', '-')}) "
        f"| {cell(each.command.get_short_help_str(limit=300))} |\n"
        for each in found
    )
    return HEAD + table + COMMON + "".join(common.values()) + "".join(section(each, common) for each in found)


if __name__ == "__main__":
    PAGE.write_text(page())
