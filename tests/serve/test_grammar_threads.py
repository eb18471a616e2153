"""Grammars that are slow to compile end with an error, and hold up nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from max.pipelines.core.exceptions import UserError
from max.pipelines.generation.process.events import ErrorInfo
from max.pipelines.structured import compile_threads
from max.pipelines.structured.compile_threads import MOST_OVERDUE
from max.serve.errors import ApiError
from max.serve.http.error_responses import as_api_error
from max.serve.requests.threads import in_grammar_thread


def test_what_is_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "COMPILE_S", 0.1)
    go, count = threading.Event(), MOST_OVERDUE + 4

    async def run() -> list[bool | BaseException]:
        slow = [in_grammar_thread(go.wait, 60) for _ in range(count)]
        answers = await asyncio.gather(*slow, return_exceptions=True)
        # threads of other work are free
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 3), 60) == 3
        go.set()
        return answers

    answers = asyncio.run(run())
    assert all(isinstance(each, UserError) for each in answers)
    errors = [as_api_error(each) for each in answers if isinstance(each, UserError)]
    # those of a worker come over a pipe
    pipe = [ErrorInfo.of(each).to_exception() for each in answers if isinstance(each, UserError)]
    assert [(e.status, e.code, e.message) for e in errors] == [
        (e.status, e.code, e.message) for e in map(as_api_error, pipe)
    ]
    assert [each.status for each in errors] == [400] * 2 + [503] * (count - 2)
    assert {each.code for each in errors} == {"grammar_too_slow", "grammars_wait"}
    assert "Retry-After" in errors[-1].headers


def test_errors_of_grammars_pass_through() -> None:
    def fail() -> None:
        raise ApiError("no", param="x")

    with pytest.raises(ApiError, match="no"):
        asyncio.run(in_grammar_thread(fail))
