"""Runs one test over many cases, which share its fixtures and count as one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("tmp_path", "tmp_root")


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls the test for each case in turn, up to the first that fails, whose values the failure shows.

    Use it where cases are cheap and disturb each other in nothing: ``parametrize`` sets up all fixtures anew for each.
    Here a case gets a ``tmp_path``, a ``tmp_root`` and a ``monkeypatch`` of its own, and shares all other fixtures.
    """
    called = [name.strip() for name in names.split(",")]
    listed = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            __tracebackhide__ = True
            assert listed, "a test of no cases"
            for number, case in enumerate(listed):
                values = dict(zip(called, [case] if len(called) == 1 else case, strict=True))
                with pytest.MonkeyPatch.context() as patched:
                    try:
                        test(**_own(fixtures, number, patched), **values)
                    except BaseException as error:
                        error.add_note(f"case {number}: {values!r}")
                        raise

        signature = inspect.signature(test)
        rest = [each for name, each in signature.parameters.items() if name not in called]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate


def _own(fixtures: dict[str, Any], number: int, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fixtures, with those that a case must not share with the one before."""
    own = {**fixtures, "monkeypatch": patched} if "monkeypatch" in fixtures else dict(fixtures)
    for name in FOLDERS:
        if name in own:
            folder: Path = own[name] / f"case-{number}"
            folder.mkdir()
            own[name] = folder
    return own
