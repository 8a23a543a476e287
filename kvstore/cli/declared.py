"""Options declared once: a dataclass whose fields are options of a command.

``takes`` adds the options to a command, which gets them as one value. ``arguments`` turns such a value back into a
command line, for a child that is to have the same options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import field, fields
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])
Declare = Callable[[Any], Any]
PLACES = {"FILE": "file", "FOLDER": "dir", "ROOT": "dir", "URL": "dir"}
"""The kind of names that the shell completes, by the metavar of an option or argument."""


def option(name: str, **attributes: Any) -> Any:
    """A field that is the option ``name``; ``attributes`` are those of ``click.option``."""
    return _field(name, click.option, attributes)


def flag(name: str, **attributes: Any) -> Any:
    """A field that is a flag, false by default."""
    return option(name, is_flag=True, default=False, **attributes)


def argument(**attributes: Any) -> Any:
    """A field that is an argument, named after the field; ``attributes`` are those of ``click.argument``."""
    return _field("", click.argument, attributes)


def completes(place: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Has the shell complete an option or argument with names of files ("file") or folders ("dir")."""
    return lambda context, parameter, begun: [CompletionItem(begun, type=place)]


def group(kind: type, default: Any = None) -> Any:
    """A field that holds further options, a dataclass ``kind``.

    ``kind.of_options``, if it exists, makes the value from the options; it may return None.
    """
    return field(default=default, metadata={"group": kind})


def takes(name: str, kind: type) -> Callable[[F], F]:
    """Adds the options of the dataclass ``kind`` to a command; it gets them as the parameter ``name``."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            made = _made(kind, name, values)
            return command(*args, **{name: made}, **values)

        for declare in reversed(list(_declarations(kind, name))):
            wrapped = declare(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def arguments(value: Any) -> list[str]:
    """The command line that gives another program the options in ``value``; those that were not given are left out."""
    if value is None:
        return []
    found: list[str] = []
    for each in fields(value):
        said = getattr(value, each.name)
        if "group" in each.metadata:
            found += arguments(said)
        elif isinstance(said, bool):
            on, _, off = each.metadata["name"].partition("/")
            found += [on] if said else [off] if off else []
        elif said not in (None, ""):
            found += [each.metadata["name"], ":".join(map(str, said)) if isinstance(said, tuple) else str(said)]
    return found


def _field(name: str, kind: Callable[..., Declare], attributes: dict[str, Any]) -> Any:
    place = PLACES.get(str(attributes.get("metavar")).strip("[]"))
    if place is not None:
        attributes["shell_complete"] = completes(place)
    return field(
        default=attributes.get("default"), metadata={"name": name, "declare": functools.partial(kind, **attributes)}
    )


def _declarations(kind: type, prefix: str) -> Iterator[Declare]:
    for each in fields(kind):
        parameter = f"{prefix}_{each.name}"
        if "group" in each.metadata:
            yield from _declarations(each.metadata["group"], parameter)
        elif name := each.metadata["name"]:
            yield each.metadata["declare"](parameter, name)
        else:
            yield each.metadata["declare"](parameter)


def _made(kind: type, prefix: str, values: dict[str, Any]) -> Any:
    """Takes the values of ``kind``'s options out of ``values``."""
    own = {}
    for each in fields(kind):
        parameter = f"{prefix}_{each.name}"
        inner = each.metadata.get("group")
        own[each.name] = values.pop(parameter) if inner is None else _made(inner, parameter, values)
    return getattr(kind, "of_options", kind)(**own)
