"""Traces and histograms: the phases of requests, at a collector and in /metrics."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from max.interfaces import RequestID
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.engine import StepRecorder
from max.pipelines.generation.process.channel import MessageCodec
from max.pipelines.generation.process.events import (
    STEP_BOUNDS_MS,
    EngineStats,
    PromptStarted,
    StepTimes,
)
from max.serve.tracing import Tracing
from tests.serve.conftest import TINY, RunningServer

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A collector of OTLP over HTTP that stores all spans."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                bodies.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format, *args) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list:
        """The received spans, each with the attributes of its resource."""
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for path, body in self.bodies:
            assert path == "/v1/traces"
            for each in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {a.key: a.value.string_value for a in each.resource.attributes}
                found += [(span, resource) for scope in each.scope_spans for span in scope.spans]
        return found

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def test_a_request_is_traced_from_its_parent_to_its_tokens(
    start_server: Callable[..., RunningServer], collector: Collector, monkeypatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    server = start_server("--model", str(TINY), "--max-length", "256").wait_ready()
    parent = {
        "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
        "X-Request-Id": "mine",
    }
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}
    begin = time.time()
    with httpx.Client(base_url=server.url, timeout=300) as client:
        for more in ({}, {"stream": True}):
            answer = client.post("/v1/chat/completions", json={**body, **more}, headers=parent)
            assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
        assert client.post("/v1/chat/completions", json={}).status_code == 400
        # neither of these is traced
        metrics = client.get("/metrics").text
        assert client.get("/health").status_code == 200
    assert "maxserve_queue_time_milliseconds_count 2.0" in metrics
    assert server.stop() == 0
    end = time.time()

    spans = collector.spans()
    assert {resource["service.name"] for _, resource in spans} == {"max-serve"}
    spans = [span for span, _ in spans]
    requests = [span for span in spans if span.name == "POST /v1/chat/completions"]
    assert len(requests) == 3 and len(spans) == 3 + 2 * 3
    traced = [span for span in requests if span.parent_span_id]
    assert len(traced) == 2
    for request in traced:
        assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
        attributes = {a.key: a.value for a in request.attributes}
        assert attributes["request.id"].string_value == "mine"
        assert attributes["http.response.status_code"].int_value == 200
        phases = {span.name: span for span in spans if span.parent_span_id == request.span_id}
        assert set(phases) == {"queue", "prefill", "decode"}
        times = [request.start_time_unix_nano]
        for name in ("queue", "prefill", "decode"):
            assert phases[name].trace_id.hex() == TRACE_ID
            times += [phases[name].start_time_unix_nano, phases[name].end_time_unix_nano]
        times.append(request.end_time_unix_nano)
        assert times == sorted(times) and begin <= times[0] * 1e-9 and times[-1] * 1e-9 <= end
        assert phases["queue"].end_time_unix_nano == phases["prefill"].start_time_unix_nano
        tokens = {a.key: a.value.int_value for a in phases["decode"].attributes}
        assert tokens["gen_ai.usage.output_tokens"] == 5
    (refused,) = [span for span in requests if not span.parent_span_id]
    assert {a.key: a.value for a in refused.attributes}[
        "http.response.status_code"
    ].int_value == 400


def test_a_missing_package_is_an_error(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"supremum\[otel\]"):
        Tracing("http://127.0.0.1:1")


def test_an_endpoint_that_is_no_url_is_refused(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--model", str(TINY), "--otlp-endpoint", "collector:4318")
    assert server.process.wait(300) == 2
    server._reader.join(60)
    assert "--otlp-endpoint is 'collector:4318'" in server.output


def test_steps_and_queue_times_are_in_the_metrics(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 8, "ignore_eos": True})
    assert answer.status_code == 200
    end = time.monotonic() + 300
    while True:  # the worker reports now and then
        lines = [
            line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")
        ]
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        name = 'maxserve_step_time_milliseconds_{}{{kind="{}"}}'
        if values.get(name.format("count", "decode"), 0) >= 7:
            break
        assert time.monotonic() < end, lines
        time.sleep(0.1)
    assert values[name.format("count", "prompt")] >= 1
    for kind in ("prompt", "decode"):
        buckets = [
            value
            for line, value in values.items()
            if line.startswith("maxserve_step_time_milliseconds_bucket")
            and f'kind="{kind}"' in line
        ]
        assert len(buckets) == len(STEP_BOUNDS_MS) + 1 and buckets == sorted(buckets)
        assert buckets[-1] == values[name.format("count", kind)]
        assert values[name.format("sum", kind)] > 0
    assert values["maxserve_queue_time_milliseconds_count"] >= 1


def test_recorded_steps() -> None:
    recorder = StepRecorder()
    recorder.record(0.0005)
    recorder.record(0.012, 4)
    recorder.record(0.1, 0)
    recorder.record(100.0)
    times = recorder.times
    assert times.counts[0] == 1 and times.counts[STEP_BOUNDS_MS.index(5)] == 4
    assert times.counts[-1] == 1 and sum(times.counts) == 6
    assert times.milliseconds == pytest.approx(100_012.5)
    assert (times + StepTimes()) == times and sum((times + times).counts) == 12
    codec = MessageCodec()
    messages = [EngineStats(1, 2, decode_steps=times), PromptStarted(RequestID("a").value, 1.5)]
    assert codec.decode(codec.encode(messages)) == messages
