"""Traces of requests by OpenTelemetry. Without an endpoint nothing is recorded or sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from max._version import __version__
from max.pipelines.core.exceptions import ConfigError

logger = logging.getLogger("max.serve")
_PARENT = ("traceparent", "tracestate", "baggage")
_FLUSH_S = 3.0


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class RequestTrace:
    """The span of one request, and the spans of its phases.

    Args:
        tracer: Makes the spans.
        span: The request's.
        context: The context with that span.
    """

    def __init__(self, tracer: Any, span: Any, context: Any) -> None:
        self._tracer, self._span, self._context = tracer, span, context

    def phase(self, name: str, begin: float, end: float, attributes: Mapping[str, Any]) -> None:
        """Adds a span of a phase that has ended.

        Args:
            name: The phase.
            begin: Seconds since the epoch.
            end: Seconds since the epoch.
            attributes: Attributes of the span.
        """
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=_nanoseconds(begin)
        )
        span.end(_nanoseconds(max(begin, end)))

    def end(self, end: float, route: str, status: int) -> None:
        """Ends the span of the request.

        Args:
            end: Seconds since the epoch.
            route: The path of the route.
            status: The status of the response; 0: none was sent.
        """
        self._span.update_name(f"{self._span.attributes['http.request.method']} {route}")
        self._span.set_attribute("http.route", route)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        # OpenTelemetry's conventions: 4xx is no error of a server's span
        if status >= 500 or not status:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
        self._span.end(_nanoseconds(end))


class Tracing:
    """Sends the traces of a server's requests to a collector, in a thread of its own.

    OpenTelemetry's variables (``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``,
    ``OTEL_EXPORTER_OTLP_HEADERS``, ...) hold.

    Args:
        endpoint: The collector's address for OTLP over HTTP, such as ``http://127.0.0.1:4318``.

    Raises:
        ConfigError: The packages for it are not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
            from opentelemetry.trace import SpanKind, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"traces are to be sent to {endpoint}, and a package for it is missing ({error})",
                'Install it with: pip install "supremum[otel]", or set no endpoint.',
            ) from error
        resource = Resource.create({"service.version": __version__})
        # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give a name
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "max-serve"}))
        # no handler at the exit of the process, as it could wait for ever: close() has a time limit
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("max.serve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._set_span = SpanKind.SERVER, set_span_in_context

    def begin(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str, begin: float
    ) -> RequestTrace:
        """Begins the span of a request, as a child of the span that ``traceparent`` names.

        Args:
            method: The method.
            path: The path.
            headers: The headers.
            request_id: The identifier that logs and the response have.
            begin: Seconds since the epoch.
        """
        parent_headers = {name: headers[name] for name in _PARENT if name in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            self._propagator.extract(parent_headers),
            self._kind,
            {"http.request.method": method, "url.path": path, "request.id": request_id},
            start_time=_nanoseconds(begin),
        )
        return RequestTrace(self._tracer, span, self._set_span(span))

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.force_flush(int(_FLUSH_S * 1e3))
        self._provider.shutdown()
