"""The metrics of a server, with MAX's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MILLISECONDS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000,
)  # fmt: skip


class ServerMetrics:
    """The metrics of a server; each server has a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "maxserve_request_count",
            "HTTP requests by path and status.",
            ["path", "code"],
            registry=self.registry,
        )
        self.request_time = self._histogram("request_time", "Time of a generation.")
        self.time_to_first_token = self._histogram("time_to_first_token", "Time to first token.")
        self.between_tokens = self._histogram("itl", "Time between two tokens of a sequence.")
        self.input_tokens = Counter(
            "maxserve_num_input_tokens", "Tokens of prompts.", registry=self.registry
        )
        self.output_tokens = Counter(
            "maxserve_num_output_tokens", "Generated tokens.", registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"maxserve_{name}_milliseconds", text, buckets=_MILLISECONDS, registry=self.registry
        )

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a metric that is read where it is shown.

        Args:
            name: Its name, without the prefix ``maxserve_``.
            text: What it says.
            value: Reads it.
        """
        Gauge(f"maxserve_{name}", text, registry=self.registry).set_function(value)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Measures a generation: the time that the block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.request_time.observe((time.perf_counter() - begin) * 1e3)

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        return generate_latest(self.registry)
