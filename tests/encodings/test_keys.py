"""The key file: what is refused, what a running node reloads, and that no secret is ever shown."""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from kvstore.codec.codec import Key, KeyFile, KeyRing
from kvstore.core.metrics import NodeCount
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each
from tests.kit.keyed import TENANT, key_file, secret, write_keys

GOOD = base64.b64encode(bytes(32)).decode()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json", "a")
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        KeyFile(path).load()


@for_each(
    "content",
    [
        b"",
        b"[]",
        b'{"tenants": []}',
        b'{"tenants": {"acme": {"keys": {}}}}',
        json.dumps({"tenants": {"acme": {"current": "b", "keys": {"a": GOOD}}}}).encode(),
        json.dumps({"tenants": {"acme": {"current": "a", "keys": {"a": GOOD[:-4]}}}}).encode(),
        json.dumps({"tenants": {"acme": {"current": "a", "keys": {"a": "not base64 at all, however long"}}}}).encode(),
        json.dumps({"tenants": {"acme": {"current": "a", "keys": {"a": 7}}}}).encode(),
        json.dumps({"tenants": {"acme": {"current": ["a"], "keys": {"a": GOOD}}}}).encode(),
        json.dumps({"tenants": {"acme": {"current": {"a": 1}, "keys": {"a": GOOD}}}}).encode(),
        # Of two tenants, or keys, of one name the last one would count: here what acme writes would be plain text.
        b'{"tenants": {"acme": {"current": "a", "keys": {"a": "%s"}}, "acme": {"current": null, "keys": {}}}}'
        % GOOD.encode(),
        b'{"tenants": {"acme": {"current": "a", "keys": {"a": "%s", "a": "%s"}}}}' % (GOOD.encode(), GOOD.encode()),
    ],
)
def test_what_is_no_key_file_is_refused_without_showing_it(content: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        KeyRing.parse(content)
    assert "not base64" not in str(caught.value) and GOOD[:-4] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_key_is_named_after_its_secret_and_never_shows_it() -> None:
    one, other = Key("a", secret("a")), Key("a", secret("b"))
    assert one.id != other.id and one.id == Key("renamed", secret("a")).id and len(one.id) == 8
    assert secret("a").hex() not in repr(one) and repr(secret("a"))[2:-1] not in repr(one)


def test_a_changed_file_is_taken_over_and_a_bad_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = key_file(tmp_path / "keys.json", "a")
    noted: Counter[NodeCount] = Counter()
    keys.noted = lambda counter: noted.update([counter])
    write_keys(tmp_path / "keys.json", "b", "a")
    current = keys.ring.current[TENANT]
    assert current is not None and current.name == "b" and len(keys.ring.by_id) == 2
    with caplog.at_level(logging.ERROR):
        (tmp_path / "keys.json").write_text("{")
        assert keys.ring.current[TENANT] == current
        (tmp_path / "keys.json").unlink()
        assert keys.ring.current[TENANT] == current
        # A slip that would have a tenant's chunks written as plain text.
        write_keys(tmp_path / "keys.json", "c", tenant="other")
        assert keys.ring.current[TENANT] == current
    assert noted == {NodeCount.KEYS_RELOADED: 1, NodeCount.KEYS_REFUSED: 3}
    assert "null" in caplog.text and secret("b").hex() not in caplog.text
    write_keys(tmp_path / "keys.json", None, "a", "b")
    assert keys.ring.current[TENANT] is None and len(keys.ring.by_id) == 2
    write_keys(tmp_path / "keys.json", "c", tenant="other")
    assert [*keys.ring.current] == ["other"], "a tenant that is not encrypted any more may go"
