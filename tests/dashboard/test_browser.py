"""The dashboard in a real Chromium, against a live cluster under load: every view, and a token where one is needed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvstore
from kvstore.client.store import Store
from kvstore.security.authentication import issue, new_key
from tests.cli.conftest import Running, serving
from tests.dashboard.chromium import Page, missing, opened
from tests.dashboard.crowd import IMAGE, SCRIPT, age, busy, damage
from tests.kit.cases import for_each
from tests.kit.etcd import frozen
from tests.kit.patience import PATIENCE_S

ENTER = "\ue007"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

VIEWS = {
    "overview": ("Hit ratio", "Read by clients", "Requests per second", "Pins"),
    "capacity": ("that chunks may take", "What would go next", "past its time to live", "By namespace", "1 at work"),
    "namespaces": ("llama-3.1-8b", "acme", "globex", SCRIPT, "⟨202E⟩gnitirw", "MiB"),
    "pins": ("host-a/engine-1", "nightly-batch", IMAGE),
    "workers": ("serves", "Hit ratio", "All counts of"),
    "prefixes": ("Where the bytes are", "ways on", "tokens", " ago"),
    "damage": ("Found by workers", "miss damaged", "files,"),
}


@dataclass(frozen=True, slots=True)
class Live:
    """A cluster under load, its page, and a browser that looks at it."""

    up: Running
    dashboard: Running
    page: Page
    root: Path

    def show(self, view: str) -> None:
        """Opens a view and waits until it shows the expected text."""
        self.page.driver.get("about:blank")
        self.page.driver.get(f"{self.dashboard.said['dashboard']}#{view}")
        self.page.until_says(*VIEWS[view])


@pytest.fixture(scope="module")
def live(module_root: Path) -> Iterator[Live]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    root = module_root / "root"
    arguments = ["up", "--root", str(root), "--listen", "127.0.0.1:0", "--workers", "2", "--memory", "32MiB"]
    arguments += ["--max-bytes", "160MiB"]
    with ExitStack() as undo:
        running = undo.enter_context(serving(module_root, *arguments))
        # The collector keeps chunks past the dashboard's --ttl, so that there is something to show.
        looked = ["dashboard", "--root", str(root), "--etcd", running.etcd, "--listen", "127.0.0.1:0"]
        dashboard = undo.enter_context(serving(module_root, *looked, "--max-bytes", "160MiB", "--ttl", "1h"))
        store = undo.enter_context(kvstore.connect(etcd=running.etcd))
        undo.enter_context(busy(store))
        page = undo.enter_context(opened(module_root))
        _history(store, root)
        yield Live(running, dashboard, page, root)


def _history(store: Store, root: Path) -> None:
    """Makes content for the views: damage that was found, and chunks of different ages."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not store.stats()["miss_damaged"]:
        assert time.monotonic() < deadline_s, "nobody came across the damage"
        damage(root, 60)
        time.sleep(1)
    age(root)


@for_each("view", VIEWS)
def test_each_view_shows_its_content_and_runs_no_name(live: Live, view: str) -> None:
    if view == "capacity":
        age(live.root)  # aged chunks may have been used, or collected, meanwhile
    live.show(view)
    if view == "prefixes":
        live.page.run("[...document.querySelectorAll('.tree .toggle[aria-expanded]')].at(-1).click()")
    assert live.page.complaints() == []
    assert live.page.run("return window.hostile") is None, "a name was run as a script"
    assert live.page.run("return document.querySelectorAll('main script, main img').length") == 0


def test_a_dashboard_that_is_gone_is_said_and_comes_back(live: Live) -> None:
    live.show("overview")
    with frozen(live.dashboard.child.pid):
        live.page.until_says("The dashboard does not answer")
        assert "Hit ratio" in live.page.text, "what it said before stays"
    live.page.until(lambda: "does not answer" not in live.page.text, "it is back")
    live.page.complaints()  # of the connection, which was to be expected


def test_it_asks_for_a_token_where_one_is_needed(live: Live, module_root: Path, tmp_path: Path) -> None:
    private, public = new_key()
    (tmp_path / "key.pub").write_bytes(public)
    access = tmp_path / "access.json"
    access.write_text(json.dumps({"identities": {"operator": {"*": "read"}}, "token_keys": ["key.pub"]}))
    os.chmod(access, 0o600)
    token = issue(private, "operator", "one", time.time(), 600)
    arguments = ["dashboard", "--root", str(live.root), "--etcd", live.up.etcd, "--listen", "127.0.0.1:0"]
    with serving(tmp_path, *arguments, "--access", str(access)) as running:
        page = live.page
        page.driver.get(running.said["dashboard"])
        page.until_says("A token, please")
        assert "llama" not in page.text and page.run("return document.activeElement.id") == "token"
        page.keys("wrong", ENTER)
        page.until_says("A token, please", "not")
        page.run("document.getElementById('token').value = ''")
        page.keys(token, ENTER)
        page.until_says(*VIEWS["overview"])
        assert token not in page.run("return document.documentElement.outerHTML")
        page.run("sessionStorage.clear()")
    live.page.complaints()  # of the answers 401, which were to be expected
