"""Request ids and spans, followed from a client through a worker to the files of its root."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.cli.options import Lines
from kvstore.core import tracing
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.transport.messages import parse, sealed, trace_of, traced
from kvstore.transport.status import BrokenTransfer
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of
from tests.kit.workers import connected, serving

TOKENS = list(range(4 * SMALL.chunk_tokens))
KV = kv_of(SMALL, TOKENS)


@contextmanager
def logged() -> Iterator[list[dict[str, object]]]:
    """Collects log lines as JSON; they are complete at the end."""
    stream, lines = io.StringIO(), list[dict[str, object]]()
    sink = logging.StreamHandler(stream)
    sink.setFormatter(Lines())
    ours = logging.getLogger("kvstore")
    before = ours.level
    ours.addHandler(sink)
    ours.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        ours.setLevel(before)
        ours.removeHandler(sink)
        lines += [json.loads(line) for line in stream.getvalue().splitlines()]


@contextmanager
def spans() -> Iterator[InMemorySpanExporter]:
    """All spans that end meanwhile."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    try:
        yield exporter
    finally:
        tracing.disable()


def ended(lines: list[dict[str, object]], method: str) -> list[dict[str, object]]:
    return [line for line in lines if line.get("event") == "call.ended" and line["method"] == method]


# Request ids


@for_each("way, path", [("grpc", "grpc"), ("tcp", "tcp"), ("shared", "unix")])
def test_the_worker_logs_the_id_that_the_caller_gave(way: str, path: str, tmp_path: Path) -> None:
    with logged() as lines, serving(tmp_path) as served, connected(served, bulk=way) as store:
        cache = store.namespace("m", SMALL)
        with tracing.request("req-42"):
            cache.put(TOKENS, KV)
            assert cache.match(TOKENS) == len(TOKENS)
            cache.get(TOKENS)
        cache.match(TOKENS)
    for method in ("Put", "Match", "Get"):
        line = ended(lines, method)[0]
        assert (line["request"], line["code"]) == ("req-42", "OK") and isinstance(line["seconds"], float)
    assert {line["path"] for line in ended(lines, "Get")} == {path}
    fresh = ended(lines, "Match")[-1]["request"]
    assert isinstance(fresh, str) and len(fresh) == 16 and fresh != "req-42"


def test_an_error_names_its_request() -> None:
    with serving() as served, connected(served) as store:
        with pytest.raises(KVStoreError) as raised, tracing.request("req-43"):
            store.unpin("nobody")
        assert any("req-43" in note for note in raised.value.__notes__)


def test_a_trace_in_a_bulk_request_is_sealed_and_nobody_has_to_know_it() -> None:
    request = pb.GetRequest(tokens=b"abcd", chunks_max=3)
    assert traced(request) == sealed(request), "nothing to say costs nothing"
    with tracing.request("req-44"):
        said = traced(request)
    assert parse(pb.GetRequest, said).tokens == b"abcd"
    assert trace_of(said) == (("kvstore-request-id", "req-44"),)
    with pytest.raises(BrokenTransfer):
        parse(pb.GetRequest, said.replace(b"req-44", b"req-45"))
    assert trace_of(sealed(request)) == trace_of(b"") == trace_of(b"\xf2\x7f\xff") == trace_of(b"\xf2\x7f\x03i=") == ()


# Spans


@for_each("way", ["grpc", "tcp", "shared"])
def test_one_get_is_one_trace_from_the_client_to_the_file(way: str, tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served, bulk=way) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        served.member.node.forget()
        with spans() as exporter, tracing.request("req-45"):
            cache.match(TOKENS)
            cache.put(list(range(10_000, 10_000 + len(TOKENS))), KV)
            if way != "shared":  # there files are handed over, and the client reads them
                cache.get(TOKENS)
    found = exporter.get_finished_spans()
    wanted = [
        ["kvstore.match", "kvstore.attempt", "kvstore.Match", "kvstore.root.look"],
        ["kvstore.put", "kvstore.attempt", "kvstore.Put", "kvstore.root.write"],
    ]
    if way != "shared":
        wanted.append(["kvstore.get", "kvstore.attempt", "kvstore.Get", "kvstore.root.read"])
    for chain in wanted:
        assert chain in [lineage(span, found) for span in found if span.name == chain[-1]]
    assert {(span.attributes or {}).get("kvstore.request_id") for span in found} == {"req-45"}


def lineage(span: ReadableSpan, found: tuple[ReadableSpan, ...]) -> list[str]:
    """The names from the first span of a trace down to this one."""
    by_id = {each.context.span_id: each for each in found if each.context is not None}
    names = [span.name]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.insert(0, span.name)
    return names


def test_a_span_that_failed_says_the_kind_and_no_text(tmp_path: Path) -> None:
    with spans() as exporter, serving(tmp_path) as served, connected(served) as store, pytest.raises(InvalidRequest):
        store.unpin("secret-owner/nobody")
    failed = [span for span in exporter.get_finished_spans() if not span.status.is_ok]
    assert {span.name for span in failed} >= {"kvstore.attempt"}
    assert all("secret" not in str((span.attributes, span.events, span.status.description)) for span in failed)
