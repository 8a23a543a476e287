"""A headless Chromium for tests: its page and its console."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--ignore-certificate-errors",
)


def missing() -> str | None:
    """Returns why no browser can be started here; None if one can."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"there is no {program}: apt install chromium chromium-driver"
    return None


class Page:
    """The one tab of a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        """Returns the result of a script."""
        return self.driver.execute_script(script, *arguments)

    @property
    def text(self) -> str:
        """Returns the visible text of the page."""
        return str(self.run("return document.body.innerText"))

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Waits until it holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}; it says: {self.text[:2000]}"
            time.sleep(0.1)

    def until_says(self, *words: str) -> None:
        """Waits until the page says all of this."""
        self.until(lambda: all(word in self.text for word in words), f"says {words}")

    def keys(self, *keys: str) -> None:
        """Presses keys, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def complaints(self) -> list[str]:
        """Returns the messages of the browser's console since the last call, without mere advice."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """Starts a browser with an empty profile in ``folder``; it ends afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver"), env={**os.environ, "HOME": str(folder)})
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Page(driver)
    finally:
        driver.quit()
