"""The benchmark of drafts runs to its end on a small model, and ends with the error of a request that has failed."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from benchmarks import drafts
from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.generation.drafts.vocabularies import vocabulary_size
from tests.pipelines.test_drafts import TINY, pipeline_of


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark at the priority of other tests, with one run of each case."""

    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    monkeypatch.setattr(sys, "argv", ["drafts", str(TINY), "--rounds", "1"])


@pytest.mark.usefixtures("at_once")
def test_all_cases_of_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    drafts.main()
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split(":")[0] for line in lines]
    looked_up = [
        f"look-up, {kind}, {form}"
        for kind in ("edit", "json", "free")
        for form in ("one continuation", "trees")
    ]
    edits = [
        f"edit whose prompt {verb} the text, {form}"
        for verb in ("has", "lacks")
        for form in ("look-up", "prediction")
    ]
    assert titles == [
        "ms of a step by rows", "4 rows against 1", *looked_up, *edits,
        "draft model of a tenth, 0.7", "schema with long keys",
    ]  # fmt: skip


@pytest.mark.usefixtures("at_once")
def test_a_request_that_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it failed in the first step, it has no token to wait for."""
    pipeline: Any = pipeline_of(4)
    monkeypatch.setattr(PIPELINE_REGISTRY, "retrieve", lambda *given: (None, pipeline))
    monkeypatch.setattr(drafts, "step_times", lambda *given: {1: 1.0, 4: 1.0})
    vocabulary = vocabulary_size(pipeline.pipeline_config)
    for kind in ("edit", "json", "free"):
        prompt, answer = drafts.texts(pipeline, kind)
        assert 0 <= min(*prompt, *answer) and max(*prompt, *answer) < vocabulary
    monkeypatch.setattr(drafts, "texts", lambda *given: ([5, vocabulary], [7] * 9))
    with pytest.raises(Exception, match=str(vocabulary)):
        drafts.main()
