"""Tables that show text chosen by others."""

from __future__ import annotations

import pytest

from kvstore.cli.output import print_table
from kvstore.core.validate import shown


def test_a_table_shows_control_characters_and_no_terminal_obeys_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("label",), [("canary\x1b[2J\x1b]0;title\x07\x9b1m\ud800",)])
    said = capsys.readouterr().out
    assert r"canary\x1b[2J\x1b]0;title\x07\x9b1m\ud800" in said and "\x1b" not in said
    assert shown("Zoë, 模型") == "Zoë, 模型" and shown("two\nlines\r") == r"two\nlines\r"
