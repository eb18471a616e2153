"""Streams of one engine in another thread: each ends alone, and closing waits for the engine."""

from __future__ import annotations

import pytest

from max.pipelines.generation.process.commands import Shutdown
from max.pipelines.generation.process.remote import RemoteGeneration
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected
from tests.pipelines.test_engine_process import Served


def test_a_stream_that_is_closed_leaves_the_others() -> None:
    served = Served(CountingPipeline(seconds=0.002))
    remote = RemoteGeneration(served.channel)
    closed, other = context([1], 100), context([2], 40)
    first, second = remote.stream([closed]), remote.stream([other])
    next(first)
    tokens = [*next(second).tokens]
    first.close()
    assert remote._calls.get(closed.request_id.value) is None, "nothing is kept for it"
    tokens += [token for output in second for token in output.tokens]
    assert tokens == expected([2], 40)
    remote.close()
    served.join()


def test_closing_waits_until_the_engine_has_stopped() -> None:
    served = Served(CountingPipeline(seconds=0.05))
    remote = RemoteGeneration(served.channel)
    stream = remote.stream([context([1], 50)])
    next(stream)
    remote.close()
    assert not remote._reader.is_alive()
    with pytest.raises(OSError):
        served.channel.send(Shutdown())
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        remote.run([context([1], 1)])
    served.join()
