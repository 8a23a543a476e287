"""SIZING.md and its program: the formulas agree with the code, and the page shows the program's output."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.core.namespace import NamespaceDigest
from kvstore.meta.keys import PinId
from kvstore.meta.pins import StoredPin
from tests.kit.programs import ended, load_program

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PAGE = (DEPLOY / "SIZING.md").read_text()


sizing = load_program("deploy/sizing.py")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16),
        Layout(layers=80, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=256),
        Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=2048),
    ],
)
def test_a_chunk_takes_on_the_root_what_the_formula_says(layout: Layout, tmp_root: Path) -> None:
    with kvstore.open(str(tmp_root)) as store:
        kv = np.zeros(layout.shape(layout.chunk_tokens), layout.numpy_dtype)
        store.namespace("sized", layout).put(list(range(layout.chunk_tokens)), kv)
    per_token = layout.chunk_bytes // layout.chunk_tokens
    sizes = [path.stat().st_size for path in (tmp_root / "chunks").rglob("*") if path.is_file()]
    assert sizes == [sizing.chunk_file_bytes(layout.chunk_tokens, per_token, layout.layers)]


def test_a_pin_takes_in_etcd_what_the_formula_says() -> None:
    chunks = b"a" * 16 * 1024
    owner, id, namespace = "an-owner-of-usual-length", PinId(b"i" * 16), NamespaceDigest(b"n" * 32)
    record = StoredPin(
        id=id,
        owner=owner,
        namespace=namespace,
        tokens_count=262_144,
        ttl_s=3600,
        expires_s=1_800_000_000,
        packed=chunks,
    )
    assert len(record.to_bytes()) <= sizing.PIN_BYTES + 1024 * sizing.PINNED_CHUNK_BYTES


def test_the_page_shows_what_the_program_says() -> None:
    shown = re.findall(r"^\$ python3 deploy/(sizing\.py .*)\n((?:.+\n)+?)```", PAGE, re.MULTILINE)
    assert len(shown) >= 2
    for command, output in shown:
        ran = ended(sys.executable, *shlex.split(command), cwd=DEPLOY, check=True)
        assert ran.stdout == output
