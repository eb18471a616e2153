"""Answers with grammars of models whose end tokens have a text that the answers may have too."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from max.pipelines import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.grammar_steps import GrammarSteps
from max.pipelines.structured import grammar, step_masks
from max.pipelines.structured.constraint import Constraints
from tests.pipelines.test_grammar_steps import OPTIONS, answers, pipeline, request, single_steps

__all__ = ["pipeline"]


@pytest.fixture
def plain_ends(pipeline: Any) -> set[int]:
    """End tokens of which most have a text and are not special, and one that the tokenizer lacks."""
    ordinary = Constraints(pipeline.tokenizer.delegate).ordinary_tokens(
        pipeline.tokenizer.eos_token_ids
    )
    draw = random.Random(7).sample(ordinary.nonzero()[0].tolist(), 800)
    return {*pipeline.tokenizer.eos_token_ids, *draw, 99_999}


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_answers_end_at_end_tokens_whose_text_they_may_have(
    pipeline: Any, plain_ends: set[int], options: dict[str, Any]
) -> None:
    patterns = [
        r"[a-z ]{20,60}Q",
        r'"([^"\\\x00-\x1f]){0,40}"',
        r"[a-z]{2,4} [0-9]{3}([.,] [a-z]{2,9}){0,4}",
    ]

    def contexts() -> list[TextContext]:
        made = [
            request(pipeline, n, grammar.of_regex(own), **options) for n, own in enumerate(patterns)
        ]
        for context in made:
            context.eos_token_ids = set(plain_ends)
        return made

    found = answers(pipeline, contexts())
    assert single_steps(pipeline, contexts()) == found
    for tokens, pattern in zip(found, patterns, strict=True):
        text = pipeline.tokenizer.decode_now(tokens[:-1], skip_special_tokens=False)
        assert tokens[-1] in plain_ends and not plain_ends & {*tokens[:-1]}, text
        assert re.fullmatch(pattern, text), text


def test_end_tokens_are_allowed_where_the_answer_may_end(
    pipeline: Any, plain_ends: set[int]
) -> None:
    tokenizer = pipeline.tokenizer
    constraints, ends = Constraints(tokenizer.delegate), sorted(plain_ends - {99_999})
    assert not constraints.ordinary_tokens(plain_ends)[ends].any()
    mask = np.zeros((1, constraints.words()), np.int32)
    for pattern, allowed in ((r"Q[a-z]+", False), (r"Q[a-z]*", True)):
        context = request(pipeline, 0, grammar.of_regex(pattern))
        context.eos_token_ids = plain_ends
        constraints.begin(context)
        first = tokenizer.encode_now("Q", add_special_tokens=False).tolist()
        assert context.matcher is not None and context.matcher.consume_token(first[0])
        step_masks.fill(context.matcher, mask[0])
        assert (step_masks.unpack_mask(mask, len(tokenizer.delegate))[0][ends] == allowed).all()


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        # the tokenizer has one token for a line break
        ('start: "Q\\nQ"', "doesn't satisfy the grammar"),
        ('start: "Q" <[2]> "Q"', "needs the end token 2 within the answer"),
        ('start: "Q" <[2]>', ""),
    ],
)
def test_a_grammar_with_end_tokens_in_it(pipeline: Any, own: str, problem: str) -> None:
    line_break = pipeline.tokenizer.encode_now("\n", add_special_tokens=False).tolist()
    assert len(line_break) == 1
    for single in (False, True):
        context = request(pipeline, 0, grammar.of_lark(own), temperature=0.0)
        context.eos_token_ids = {2, *line_break}
        engine = Engine(pipeline, limits_of(pipeline))
        engine.submit(context)
        with pytest.MonkeyPatch.context() as patch:
            if single:
                patch.setattr(GrammarSteps, "plan", lambda *given: None)
            while not engine.idle:
                engine.step()
        assert problem in str(context.failure or "")
        assert bool(problem) == (context.failure is not None)
        assert len(context.generated_tokens) == 2


@pytest.mark.parametrize("kind", ["byte pairs", "unigram"])
def test_end_tokens_of_each_kind_of_tokenizer(kind: str) -> None:
    texts = ["[U]", *"abcQ[]END", "ab", "bc"]
    numbers = {text: number for number, text in enumerate(texts)}
    if kind == "byte pairs":
        tokenizer = Tokenizer(models.BPE(numbers, [("a", "b"), ("b", "c")]))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.Unigram([(text, -1.0) for text in texts], 0, False))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["[END]", "[STOP]"])
    delegate = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    constraints = Constraints(delegate)
    ends = [numbers["ab"], len(texts)]
    vocabulary = constraints._vocabulary(ends)
    mask = np.zeros((1, constraints.words()), np.int32)
    for pattern, own in ((r"Q[\[\]A-Za-c]{9,}", set()), (r"Q[\[\]A-Za-c]*", {*ends})):
        matcher = grammar.matcher_of(vocabulary, grammar.of_regex(pattern))
        assert matcher.consume_token(numbers["Q"])
        step_masks.fill(matcher, mask[0])
        allowed = {*step_masks.unpack_mask(mask, len(delegate))[0].nonzero()[0].tolist()}
        assert allowed & {*ends} == own
        # the text of another token that is not special stays one of answers
        assert {numbers["a"], numbers["bc"], len(texts) + 1} <= allowed
    assert not delegate.all_special_ids
