"""The group of all commands. A command's file is imported when the command is used, or for the list of all."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import traceback
from typing import Any, NoReturn

import click

from kvstore import __version__
from kvstore.cli.signals import INTERRUPTED
from kvstore.errors import KVStoreError
from kvstore.text import shown

# The base of all commands: errors as one line on standard error, exit codes, ``--debug``.


CHECK_FAILED = 1
COULD_NOT_RUN = 2
ELSEWHERE = {"gc": ": the collector is the program kvstore-gc"}
"""Where to find what is no command."""
ALIKE_MAX = 3
_EXTRA = re.compile(r"Got unexpected extra arguments? \((\S+)[ )]")


class Command(click.Command):
    """A command whose errors are one clear line and exit code 2. Adds ``--debug``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show where an error came from.")
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Looked at before parsing, because the option has no value of its own in the commands' functions.
        ctx.meta["kvstore.debug"] = "--debug" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _wrong_use(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            fail(ctx, str(error))
        except (KeyboardInterrupt, click.Abort):
            click.echo("Aborted!", err=True)  # as click does, which would exit with 1
            ctx.exit(INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, BrokenPipeError):
            raise  # click's own
        except OSError as error:
            fail(ctx, str(error))
        except Exception as error:  # noqa: BLE001 - the rim: a bug of ours must not look like a failed check
            fail(ctx, f"internal error, please report it: {type(error).__name__}: {error} (--debug shows where)")


class Group(click.Group):
    """Commands below one name. A mistyped one is one clear line, with those that are alike."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_bare = not args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if is_bare:
                raise  # click's own, which shows the help
            _wrong_use(ctx, error)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names:
            alike = " or ".join(map(repr, difflib.get_close_matches(args[0], names, ALIKE_MAX)))
            meant = f": did you mean {alike}?" if alike else ELSEWHERE.get(args[0], "")
            fail(ctx, f"there is no command {args[0]!r}{meant} ({ctx.command_path} --help lists all)")
        return super().resolve_command(ctx, args)


def _wrong_use(ctx: click.Context, error: click.UsageError) -> NoReturn:
    meant = _meant(ctx, error)
    message = (error.message if meant else error.format_message()).rstrip(".")
    fail(ctx, f"{message[:1].lower()}{message[1:]}{meant} ({ctx.command_path} --help shows all options)")


def _meant(ctx: click.Context, error: click.UsageError) -> str:
    """Returns what was probably meant, where an option was given as an argument, or the other way round."""
    names = {name for parameter in ctx.command.params for name in parameter.opts}
    if isinstance(error, click.NoSuchOption) and (name := error.option_name.lstrip("-")) in names:
        return f": did you mean {ctx.command_path} {name.upper()}?"
    extra = _EXTRA.match(error.message)
    if extra is None:
        return ""
    if extra[1].isdecimal() and any(parameter.metavar == "[TOKENS]" for parameter in ctx.command.params):
        return ": are these tokens? Write commas between them"
    if (option := f"--{extra[1]}") in names:
        return f": did you mean {option}?"
    return f": did you mean --root {extra[1]}?" if "--root" in names and "/" in extra[1] else ""


def check_failed() -> NoReturn:
    """Ends the command with exit code 1."""
    click.get_current_context().exit(CHECK_FAILED)


def fail(ctx: click.Context, message: str, exit_code: int = COULD_NOT_RUN) -> NoReturn:
    """Prints why on one line of standard error, and ends the command."""
    if ctx.meta.get("kvstore.debug") and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"{ctx.command_path}: {shown(' '.join(message.split()))}", file=sys.stderr)
    ctx.exit(exit_code)


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
