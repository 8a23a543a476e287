"""What the page says and draws where a busy cluster does not show it: a store in memory in a real Chromium."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.dashboard.door import OpenDoor
from kvstore.dashboard.serving import Serving
from kvstore.dashboard.web import application
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Room
from tests.dashboard.chromium import LIGHT, PHONE, Mode, Page, missing, opened
from tests.kit.boards import Shown, shown
from tests.kit.stores import TINY

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

COUNTED = {"id": "ab" * 8, "scanned": {"chunks": 3, "bytes": 3 << 10}}
"""A namespace as a plan counts it; etcd does not know it."""
PIXELS = (Path(__file__).parent / "pixels.js").read_text()
SLOW_MS = 8_000
"""The pause between two requests for what seldom changes, as in main.js."""
LABELS = """
const done = arguments[0];
Promise.all([import("/charts.js"), import("/dom.js")]).then(([{ levels }, dom]) => {
  const tops = [1, 2, 4, 5, 8, 10, 20, 40, 50, 80, 100, 200, 400, 500, 800, 1000];
  const scales = [0.001, 0.01, 0.1, 1, 1024, 1024 ** 2, 1024 ** 3, 1e3, 1e6];
  const shown = { number: dom.number, bytes: dom.bytes, rate: dom.rate, percent: dom.percent };
  done(Object.entries(shown).flatMap(([name, format]) => scales.flatMap((scale) => tops
    .filter((top) => (name === "percent" ? top * scale === 1 : name === "number" || top * scale >= 1))
    .map((top) => [`${name} up to ${top * scale}`, [...levels(top * scale, format).values()]]))));
});
"""
"""The labels of each axis that a chart may have."""
SHADE_MIN = 8
"""Levels, of 256, by which a shade differs from what it is on."""


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


def test_a_single_tenant_is_one_tenant(small: Small) -> None:
    small.show("overview")
    small.page.until(lambda: small.tile("Namespaces"), "the tile is there")
    assert small.tile("Namespaces").splitlines() == ["1", "1 tenant"]
    small.board.store.namespace("model", TINY, tenant="globex")
    small.page.until(lambda: small.tile("Namespaces").splitlines() == ["2", "2 tenants"], "two tenants")


def test_no_two_labels_of_an_axis_read_alike(small: Small) -> None:
    small.show("overview")
    page = small.page
    page.until(lambda: page.run("return document.querySelectorAll('.plot svg').length") == 8, "all charts are drawn")
    drawn = page.run(
        "return [...document.querySelectorAll('.plot svg')].map((one) => [...one.querySelectorAll('.tick.end')]"
        ".map((label) => label.textContent))"
    )
    assert ["0 B/s", "1 B/s"] in drawn, "nothing was read: half a byte reads as one"
    assert all(len(labels) >= 2 and len(labels) == len(set(labels)) for labels in drawn), drawn
    tried = page.driver.execute_async_script(LABELS)
    assert len(tried) > 100
    assert [each for each in tried if len(each[1]) < 2 or len(each[1]) != len(set(each[1]))] == []


def test_tabs_that_do_not_fit_are_hinted_at_by_a_shade_on_their_side(small: Small) -> None:
    small.show("overview", PHONE)
    tabs = "const tabs = document.getElementById('tabs'); "
    assert small.page.run(tabs + "return tabs.scrollWidth > tabs.clientWidth"), "there are more tabs than fit"
    assert small.page.run("return document.documentElement.scrollWidth") <= PHONE.width
    assert shades(small) == (False, True), "there are more to the right"
    small.page.run(tabs + "tabs.scrollLeft = (tabs.scrollWidth - tabs.clientWidth) / 2")
    assert shades(small) == (True, True), "on both sides"
    small.page.run(tabs + "tabs.scrollLeft = tabs.scrollWidth")
    assert shades(small) == (True, False), "on the left only"
    small.show("overview", LIGHT)
    assert shades(small) == (False, False), "all tabs fit"


def shades(small: Small) -> tuple[bool, bool]:
    """Whether the left and the right edge of the tabs are shaded, as one sees it above the tabs' words."""
    left, right, top = small.page.run(
        "const at = document.getElementById('tabs').getBoundingClientRect(); return [at.left, at.right, at.top]"
    )
    found = small.colours((int(left) + 2, int(top) + 1), (int(right) - 3, int(top) + 1), (int(left + right) // 2, 2))
    at_left, at_right, plain = found
    differs = [max(abs(a - b) for a, b in zip(one, plain, strict=True)) >= SHADE_MIN for one in (at_left, at_right)]
    return differs[0], differs[1]


def test_the_root_tile_names_the_bound_of_chunks_or_else_the_file_system(small: Small) -> None:
    small.board.files.capacity_bytes = 64 << 20
    small.show("overview")
    small.page.until(lambda: "of its file system" in small.tile("Root"), "no collector says a bound")
    assert "that chunks may take" not in small.tile("Root")
    root = small.board.documents.overview()["cluster"]["root"]
    room = Room(1, 2, 3, 0.1, used_bytes=30 << 20, capacity_bytes=40 << 20)
    small.board.meta.put(Keys(bytes.fromhex(root)).gc_room, room.to_json())
    small.page.until(lambda: "of 40.0 MiB that chunks may take" in small.tile("Root"), "the bound is named")
    share, said = small.tile("Root").splitlines()
    assert share == "75 %" and said.endswith(" free on its file system")
    bar = "return document.querySelector(`[data-key='tile-Root'] .bar`).getAttribute('aria-label')"
    assert small.page.run(bar) == "30.0 MiB of 40.0 MiB that chunks may take"
