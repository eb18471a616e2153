"""Spans of time: nested, closed in order, logged only where profiling is on."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from max._config import flags
from max.profiler import Tracer, is_profiling_enabled, traced


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="max.profiler")
    return lambda: [record.getMessage().rsplit(":", 1)[0] for record in caplog.records]


def test_spans_close_from_the_inside(said) -> None:
    with flags.override(MAX_PROFILE=True):
        assert is_profiling_enabled()
        with Tracer("request") as tracer:
            tracer.push("tokens")
            tracer.push()
            tracer.pop()
            tracer.next("model")
            tracer.mark()
            tracer.push("layer")
    assert said() == ["  tokens", "  model so far", "    layer", "  model", "request"]


def test_nothing_is_said_without_profiling(said) -> None:
    with flags.override(MAX_PROFILE=False), Tracer("request") as tracer:
        tracer.push("inner")
        tracer.mark()
        tracer.next("other")
    assert said() == [] and not is_profiling_enabled()


def test_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="max.profiler")
    with flags.override(MAX_PROFILE=True), Tracer("nap"):
        time.sleep(0.02)
    (record,) = caplog.records
    assert 20 <= float(record.getMessage().split()[-2]) < 2000


def test_an_exception_is_named_and_goes_on(said) -> None:
    with flags.override(MAX_PROFILE=True), pytest.raises(KeyError), Tracer("lookup"):
        raise KeyError("x")
    assert said() == ["lookup (KeyError)"]


def test_functions_and_coroutines(said) -> None:
    @traced
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    @traced(message="waiting", color="red")
    async def later(x: int) -> int:
        return x + 1

    assert asyncio.iscoroutinefunction(later) and double.__doc__ == "Twice."
    with flags.override(MAX_PROFILE=True):
        assert double(4) == 8 and asyncio.run(later(1)) == 2
    assert double(5) == 10
    assert said() == ["double", "waiting"]


def test_an_empty_stack() -> None:
    tracer = Tracer()
    with pytest.raises(IndexError):
        tracer.pop()
    with pytest.raises(IndexError):
        tracer.next("x")
    with pytest.raises(AssertionError, match="no span is open"):
        tracer.mark()


def test_what_is_left_open_closes_with_its_tracer(said) -> None:
    with flags.override(MAX_PROFILE=True):
        tracer = Tracer("left")
        tracer.push("inner")
        del tracer
    assert said() == ["  inner", "left"]
