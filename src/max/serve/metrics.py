"""The metrics of a server, with MAX's names."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from max.pipelines.generation.process.events import STEP_BOUNDS_MS, StepTimes
from max.serve.requests.request_context import current_request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Counts = dict[tuple[str, str, tuple[tuple[str, str], ...]], float]
"""Counters and histograms: their values by the names of the metric and of the value, and by the labels."""

_MILLISECONDS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000,
)  # fmt: skip


class _StepCollector(Collector):
    """Collects the histograms that the workers keep."""

    def __init__(self, read: Callable[[], dict[str, StepTimes]]) -> None:
        self._read = read

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Makes the metric."""
        family = HistogramMetricFamily(
            "maxserve_step_time_milliseconds", "Time of a step of the engine.", labels=["kind"]
        )
        for kind, times in self._read().items():
            # in Prometheus a bucket counts those below it too
            totals = list(accumulate(times.counts))
            bounds = [*(f"{float(bound)}" for bound in STEP_BOUNDS_MS), "+Inf"]
            buckets = list(zip(bounds, totals, strict=True))
            family.add_metric([kind], buckets, times.milliseconds)
        yield family


class _RequestTime:
    """A block at whose end the time of a request is observed: without a generator, as each request has one.

    Args:
        times: The histogram.
        begin: When the request began, by `time.perf_counter`.
    """

    def __init__(self, times: Histogram, begin: float) -> None:
        self._times, self._begin = times, begin

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._times.observe((time.perf_counter() - self._begin) * 1e3)


class _SummedRegistry(CollectorRegistry):
    """The metrics of a registry with the counts of other processes.

    Args:
        own: The registry.
        others: Returns the counts.
    """

    def __init__(self, own: CollectorRegistry, others: Callable[[], Counts]) -> None:
        super().__init__()
        self._own, self._others = own, others

    def collect(self) -> Iterator[Metric]:
        """Makes the metrics."""
        # without gauges, which tell of the engines: all processes would show the same ones
        left = dict(self._others())
        for family in self._own.collect():
            summed = [
                sample._replace(value=sample.value + left.pop(_key(family, sample), 0.0))
                for sample in family.samples
            ]
            # those whose labels this process has not seen
            for key in [key for key in left if key[0] == family.name]:
                summed.append(Sample(key[1], dict(key[2]), left.pop(key)))
            family.samples = summed
            yield family


def _key(family: Metric, sample: Sample) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    return family.name, sample.name, tuple(sorted(sample.labels.items()))


class ServerMetrics:
    """The metrics of a server; each server has a registry of its own."""

    def __init__(self) -> None:
        # a time of creation for each counter would double the answer
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.others: Callable[[], Counts] = dict
        """Returns the counts of other processes of the server."""
        self.shown = _SummedRegistry(self.registry, lambda: self.others())
        """The metrics of all processes."""
        self.requests = Counter(
            "maxserve_request_count",
            "HTTP requests by path and status.",
            ["path", "code"],
            registry=self.registry,
        )
        self.requests_of = functools.lru_cache(4096)(self.requests.labels)
        """The counter of a path and a status."""
        self.request_time = self._histogram("request_time", "Time of a generation.")
        self.time_to_first_token = self._histogram("time_to_first_token", "Time to first token.")
        self.queue_time = self._histogram("queue_time", "Time until a prompt is read.")
        self.between_tokens = self._histogram("itl", "Time between two tokens of a sequence.")
        self.input_tokens = Counter(
            "maxserve_num_input_tokens", "Tokens of prompts.", registry=self.registry
        )
        self.output_tokens = Counter(
            "maxserve_num_output_tokens", "Generated tokens.", registry=self.registry
        )
        self.variants = Counter(
            "maxserve_variant_requests",
            "Requests for a model with a canary, by which of the two took them, and by status.",
            ["model", "variant", "code"],
            registry=self.registry,
        )
        self.prefix_misses = Counter(
            "maxserve_prefix_misses",
            "Prompts of which the prefix cache lacked tokens, by the reason at the first of them.",
            ["reason"],
            registry=self.registry,
        )
        self.missed_tokens = Counter(
            "maxserve_prefix_missed_tokens",
            "Tokens of prompts that the prefix cache lacked, without the last token of each prompt, by reason.",
            ["reason"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"maxserve_{name}_milliseconds", text, buckets=_MILLISECONDS, registry=self.registry
        )

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a metric whose value is read when the metrics are shown.

        Args:
            name: Its name, without the prefix ``maxserve_``.
            text: Its description.
            value: Reads it.
        """
        Gauge(f"maxserve_{name}", text, registry=self.registry).set_function(value)

    def steps(self, read: Callable[[], dict[str, StepTimes]]) -> None:
        """Adds the histogram of the engine's steps, which is read when the metrics are shown.

        Args:
            read: Reads the times of the steps of each kind.
        """
        self.registry.register(_StepCollector(read))

    def request(self) -> _RequestTime:
        """Measures the time from the arrival of a request to the end of the block."""
        return _RequestTime(self.request_time, current_request().arrival_time)

    def counts(self) -> Counts:
        """The counters and histograms of this process."""
        return {
            _key(family, sample): sample.value
            for family in self.registry.collect()
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        return generate_latest(self.shown)
