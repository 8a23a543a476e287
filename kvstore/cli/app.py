"""The group of all commands. A command's file is imported when the command is used, or for the list of all."""

from __future__ import annotations

import importlib

import click

from kvstore import __version__
from kvstore.cli.command import Group

COMMANDS = {
    "up": "up",
    "worker": "worker",
    "demo": "demo",
    "replay": "replay",
    "bench": "bench",
    "plan": "plan",
    "blend-check": "blend_check",
    "stats": "stats",
    "ls": "ls",
    "match": "prefix",
    "pin": "prefix",
    "unpin": "prefix",
    "prefetch": "prefix",
    "clear": "chunks",
    "lookup": "lookup",
    "health": "steering",
    "drain": "steering",
    "limits": "steering",
    "ops": "ops",
    "fsck": "fsck",
    "check-root": "check_root",
    "token": "token",
    "dashboard": "dashboard",
    "events": "events",
}
"""Each command and the module here that has it, in the order of the help."""


class Commands(Group):
    """Finds commands by name, without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        found: click.Command = getattr(importlib.import_module(f"kvstore.cli.{module}"), cmd_name.replace("-", "_"))
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "--version", "-v", prog_name="kvstore")
def app() -> None:
    """A distributed store for the KV caches of LLM inference.

    Start with `kvstore demo`; serve a host with `kvstore up --root FOLDER`.

    Exit codes: 0 done, 1 the check failed, 2 wrong use or could not run, 130 Ctrl-C. Secrets are read from files or the
    environment, never from arguments.
    """
