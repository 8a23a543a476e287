"""Writes docs/api.md, the public names and their first sentences, from the docstrings:  .venv/bin/python .ci/api.py

A test fails when the page is stale.  On the site each entry becomes the whole docstring (.ci/stage_docs.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API

`.ci/api.py` makes this page from the docstrings; do not edit it.
`help(kvstore.Cache.put)` prints parameters, errors and an example.
The names in `kvstore.aio` are the same, awaited.
"""
SECTIONS = {
    "Opening a store": "open connect ClientTls EtcdTls EtcdUser Limits ClientLimits",
    "The store": "Store Selection Operation",
    "One model's KV": "Layout Namespace Cache PutResult Cleared Hints WriteMode",
    "Holds and pins": "Hold Pin PinRecord",
    "Engine-hashed blocks": "BlockCache StoredBlocks BlockHold Descent",
    "Segments": "Segments Held",
    "Plans of offline batches": "Plan Run Group",
    "asyncio": "aio.Store aio.Cache aio.Plan aio.Run aio.Hold",
    "Request ids and spans": "core.tracing.request core.tracing.enable",
    "Errors": "errors",
}


def summary(thing: object) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0]
    sentence = re.match(r".+?\.(?=\s|$)|.+", " ".join(paragraph.split()))
    return sentence[0].replace("|", "\\|").replace("``", "`").replace("*", "\\*") if sentence else ""


def members(thing: object) -> Iterator[tuple[str, object]]:
    """The public methods and properties of a class, or classes of a module, in the order of the source."""
    bases = [
        each for each in getattr(thing, "__mro__", [thing]) if each is thing or each.__module__.startswith("kvstore.")
    ]
    for name, member in {name: member for base in reversed(bases) for name, member in vars(base).items()}.items():
        if name.startswith("_") or isinstance(member, str | int | float | bytes | dict | tuple):
            continue
        if inspect.ismodule(thing):
            if inspect.isclass(member) and member.__module__ == thing.__name__:
                yield name, member
        elif inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod):
            yield name, getattr(thing, name)


def rows(name: str) -> str:
    """The summary of a public name, and a table of its methods."""
    path = f"kvstore.{name}"
    module, _, attribute = path.rpartition(".")
    try:
        thing: object = importlib.import_module(path)
    except ImportError:
        thing = getattr(importlib.import_module(module), attribute)
    found = [] if name.startswith("aio.") or not (inspect.isclass(thing) or inspect.ismodule(thing)) else members(thing)
    table = "".join(f"| `{each}` | {summary(member)} |\n" for each, member in found if summary(member))
    return f"\n### {path}\n\n{summary(thing)}\n" + (f"\n| | |\n|---|---|\n{table}" if table else "")


def page() -> str:
    """The whole page."""
    text = "".join(
        f"\n## {title}\n" + "".join(rows(name) for name in names.split()) for title, names in SECTIONS.items()
    )
    return HEAD + text


if __name__ == "__main__":
    PAGE.write_text(page())
