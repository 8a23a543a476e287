"""Requests followed from client to file: the id of a call, and OpenTelemetry spans where they are enabled.

At the bottom, because every layer has something to say about the call it works for. Off it costs one comparison, and
nothing of OpenTelemetry is imported; what exports spans, and where to, is the application's (kvstore/cli/worker.py).
"""

from __future__ import annotations

import contextvars
import random
import string
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

from kvstore.errors import InvalidRequest

T = TypeVar("T")

REQUEST_ID_KEY = "kvstore-request-id"
"""The id as metadata of a call."""
REQUEST_ID_CHARS_MAX = 64
PARENT_KEY = "traceparent"
"""The span that a call belongs to, as W3C Trace Context has it."""
PARENT_CHARS = 55
_ID_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:")
_PARENT_CHARS = frozenset(string.hexdigits + "-")

_request: contextvars.ContextVar[str | None] = contextvars.ContextVar("kvstore_request", default=None)
_otel: ModuleType | None = None
_contexts: ModuleType | None = None
tracer: Any = None
"""Makes spans; None where none are made. Callers on the path of a chunk look at it before they call anything here."""
NOTHING: AbstractContextManager[None] = nullcontext()

Metadata = tuple[tuple[str, str], ...]


request_id = _request.get
"""Returns the id of the call that is being made or served here; None outside of one."""


@contextmanager
def request(id: str | None = None) -> Generator[str]:
    """Calls made inside carry this id; a fresh one where it is None and there is none around us.

    Raises InvalidRequest for an id that is not 1 to 64 letters, digits, or ``- _ . :``.
    """
    if id is not None and not _is_id(id):
        raise InvalidRequest(
            f"request id {id[:80]!r}: expected 1 to {REQUEST_ID_CHARS_MAX} letters, digits or any of - _ . :"
        )
    before = _request.get()
    id = id or before or fresh_id()
    _request.set(id)
    try:
        yield id
    finally:
        _request.set(before)


def fresh_id() -> str:
    """An id of 16 hexadecimal digits. For telling requests apart in logs; nothing relies on it, so it is not secret."""
    return f"{random.getrandbits(64):016x}"


def accepted(said: str | bytes | None) -> str:
    """Returns the id that a client gave its call; a fresh one where it gave none, or one that is not valid."""
    return said if isinstance(said, str) and _is_id(said) else fresh_id()


def enable(provider: Any = None) -> None:
    """Makes spans from now on, by an OpenTelemetry ``TracerProvider``; the one set globally where it is None.

    Raises ModuleNotFoundError where the ``tracing`` extra is missing.
    """
    global _contexts, _otel, tracer
    try:
        from opentelemetry import context, trace
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("tracing needs OpenTelemetry: pip install 'kvstore-llm[tracing]'") from missing
    tracer = trace.get_tracer("kvstore", tracer_provider=provider)
    _otel, _contexts = trace, context


def disable() -> None:
    """Makes no more spans."""
    global _contexts, _otel, tracer
    _contexts = _otel = tracer = None


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[Any]:
    """Around a step of a request. An exception that leaves it marks it as failed; its text is not recorded."""
    if tracer is None:
        return NOTHING
    return _span(name, None, None, attributes)


@contextmanager
def served(name: str, metadata: Iterable[tuple[str, str | bytes]], **attributes: str) -> Generator[str]:
    """Around a call served here: takes its id and its span from what the client sent, or makes a fresh id. Yields it.

    Logs show the id, so one that is not valid is replaced; the call is not refused.
    """
    said = {key: value for key, value in metadata if key in (REQUEST_ID_KEY, PARENT_KEY) and isinstance(value, str)}
    id = accepted(said.get(REQUEST_ID_KEY))
    before = _request.get()
    _request.set(id)
    try:
        if tracer is None:
            yield id
        else:
            with _span(name, "SERVER", said.get(PARENT_KEY), attributes):
                yield id
    finally:
        _request.set(before)  # not reset(): a stream that its client left may be ended by another thread


def metadata() -> Metadata:
    """The metadata of a call to a worker: the request and span that it belongs to."""
    id = _request.get()
    pairs: Metadata = ((REQUEST_ID_KEY, id),) if id else ()
    parent = _parent()
    return (*pairs, (PARENT_KEY, parent)) if parent else pairs


def carried(work: Callable[[int], T]) -> Callable[[int], T]:
    """``work`` as it is to be done on another thread: for the same request, under the same span."""
    id, contexts = _request.get(), _contexts
    context = None if contexts is None else contexts.get_current()

    def on_another_thread(number: int) -> T:
        before, attached = _request.get(), None if contexts is None else contexts.attach(context)
        _request.set(id)
        try:
            return work(number)
        finally:
            if contexts is not None:
                contexts.detach(attached)
            _request.set(before)

    return on_another_thread


def _is_id(text: str) -> bool:
    return 0 < len(text) <= REQUEST_ID_CHARS_MAX and _ID_CHARS.issuperset(text)


@contextmanager
def _span(name: str, kind: str | None, parent: str | None, attributes: dict[str, Any]) -> Generator[Any]:
    maker, trace = tracer, _otel
    if maker is None or trace is None:  # disabled at this moment
        yield None
        return
    options: dict[str, Any] = {} if kind is None else {"kind": trace.SpanKind[kind]}
    if parent is not None and len(parent) == PARENT_CHARS and _PARENT_CHARS.issuperset(parent):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        options["context"] = TraceContextTextMapPropagator().extract({PARENT_KEY: parent})
    id = _request.get()
    if id is not None:
        attributes["kvstore.request_id"] = id
    with maker.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False, **options
    ) as span:
        try:
            yield span
        except BaseException as error:
            # Only the type of an error: its text may contain paths or prompts, which readers of traces need not see.
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(trace.StatusCode.ERROR)
            raise


def _parent() -> str | None:
    if _otel is None:
        return None
    at = _otel.get_current_span().get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{int(at.trace_flags):02x}" if at.is_valid else None
