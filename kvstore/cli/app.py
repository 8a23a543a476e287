"""The group of all commands. A command's file is imported when the command is used, or for the list of all."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any, NoReturn

import click

from kvstore import __version__
from kvstore.cli.signals import INTERRUPTED
from kvstore.core.validate import shown
from kvstore.errors import KVStoreError

CHECK_FAILED = 1
COULD_NOT_RUN = 2

COMMANDS = {
    "Serve": {"up": "up", "worker": "worker", "dashboard": "dashboard", "events": "events"},
    "Use": {
        "match": "cache",
        "pin": "cache",
        "unpin": "cache",
        "prefetch": "cache",
        "clear": "cache",
        "plan": "plan",
        "blend-check": "blend_check",
        "token": "token",
    },
    "Inspect": {
        "stats": "admin",
        "ls": "admin",
        "health": "admin",
        "ops": "admin",
        "doctor": "doctor",
    },
    "Repair": {"fsck": "roots", "check-root": "roots"},
    "Measure": {"demo": "measure", "replay": "measure", "bench": "measure"},
}
"""Each command and the module here that has it, by subject, in the order of the help."""
MODULES = {name: module for commands in COMMANDS.values() for name, module in commands.items()}


class Command(click.Command):
    """A command whose errors are one line on standard error, with exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("Aborted!", err=True)  # as click does, which would exit with 1
            ctx.exit(INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, BrokenPipeError):
            raise  # click's own
        except (KVStoreError, OSError) as error:
            fail(ctx, str(error))
        except Exception as error:  # noqa: BLE001 - the rim: a bug of ours must not look like a failed check
            traceback.print_exc()
            fail(ctx, f"internal error, please report it: {type(error).__name__}: {error}")


class Commands(click.Group):
    """Finds commands by name, without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = MODULES.get(cmd_name)
        if module is None:
            return None
        found: click.Command = getattr(importlib.import_module(f"kvstore.cli.{module}"), cmd_name.replace("-", "_"))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, MODULES))
        for subject, names in COMMANDS.items():
            with formatter.section(subject):
                rows = [(name.ljust(width), self.get_command(ctx, name)) for name in names]
                formatter.write_dl([(name, found.short_help or "") for name, found in rows if found is not None])


def check_failed() -> NoReturn:
    """Ends the command with exit code 1."""
    click.get_current_context().exit(CHECK_FAILED)


def fail(ctx: click.Context, message: str) -> NoReturn:
    """Prints why on one line of standard error, and ends the command with exit code 2."""
    print(f"{ctx.command_path}: {shown(' '.join(message.split()))}", file=sys.stderr)
    ctx.exit(COULD_NOT_RUN)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "--version", "-v", prog_name="kvstore")
def app() -> None:
    """A distributed store for the KV caches of LLM inference.

    Start with `kvstore demo`; serve a host with `kvstore up --root FOLDER`.

    Exit codes: 0 done, 1 the check failed, 2 wrong use or could not run, 130 Ctrl-C. Secrets are read from files or the
    environment, never from arguments. The collector is the program kvstore-gc.
    """
