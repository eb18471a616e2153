"""Grammars that are slow to compile end with an error, and hold up nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from max.serve import grammar_threads
from max.serve.errors import ApiError
from max.serve.grammar_threads import in_grammar_thread


def test_what_is_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_threads, "COMPILE_S", 0.05)
    go, compiled = threading.Event(), []

    def compile_slowly(number: int) -> int:
        assert go.wait(60)
        compiled.append(number)
        return number

    async def run() -> list[int | BaseException]:
        slow = [in_grammar_thread(compile_slowly, number) for number in range(4)]
        answers = await asyncio.gather(*slow, return_exceptions=True)
        # threads of other work are free
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 3), 60) == 3
        go.set()
        while len(compiled) < 2:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(grammar_threads, "COMPILE_S", 60.0)
        assert await in_grammar_thread(compile_slowly, 9) == 9
        return answers

    answers = asyncio.run(run())
    assert [each.status for each in answers if isinstance(each, ApiError)] == [400, 400, 503, 503]
    assert "Retry-After" in answers[2].headers  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(compiled) == [0, 1, 9], "one that had to wait for too long is never compiled"


def test_errors_of_grammars_pass_through() -> None:
    def fail() -> None:
        raise ApiError("no", param="x")

    with pytest.raises(ApiError, match="no"):
        asyncio.run(in_grammar_thread(fail))
