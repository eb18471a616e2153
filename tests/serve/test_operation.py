"""Operation: queries of the dashboard against the metrics, request identifiers in the logs."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import TokensGenerated
from max.serve.metrics import ServerMetrics
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.logs import share_handlers
from max.serve.process.server import add_gauges
from max.serve.requests.generation import TextSequence, _Sequence
from max.serve.requests.request_context import (
    CURRENT_REQUEST,
    RequestContext,
    name_requests_in_logs,
)

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]


@pytest.fixture
def samples() -> dict[str, set[str]]:
    """The labels of each sample that ``/metrics`` shows."""

    async def nothing(stored):
        raise AssertionError

    metrics = ServerMetrics()
    add_gauges(metrics, ModelPool(dict, nothing, PoolLimits()))
    metrics.requests.labels("/v1/completions", "200").inc()
    found: dict[str, set[str]] = {}
    for line in metrics.text().decode().splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_queries_of_the_dashboard(query: str, samples: dict[str, set[str]]) -> None:
    names = re.findall(r"maxserve_\w+", query)
    assert names
    for name in names:
        assert name in samples, f"/metrics has no {name}"
        grouped = ",".join(re.findall(r"by \(([\w, ]+)\)", query)).replace(" ", "")
        labels = [*filter(None, grouped.split(",")), *re.findall(r"(\w+)=~", query)]
        for label in labels:
            assert label in samples[name], f"{name} has no label {label}"
        if query.startswith("histogram_quantile"):
            assert name.endswith("_bucket")
    assert query.count("(") == query.count(")")
    # counters need a rate, gauges must not have one
    assert ("rate(" in query) == any(n.endswith(("_total", "_bucket")) for n in names)


def test_the_dashboard_is_whole(samples: dict[str, set[str]]) -> None:
    shown = {name for query in QUERIES for name in re.findall(r"maxserve_\w+", query)}
    bases = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in shown}
    exposed = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in samples}
    assert exposed == bases, exposed ^ bases
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_lines_of_a_log_name_their_request() -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    above, logger = logging.getLogger("test_operation"), logging.getLogger("test_operation.child")
    above.propagate, handlers = False, [Lines(), Lines()]
    above.addHandler(handlers[0])
    logger.addHandler(handlers[1])
    for _ in range(2):
        name_requests_in_logs(logger)
    logger.error("before %d", 1)
    token = CURRENT_REQUEST.set(RequestContext("req%d-7"))
    logger.error("within %d %s", 2, "x")
    CURRENT_REQUEST.reset(token)
    logger.error("after")
    assert lines == ["before 1"] * 2 + ["[req%d-7] within 2 x"] * 2 + ["after"] * 2


def test_times_begin_with_the_arrival_of_the_request() -> None:
    """The first token of a request with a long prompt waits for its tokens, too."""
    metrics = ServerMetrics()
    model: Any = SimpleNamespace(decoder=lambda visible: lambda tokens: "x" * len(tokens))
    token = CURRENT_REQUEST.set(RequestContext(arrival_time=time.perf_counter() - 100))
    try:
        one = _Sequence(model, TextSequence(GenerationRequest("a", (1,), 3)), metrics)
        one.push(TokensGenerated("a", (2,), GenerationStatus.ACTIVE))
        with metrics.request():
            pass
    finally:
        CURRENT_REQUEST.reset(token)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    for name in ("time_to_first_token", "request_time"):
        assert float(lines[f"maxserve_{name}_milliseconds_count"]) == 1
        assert 100_000 <= float(lines[f"maxserve_{name}_milliseconds_sum"]) < 160_000


def test_uvicorn_has_the_handlers_of_max_in_a_list_of_its_own() -> None:
    """What is added to one logger is not added to the other, whose lines it would write twice."""
    ours, theirs = logging.getLogger("max"), logging.getLogger("uvicorn")
    handlers, propagates = theirs.handlers, theirs.propagate
    try:
        share_handlers()
        assert theirs.handlers == ours.handlers
        theirs.addHandler(added := logging.NullHandler())
        assert added not in ours.handlers
    finally:
        theirs.handlers, theirs.propagate = handlers, propagates
