"""JSON of others: what ``json.loads`` says of it, and never deep in the stack."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.validate import DEPTH_MAX, parse_json

HOSTILE = {
    "lists": b"[" * 9999,
    "objects": b'{"":' * 9999,
    "behind a string with brackets that close": b'["' + b"]" * 9999 + b'",' + b"[" * 9999,
    "behind an escaped quote": b'["\\"",' + b"[" * 9999,
    "behind an escaped backslash": b'["\\\\",' + b"[" * 9999,
    "as text in UTF-16": ("[" * 9999).encode("utf-16"),
    "as text in UTF-16, behind a letter whose bytes are quotes": ("[\u2222" + "[" * 9999).encode("utf-16-le"),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[]{}"\\a', max_size=4), inner),
)


@given(VALUES, st.booleans())
def test_what_is_not_deep_is_what_json_says(value: Any, is_text: bool) -> None:
    text = json.dumps(value, ensure_ascii=False)
    content = text if is_text else text.encode(errors="surrogatepass")
    try:
        found = parse_json(content)
    except UnicodeDecodeError:
        assert any("\ud800" <= each <= "\udfff" for each in text)
    else:
        assert found == json.loads(text)


def test_the_deepest_that_is_read() -> None:
    def run_case(is_object: bool) -> None:
        def nested(depth: int) -> str:
            return '{"":' * (depth - 1) + "{}" + "}" * (depth - 1) if is_object else "[" * depth + "]" * depth

        assert parse_json(nested(DEPTH_MAX)) is not None
        with pytest.raises(ValueError, match="deeper than 100 levels"):
            parse_json(nested(DEPTH_MAX + 1))

    for is_object in (False, True):
        run_case(is_object)


def test_what_is_nested_deep_takes_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that runs in the middle of it would fail otherwise: its frames have no room."""
    for content in HOSTILE.values():
        depth, frame = 0, sys._getframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + DEPTH_MAX + 50)
        try:
            with pytest.raises(ValueError, match=r"deeper|decode"):
                parse_json(content)
        finally:
            sys.setrecursionlimit(before)
