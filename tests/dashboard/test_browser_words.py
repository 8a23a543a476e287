"""What the page says and draws where a busy cluster does not show it: a store in memory in a real Chromium."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.dashboard.server import OpenDoor, Serving, application
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Capacity
from tests.dashboard.chromium import LIGHT, Mode, Page, missing, opened
from tests.kit.boards import Shown, shown
from tests.kit.stores import TINY

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

COUNTED = {"id": "ab" * 8, "scanned": {"chunks": 3, "bytes": 3 << 10}}
"""A namespace as a plan counts it; etcd does not know it."""
PIXELS = (Path(__file__).parent / "pixels.js").read_text()
SLOW_MS = 8_000
"""The pause between two requests for what seldom changes, as in main.js."""


@dataclass(frozen=True, slots=True)
class Small:
    """A store in memory, its dashboard, and a browser on it. The plan of its collector is the file ``counted``."""

    board: Shown
    page: Page
    url: str
    counted: Path

    def show(self, view: str, mode: Mode = LIGHT) -> None:
        self.page.look(mode)
        self.page.driver.get("about:blank")
        self.page.driver.get(f"{self.url}#{view}")
        self.page.until(lambda: self.page.run("return !!document.querySelector('#panel .sources')"), f"{view} is shown")

    def tile(self, label: str) -> str:
        """Returns what a tile of the overview says below its label; empty before the overview is shown."""
        selector = f"[data-key='tile-{label}'] dd"
        return str(self.page.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def rows(self, table: str) -> list[list[str]]:
        """Returns the cells of a table, row by row, without those that a bar draws."""
        script = (
            "return [...document.querySelectorAll(`[role=region][aria-label='${arguments[0]}'] tbody tr`)]"
            ".map((row) => [...row.children].map((cell) => cell.innerText.trim()))"
        )
        return [[str(cell) for cell in row] for row in self.page.run(script, table)]

    def colours(self, *points: tuple[int, int]) -> list[tuple[int, ...]]:
        """Returns the colours that the browser shows at some points of its window."""
        picture = self.page.driver.get_screenshot_as_base64()
        return [tuple(each) for each in self.page.driver.execute_async_script(PIXELS, picture, points)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with opened(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def small(page: Page, tmp_path: Path) -> Iterator[Small]:
    counted = tmp_path / "counted"
    collector = ("sh", "-c", f"cat {shlex.quote(str(counted))}")
    with ExitStack() as undo:
        board = undo.enter_context(shown(collector))
        board.store.namespace("model", TINY, tenant="acme")
        serving = Serving(application(board.documents, OpenDoor(is_local=True)), "127.0.0.1", 0)
        undo.callback(serving.close)
        yield Small(board, page, serving.start(), counted)


def test_a_namespace_that_nobody_counted_has_a_dash_and_no_size_of_zero(small: Small) -> None:
    small.show("namespaces")
    small.page.until(lambda: small.rows("Tenants") == [["acme", "1", "counting …", "counting …"]], "no plan is there")
    assert [row[2:4] for row in small.rows("Namespaces")] == [["counting …", "counting …"]]
    small.counted.write_text(json.dumps({"namespaces": [COUNTED]}))
    small.page.until(lambda: len(small.rows("Tenants")) == 2, "a plan counted another namespace")
    assert small.rows("Tenants") == [["unknown", "1", "3", "3.00 KiB"], ["acme", "1", "–", "–"]]
    assert [row[1:4] for row in small.rows("Namespaces")] == [["unknown", "3", "3.00 KiB"], ["acme", "–", "–"]]
    assert "0 B" not in small.page.run("return document.getElementById('panel').innerText")


def test_the_page_asks_every_two_seconds_until_namespaces_are_counted(small: Small) -> None:
    small.show("namespaces")
    asked = (
        "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/namespaces'))"
        ".map((one) => one.startTime)"
    )
    small.page.until(lambda: len(small.page.run(asked)) >= 3, "it asked three times")
    first, _, third = small.page.run(asked)[:3]
    assert third - first < 2 * SLOW_MS


def test_the_root_tile_names_the_bound_of_chunks_or_else_the_file_system(small: Small) -> None:
    small.board.files.capacity_bytes = 64 << 20
    small.show("overview")
    small.page.until(lambda: "of its file system" in small.tile("Root"), "no collector says a bound")
    assert "that chunks may take" not in small.tile("Root")
    root = small.board.documents.overview()["cluster"]["root"]
    capacity = Capacity(1, used_bytes=30 << 20, capacity_bytes=40 << 20)
    small.board.meta.put(Keys(bytes.fromhex(root)).gc_capacity, capacity.to_json())
    small.page.until(lambda: "of 40.0 MiB that chunks may take" in small.tile("Root"), "the bound is named")
    share, said = small.tile("Root").splitlines()
    assert share == "75 %" and said.endswith(" free on its file system")
    bar = "return document.querySelector(`[data-key='tile-Root'] .bar`).getAttribute('aria-label')"
    assert small.page.run(bar) == "30.0 MiB of 40.0 MiB that chunks may take"
