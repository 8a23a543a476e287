"""The outcome of one probe of a root: what was tried, whether it held, and what follows if it did not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing tried. ``ok`` is None if it is only information, or could not be tried (the detail says why).

    ``consequence`` says what it means for the store; empty if all is well.
    """

    name: str
    ok: bool | None
    detail: str
    consequence: str = ""
