"""``kvstore plan``: the report, the reordered file, and a store that holds a part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kvstore
from tests.cli.conftest import Run, parsed
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of

SIZE = SMALL.chunk_tokens


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Four requests about two documents of three chunks, in turns."""
    lines = []
    for at, name in enumerate("abcd"):
        prompt = [*range(at % 2 * 1000, at % 2 * 1000 + 3 * SIZE), 5000 + at]
        lines.append(json.dumps({"custom_id": name, "body": {"prompt": prompt, "max_tokens": 1}}))
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(lines))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_the_report_has_the_figures(run: Run, batch: Path) -> None:
    found = parsed(run("plan", str(batch), "--memory-tokens", "100", "--json"))
    assert (found["prompts"], found["groups"], found["groups_shared"]) == (4, 2, 2)
    assert found["tokens_total"] == 4 * (3 * SIZE + 1)
    assert found["tokens_to_compute"] == found["tokens_optimum"] == found["tokens_one_level"] == 6 * SIZE + 4
    assert (found["memory_tokens"], found["block_tokens"], found["tokens_stored"]) == (100, 16, 0)
    shown = run("plan", str(batch), "--memory-tokens", "100")
    assert shown.exit_code == 0
    assert "tokens to compute" in shown.stdout and "0.4898" in shown.stdout


def test_what_the_store_holds_is_free(run: Run, batch: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    tokens = np.arange(2 * SIZE)
    with kvstore.open(root) as store:
        store.namespace("m", SMALL).put(tokens, kv_of(SMALL, tokens))
    at = ("--root", root, "--namespace", "m", "--memory-tokens", "100")
    found = parsed(run("plan", str(batch), *at, "--json"))
    assert (found["tokens_stored"], found["tokens_to_compute"]) == (4 * SIZE, 4 * SIZE + 4)
    refused = run("plan", str(batch), *at, "--block-tokens", "4")
    assert refused.exit_code == 2 and "--block-tokens with --namespace" in refused.stderr


@for_each(
    "arguments, said",
    [
        (("--output", "."), "the output '.' is not a regular file"),
        (("--output", "/missing/x"), "cannot write the output '/missing/x': No such file or directory"),
        (("--server", "http://127.0.0.1:1", "--results", "/missing/x"), "cannot write the results '/missing/x'"),
        (("--results", "x"), "--results without --server"),
    ],
)
def test_places_that_cannot_be_written_are_one_line(
    run: Run, batch: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run("plan", str(batch), "--memory-tokens", "100", *arguments)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_batch_is_written_in_order_unless_it_is_a_dry_run(run: Run, batch: Path, tmp_path: Path) -> None:
    output = tmp_path / "ordered.jsonl"
    arguments = ("plan", str(batch), "--memory-tokens", "100", "--output", str(output))
    assert run(*arguments, "--dry-run").exit_code == 0
    assert not output.exists()
    assert run(*arguments).exit_code == 0
    assert ids(output) == ["a", "c", "b", "d"]
    assert sorted(output.read_text().splitlines()) == sorted(batch.read_text().splitlines())
