"""Exports the spans of a server to an OpenTelemetry collector, as the environment says.

Separate from kvstore/tracing.py, which makes the spans: a library configures nothing and reads no environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kvstore import __version__, tracing
from kvstore.background import within
from kvstore.errors import InvalidRequest

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of the OpenTelemetry specification. Each names the address of a collector."""
SHUTDOWN_S = 5.0


def start_tracing(wanted: bool | None, service: str, instance: str) -> Callable[[], None]:
    """Exports spans from now on, if ``wanted`` or, if that is None, if the environment names a collector.

    Returns a function that ends it, and sends what is left for a few seconds. Raises InvalidRequest if tracing is
    wanted and the ``tracing`` extra is missing.
    """
    if not (any(os.environ.get(name) for name in ENDPOINTS) if wanted is None else wanted):
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise InvalidRequest(
            f"tracing needs {missing.name}: pip install 'kvstore-llm[tracing]', or give --no-tracing"
        ) from missing
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these, as OTEL_TRACES_SAMPLER decides what is sampled.
    said = {"service.name": service, "service.version": __version__, "service.instance.id": instance}
    provider = TracerProvider(resource=Resource(said).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracing.enable(provider)
    log.info("tracing.exporting service=%s instance=%s", service, instance)

    def stop() -> None:
        tracing.disable()
        within(SHUTDOWN_S, provider.shutdown)

    return stop
