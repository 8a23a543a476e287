"""Text of others on a terminal: names, tenants, labels and messages may have any characters."""

from __future__ import annotations


def shown(text: str) -> str:
    """Returns text with its control characters made visible, those that begin a line too."""
    return text if text.isprintable() else "".join(_visible(each) for each in text)


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
