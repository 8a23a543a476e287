"""The pages of deploy/: every alert has its section, every page named exists, kvstore understands every command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.deploy.commands import understood

SOURCE = Path(__file__).resolve().parents[2]
DEPLOY = SOURCE / "deploy"
PAGES = sorted([*DEPLOY.glob("*.md"), DEPLOY / "helm" / "README.md"])
ALERTS = re.findall(r"^ *- alert: (\w+)$", (DEPLOY / "prometheus" / "alerts.yml").read_text(), re.MULTILINE)


def page_name(page: Path) -> str:
    return page.relative_to(DEPLOY).as_posix()


def commands(page: Path) -> list[str]:
    """Lines of code that call kvstore, and code within sentences that does and is complete."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```sh.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in re.findall(r"^ {4,7}(\S.*)$", text, re.MULTILINE)]
    lines += re.findall(r"`(kvstore(?:-gc)? [^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    calls = [re.sub(r"^(?:\S*/)?(?=kvstore)|(?: \||&&|\|\||;|>).*$", "", line) for line in lines]
    return [call for call in calls if re.match(r"kvstore(-gc)? ", call)]


def test_every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() -> None:
    sections = re.findall(r"^### (KVStore\w+)$", (DEPLOY / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert len(ALERTS) >= 20
    assert sorted(sections) == sorted(ALERTS)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_other_pages_named_in_sentences_exist(page: Path) -> None:
    for name in re.findall(r"(?<![\w/])((?:\w+/)*[A-Z]+\.md)\b", page.read_text()):
        places = [DEPLOY / name, SOURCE / name, *SOURCE.glob(f"kvstore/*/{name}")]
        assert any(place.exists() for place in places), name


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_kvstore_understands_the_commands(page: Path) -> None:
    for call in commands(page):
        words = shlex.split(call, comments=True)
        if len(words) > 2 and "..." not in call.replace("--connect ...", ""):
            understood([word.replace("...", "10.0.0.1:7070") for word in words], f"{page.name}: {call}", whole=False)
