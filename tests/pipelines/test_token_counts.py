"""Counts of the tokens of answers that grow, are cut, and are drafted."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest

from max.interfaces import SamplingParams
from max.pipelines.core.text_context import TextContext
from max.pipelines.core.token_counts import TokenCounts
from max.pipelines.generation.drafts.drafted_rows import _Row
from max.pipelines.sampling.graph import penalty_inputs

PENALTIES = SamplingParams(frequency_penalty=0.5, max_new_tokens=2000)


def context_of(params: SamplingParams = PENALTIES) -> TextContext:
    return TextContext(tokens=np.array([3, 3, 7]), max_length=4000, sampling_params=params)


def pairs(contexts: list[Any]) -> list[dict[int, int]]:
    """The counts of each request, from the inputs of the graph."""
    ids, counts, offsets = (tensor.to_numpy().tolist() for tensor in penalty_inputs(contexts)[:3])
    found = []
    for first, end in zip(offsets, offsets[1:], strict=False):
        own = dict(zip(ids[first:end], counts[first:end], strict=True))
        assert len(own) == end - first
        found.append(own)
    return found


def expected(tokens: Any) -> dict[int, int]:
    values, counts = np.unique(tokens, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_counts_of_growing_answers(seed: int) -> None:
    """Also after tokens were removed and others came, several at once, and of rows that verify a draft."""
    draw = random.Random(seed)
    batch = [context_of(), context_of(SamplingParams()), context_of()]
    for _ in range(150):
        for context in batch:
            for _ in range(draw.randrange(4)):
                context.update(draw.randrange(draw.choice([4, 300])))
            if draw.random() < 0.05:
                context.truncate(draw.randrange(3, context.current_length + 1))
                for _ in range(draw.randrange(9)):
                    context.update(draw.randrange(300))
        first, none, last = pairs(batch)
        assert first == expected(batch[0].generated_tokens) and none == {}
        assert last == expected(batch[2].generated_tokens)
        drafted = [draw.randrange(300) for _ in range(3)]
        rows = [_Row(batch[0], drafted[:size], None) for size in range(4)]
        assert pairs(cast(Any, rows)) == [expected(row.generated_tokens) for row in rows]
    assert pairs([]) == []


def test_each_token_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    add = TokenCounts._add

    def counted(self: TokenCounts, tokens: Any) -> None:
        read.append(len(tokens))
        add(self, tokens)

    monkeypatch.setattr(TokenCounts, "_add", counted)
    monkeypatch.setattr(np, "unique", None)
    context = context_of()
    for step in range(1000):
        context.update(step % 50)
        penalty_inputs([context])
    assert sum(read) == 1000 and len(read) == 1000


def test_requests_of_other_classes_are_counted_too() -> None:
    class Own:
        sampling_params = PENALTIES
        generated_tokens = np.array([5, 5, 9])

    assert pairs([Own()]) == [{5: 2, 9: 1}]
