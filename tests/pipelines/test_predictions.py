"""Drafts of predictions: what is found in them, that texts do not depend on them, and what is counted."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import SamplingParams
from max.pipelines import TextContext
from max.pipelines.core.draft_tree import depths_of, grown_tree, right_path
from max.pipelines.core.exceptions import InputError
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.drafter import DraftersInTurn
from max.pipelines.generation.drafts.edits import LONGEST_CHANGE, LONGEST_RUN, MOST_CHANGES
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.process.arrivals import Arrival
from max.pipelines.generation.process.commands import GenerationRequest, Sampling
from max.pipelines.generation.process.events import PredictionVerified, TokensGenerated
from max.pipelines.generation.process.service import TextWork
from tests.pipelines.test_drafts import generated, kinds_of_requests, pipeline_of, requests

Tokens = list[int]


def context(prediction: Tokens, answer: Tokens = (), prompt: Tokens = (7,)) -> TextContext:  # pyright: ignore
    made = TextContext(
        tokens=np.array(prompt), max_length=9999, prediction=PredictedText(prediction)
    )
    for token in answer:
        made.update(token)
    return made


def grown(one: TextContext, tokens: Tokens) -> TextContext:
    for token in tokens:
        one.update(token)
    return one


def places_of(text: Tokens, run: Tokens) -> Tokens:
    """The places of a text after a run of tokens, without the end."""
    size = len(run)
    return [place for place in range(size, len(text)) if text[place - size : place] == run]


TOKENS = st.lists(st.integers(0, 4), max_size=50)


@settings(max_examples=300, deadline=None)
@given(text=TOKENS, answer=st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_the_first_look_up(text: Tokens, answer: Tokens) -> None:
    """Of an answer that begins otherwise: after the longest of all runs that end it, at the first place."""
    answer = [9] * 5 + answer
    drafter, one = PredictionDrafter(), grown(context(text), answer)
    proposed = list(drafter.propose(one, 9))
    runs = (length for length in range(LONGEST_RUN, 0, -1) if places_of(text, answer[-length:]))
    if (length := next(runs, 0)) == 0:
        assert drafter.kind(one) == 0 or not proposed, "a guess, or the end of the text"
        return
    place, *others = places_of(text, answer[-length:])
    assert proposed == text[place : place + 9] and drafter.kind(one) == length.bit_length() < 8
    if length > 1:
        others += [n for n in places_of(text, answer[1 - length :]) if n not in (place, *others)]
    found = dict.fromkeys(tuple(text[n : n + 9]) for n in others)
    assert drafter.alternatives(one, 9) == [list(each) for each in found][:3]


@settings(max_examples=300, deadline=None)
@given(
    text=TOKENS, answer=st.lists(st.integers(0, 5), max_size=50), takes=st.lists(st.integers(1, 5))
)
def test_a_match_is_the_kind_of_the_draft_that_is_proposed_then(
    text: Tokens, answer: Tokens, takes: Tokens
) -> None:
    drafter, one, place = PredictionDrafter(), context(text), 0
    for count in [0, *takes]:
        grown(one, answer[place : place + count])
        place += count
        before = drafter._alignments.get(one.request_id)
        matched = drafter.match(one, one.all_tokens)
        assert drafter._alignments.get(one.request_id) is before, "nothing is kept of it"
        proposed = list(drafter.propose(one, 4))
        assert len(proposed) <= 4 and {*proposed} <= {*text, *answer}
        assert matched == (drafter.kind(one) if proposed else None)


def steps(text: Tokens, answer: Tokens, most: int) -> tuple[int, int]:
    """The steps that an answer takes with drafts of a length, and the number of wrong drafted tokens."""
    drafter, one, count, wrong = PredictionDrafter(), context(text), 0, 0
    while (done := len(one.generated_tokens)) < len(answer):
        tokens, rest = list(drafter.propose(one, most)), answer[done:]
        pairs = [*zip(tokens, rest, strict=False)]
        right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        wrong += len(pairs) - right
        grown(one, rest[: right + 1])
        count += 1
    return count, wrong


@settings(max_examples=200, deadline=None)
@given(text=TOKENS, most=st.integers(1, 9))
def test_a_copy_has_no_wrong_draft(text: Tokens, most: int) -> None:
    """However often its tokens are repeated: the place that the answer has reached is known."""
    assert steps(text, text, most) == (-(-len(text) // (most + 1)), 0)


@pytest.mark.parametrize("new", [[], [90], [90, 91], [90, 91, 92, 93]])
@pytest.mark.parametrize("old", [[50], [50, 51], [50, 51, 52, 53]])
def test_a_change_is_made_again(old: Tokens, new: Tokens) -> None:
    """A word of 40 places with different tokens around it: only the first ones are drafted as they were."""
    draw = random.Random(1)
    parts = [[draw.randrange(40) for _ in range(draw.randrange(6, 12))] for _ in range(41)]

    def joined(word: Tokens) -> Tokens:
        return [*parts[0], *(token for part in parts[1:] for token in (*word, *part))]

    text, answer = joined(old), joined(new)
    count, wrong = steps(text, answer, 8)
    assert wrong < 40 and count < len(answer) / 9 + 12
    # a change of a longer word is not known again, and the text is followed after it
    count, wrong = steps(joined([50, 51, 52, 53, 54]), joined([90]), 8)
    assert wrong > 40


def test_a_change_ends_where_the_answer_leaves_its_tokens() -> None:
    text = [10, 50, 11, 12, 13, 50, 14, 15, 16, 50, 17, 18, 19, 50, 20]
    drafter, one = PredictionDrafter(), context(text)
    assert list(drafter.propose(one, 2)) == [10, 50] and drafter.alternatives(one, 2) == []
    drafter.propose(grown(one, [10, 90]), 9)
    # as if 90 stood for 50, or for nothing, or for more
    assert drafter.kind(one) == 0 and list(drafter.propose(one, 3)) == [11, 12, 13]
    assert drafter.alternatives(one, 2) == [[50, 11], [12, 13], [13, 50]]
    assert list(drafter.propose(grown(one, [11, 12]), 5)) == [13, 90, 14, 15, 16]
    # within the change: its rest, then the text
    drafter.propose(grown(one, [13]), 5)
    assert list(drafter.propose(grown(one, [90]), 3)) == [14, 15, 16] and drafter.kind(one) == 3
    assert list(drafter.propose(grown(one, [14, 15, 16, 50, 17]), 4)) == [18, 19, 50, 20]


def test_a_draft_may_end_within_a_change() -> None:
    text = [10, 50, 11, 12, 13, 50, 14, 15, 90, 16]
    drafter, one = PredictionDrafter(), grown(context(text), [10, 90, 91, 92, 11, 12])
    drafter.propose(one, 1)
    assert list(drafter.propose(grown(one, [13, 90, 91]), 3)) == [92, 14, 15]
    assert list(drafter.propose(grown(one, [92]), 2)) == [14, 15]


def test_a_known_change_that_goes_on_otherwise() -> None:
    text = [10, 50, 11, 12, 50, 13, 14, 15]
    drafter, one = PredictionDrafter(), grown(context(text), [10, 90, 91, 11])
    assert list(drafter.propose(one, 4)) == [12, 90, 91, 13]
    assert list(drafter.propose(grown(one, [12, 90, 77]), 2)) == [14, 15] and not drafter.kind(one)


def test_tokens_that_were_left_out() -> None:
    """The run after them may begin before them: the change begins where the answer left the text."""
    text = [1, 2, 9, 1, 2, 4, 5, 9, 1, 2, 6]
    drafter, one = PredictionDrafter(), grown(context(text), [1, 2, 4])
    assert list(drafter.propose(one, 4)) == [5, 6]


def test_other_places_have_the_changes_too() -> None:
    text = [10, 50, 11, 1, 2, 60, 1, 2, 50, 1, 2, 62]
    drafter, one = PredictionDrafter(), grown(context(text), [10, 90, 11])
    drafter.propose(one, 1)
    assert drafter.propose(grown(one, [8, 8, 8, 8, 8, 1, 2]), 1) == [60]
    assert drafter.alternatives(one, 1) == [[90], [62]]


def test_another_text_is_not_followed() -> None:
    text = [*range(10, 40)]
    drafter, one = PredictionDrafter(), grown(context(text), [10, 90])
    for number in range(1, LONGEST_CHANGE):
        assert list(drafter.propose(one, 1)) == [11 + number]
        grown(one, [90 + number])
    assert drafter.propose(one, 1) == [] and drafter.match(one, one.all_tokens) is None
    assert list(drafter.propose(grown(one, [30]), 2)) == [31, 32] and drafter.kind(one) == 1


def test_of_equal_runs_it_is_the_next_one() -> None:
    text = [1, 2, 3, 60, 1, 2, 3, 70, 2, 3, 80, 1, 2, 3, 90, 3, 95, 2, 3, 61]
    drafter, one = PredictionDrafter(), grown(context(text), [7, 1, 2, 3])
    assert drafter.propose(one, 1) == [60]
    # the other runs of 1, 2, 3 in order, then those of 2, 3
    assert drafter.alternatives(one, 2) == [[70, 2], [90, 3], [80, 1]]
    later = grown(context(text), [5, 5, 5, 5, 90, 3, 95])
    drafter.propose(later, 1)
    assert drafter.propose(grown(later, [8, 2, 3]), 1) == [61], "from the place that was reached on"
    assert drafter.propose(grown(later, [8, 1, 2, 3]), 1) == [60], "there is none after it"
    for each in (one, later, one):
        drafter.forget(each.request_id)
    assert not drafter._alignments


def test_an_answer_goes_back() -> None:
    """After tokens were removed the text is followed from an earlier place."""
    line = [1, 2, 3, 4]
    text = line * 6 + [9]
    drafter, one = PredictionDrafter(), grown(context(text), (line * 6)[:18])
    assert list(drafter.propose(one, 9)) == [3, 4, 1, 2, 3, 4, 9]
    one.truncate(1 + 6)
    drafter.rewind(one)
    assert list(drafter.propose(one, 20)) == [3, 4, *line * 4, 9]


def test_changes_are_bounded() -> None:
    draw = random.Random(0)
    text = [
        token
        for word in range(200)
        for token in (100 + word, *(draw.randrange(90) for _ in range(6)))
    ]
    answer = [token + 1000 if token >= 100 else token for token in text]
    drafter, one = PredictionDrafter(), context(text)
    for token in answer:
        drafter.propose(grown(one, [token]), 1)
    (alignment,) = drafter._alignments.values()
    assert len(alignment.changes) == MOST_CHANGES and 299 in alignment.changes


def test_what_is_no_prediction() -> None:
    with pytest.raises(InputError, match=r"shape \(1, 2\); expected one dimension"):
        PredictedText([[1, 2]])  # type: ignore[list-item]
    with pytest.raises(InputError, match="has the token -3; tokens are 0 or greater"):
        PredictedText([1, -3])


def test_a_request_without_a_prediction_is_left_to_others() -> None:
    drafter = PredictionDrafter()
    one = TextContext(tokens=np.array([1, 2, 1]), max_length=9)
    assert drafter.propose(one, 3) == () and drafter.match(one, one.all_tokens) is None
    assert drafter.alternatives(one, 3) == [] and drafter.kind(one) == 0
    drafter.observe(one, [0])
    assert not drafter._alignments
    for empty in (context([]), context([], [5])):
        assert drafter.propose(empty, 3) == [] and drafter.match(empty, empty.all_tokens) is None


def counted_steps(text: Tokens, answer: Tokens, most: int, trees: bool) -> tuple[int, int]:
    """What is counted of a text of different tokens, and what is expected: by the tokens, which tell their places."""
    drafter, one, prediction = PredictionDrafter(), context(text), PredictedText(text)
    one.prediction = prediction
    right_tokens, drafted_tokens, counts = set[int](), set[int](), np.zeros(2, int)
    draw = random.Random(len(text))
    while (done := len(one.generated_tokens)) < len(answer):
        chains = [list(drafter.propose(one, most))]
        chains += map(list, drafter.alternatives(one, most)) if trees and chains[0] else []
        # other places may be likelier than the first one, which then is no branch
        begin = draw.randrange(len(chains)) if draw.random() < 0.2 else 0
        tree, parents = grown_tree(chains := chains[begin:])
        one.set_draft(tree, parents)
        # what the model chooses after each row of the tree
        rest = [*answer[done:], -1]
        chosen = [rest[depth] if depth < len(rest) else -1 for depth in (0, *depths_of(parents))]
        path = right_path(tree, parents, chosen)
        tokens = [tree[index] for index in path]
        followed = next(chain for chain in chains if chain[: len(tokens)] == tokens)
        right_tokens |= {*tokens} & {*text}
        drafted_tokens |= {*followed} & {*text}
        if tree:
            drafter.observe(one, path)
            counts += prediction.take_counts()
        grown(one, rest[: min(len(path) + 1, len(answer) - done)])
    assert [*counts] == [len(right_tokens), len(drafted_tokens - right_tokens)]
    return int(counts[0]), int(counts[1])


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 60),
    edits=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 6), st.integers(0, 6)), max_size=5),
    most=st.integers(1, 9),
    trees=st.booleans(),
)
def test_each_token_of_a_prediction_counts_once(
    size: int, edits: list[tuple[int, int, int]], most: int, trees: bool
) -> None:
    """A token is right if it ever was, of a tree in the branch that was followed; new tokens of a change are none."""
    text = random.Random(size).sample(range(100, 1000), size)
    answer, new = list(text), iter(range(2000, 3000))
    for place, removed, added in edits:
        answer[place : place + removed] = [next(new) for _ in range(added)]
    accepted, rejected = counted_steps(text, answer, most, trees)
    assert accepted + rejected <= size
    if answer == text:
        # a step with a whole draft gives a token besides
        assert (accepted, rejected) == (size - size // (most + 1), 0)


def test_a_token_that_is_right_after_all_is_no_rejected_one() -> None:
    text = PredictedText([10, 11, 12, 13])
    text.count([0], [1, 2, -1])
    assert text.take_counts() == (1, 2) and text.take_counts() == (0, 0)
    text.count([2, 0, -1], [3, 1])
    assert text.take_counts() == (1, 0)
    text.count([1], [0])
    assert text.take_counts() == (1, -1)


# Engines -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Any:
    return pipeline_of(0)


@pytest.fixture(scope="module")
def drafting() -> Any:
    pipeline = pipeline_of(16)
    only_predictions(pipeline)
    return pipeline


def only_predictions(pipeline: Any) -> None:
    """Leaves the drafts of predictions, so that they are not hidden by others."""
    (drafter, *_) = [each for _, each in pipeline.replicas[0].drafts._drafter.parts]
    assert isinstance(drafter, PredictionDrafter)
    pipeline.replicas[0].drafts._drafter = DraftersInTurn([drafter])


def predictions(kind: str, texts: list[Tokens], seed: int) -> list[Tokens]:
    """A prediction for each of some answers."""
    draw = random.Random(seed)

    def edited(text: Tokens) -> Tokens:
        text = list(text)
        for _ in range(1 + len(text) // 12):
            place = draw.randrange(len(text) + 1)
            text[place : place + draw.randrange(3)] = [draw.randrange(4096)] * draw.randrange(3)
        return text

    match kind:
        case "right":
            return texts
        case "edited":
            return [edited(text) for text in texts]
        case "of others":
            return [*texts[1:], texts[0]]
        case "one token":
            return [text[:1] * 50 for text in texts]
        case _:
            return [[draw.choice(text) for _ in range(4000)] for text in texts]


@pytest.mark.parametrize("kind", ["right", "edited", "of others", "one token", "huge"])
@pytest.mark.parametrize("kinds", ["texts", "options"])
def test_texts_do_not_depend_on_predictions(
    plain: Any, drafting: Any, kind: str, kinds: str
) -> None:
    """Greedy and sampled, with penalties, grammars, log-probabilities and minimum lengths."""

    def made(pipeline: Any) -> list[TextContext]:
        if kinds == "texts":
            return requests(pipeline, 3)
        return kinds_of_requests(pipeline, np.random.default_rng(5))

    expected = generated(plain, made(plain))
    before = np.array(drafting.draft_counts)
    contexts = made(drafting)
    for one, tokens in zip(contexts, predictions(kind, expected, 1), strict=True):
        one.prediction = PredictedText(tokens)
    assert generated(drafting, contexts) == expected
    counts = np.array([one.prediction.take_counts() for one in contexts])  # type: ignore[union-attr]
    drafted, accepted = np.array(drafting.draft_counts) - before
    # what is drafted again, and branches that were not followed, are not counted
    assert drafted > 0 and counts[:, 0].sum() <= accepted and counts.sum() <= drafted
    sizes = [len(one.prediction.tokens) for one in contexts]  # type: ignore[union-attr]
    assert all(counts.sum(1) <= sizes) and counts.min() >= 0
    if kind in ("right", "edited"):
        assert accepted > (0.9 if kind == "right" else 0.3) * drafted
        assert counts[:, 0].sum() > 0.8 * accepted
    (drafter,) = (each for _, each in drafting.replicas[0].drafts._drafter.parts)
    assert not drafter._alignments, "nothing is kept"


def test_a_right_prediction_takes_fewer_steps(
    plain: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = plain.tokenizer.encode_now("What is the capital of Norway?")
    params = SamplingParams(top_k=1, ignore_eos=True)

    def request(prediction: Tokens) -> TextContext:
        return TextContext(
            tokens=np.array(tokens), max_length=len(tokens) + 60, ignore_eos=True,
            sampling_params=params, prediction=PredictedText(prediction),
        )  # fmt: skip

    (answer,) = generated(plain, [request([])])
    model, ran = drafting.replicas[0].model, list[int]()
    execute = model.execute
    monkeypatch.setattr(model, "execute", lambda given: ran.append(1) or execute(given))
    monkeypatch.setattr(drafting.replicas[0], "loop", None)
    steps = []
    # as it is; one word changed; with a part that the answer does not have
    changed, longer = [*answer[:30], 17, *answer[31:]], [*answer[:9], *range(80), *answer[9:]]
    for prediction in ([], answer, changed, longer):
        ran.clear()
        assert generated(drafting, [request(prediction)]) == [answer]
        steps.append(len(ran))
    # the prompt gives a token, and the 59 others come by up to 17; some are branches
    assert steps[0] == 60 and max(steps[1:]) <= 12, steps


@pytest.mark.parametrize(
    "values",
    [dict(enable_in_flight_batching=True, prefill_chunk_size=16), dict(kv_cache_page_size=16)],
    ids=["chunks", "few pages"],
)
def test_predictions_in_other_configurations(plain: Any, values: dict[str, Any]) -> None:
    """With chunks of prompts beside them, and after requests have lost their pages."""
    pipeline: Any = pipeline_of(8, **values)
    only_predictions(pipeline)
    if "kv_cache_page_size" in values:
        for pool in pipeline.kv_managers[0].pages.pools:
            for _ in range(pool.num_pages - 12):
                pool._free.popitem()
            pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    expected = generated(plain, requests(plain, 8))
    tokens, counts = dict[str, Tokens](), dict[str, tuple[int, int]]()

    def add(events: Any) -> None:
        for event in events:
            if isinstance(event, TokensGenerated):
                tokens[event.request_id] = tokens.get(event.request_id, []) + [*event.tokens]

    # what is sent while calls of several steps run
    channel: Any = SimpleNamespace(send_all=add)
    work = TextWork(pipeline, limits_of(pipeline), channel, None)
    contexts = requests(pipeline, 8)
    for one, prediction in zip(contexts, predictions("edited", expected, 2), strict=True):
        one.prediction = PredictedText(prediction)
        work.obey(Arrival(GenerationRequest.of(one), one), False)
    while not work.idle:
        for event in work.step():
            add([event])
            if isinstance(event, PredictionVerified):
                accepted, rejected = counts.get(event.request_id, (0, 0))
                counts[event.request_id] = (
                    accepted + event.accepted_tokens,
                    rejected + event.rejected_tokens,
                )
                # beside tokens of its step, so that a request that ends has its counts
                assert event.accepted_tokens or event.rejected_tokens
    assert [tokens[f"{number}"] for number in range(7)] == expected
    drafted, accepted = pipeline.draft_counts
    assert drafted > accepted > 0
    assert 0.8 * accepted < sum(a for a, _ in counts.values()) <= accepted
    assert sum(a + r for a, r in counts.values()) <= drafted
    assert min(r for _, r in counts.values()) >= 0
    assert not work._predictions
    if "kv_cache_page_size" in values:
        assert work._engine.scheduler.preemptions > 0
    work.end(None)


def test_a_request_keeps_its_prediction(plain: Any, drafting: Any) -> None:
    """On its way to an engine, to the next one after that, and back."""
    request = GenerationRequest(
        "a", (1, 2, 3), 60, predicted_tokens=(4, 5, 6), sampling=Sampling(top_k=1)
    )
    one = request.to_context()
    assert one.prediction is not None and one.prediction.tokens.tolist() == [4, 5, 6]
    assert GenerationRequest.of(one) == request
    assert GenerationRequest("a", (1,), 9).to_context().prediction is None
    (answer,) = generated(plain, [replace(request, predicted_tokens=()).to_context()])
    resumed = replace(request, predicted_tokens=tuple(answer)).resumed_request(answer[:20])
    assert resumed.predicted_tokens == tuple(answer)
    one, before = resumed.to_context(), drafting.draft_counts
    engine = Engine(drafting, limits_of(drafting))
    engine.submit(one)
    while not engine.idle:
        engine.step()
    assert one.generated_tokens.tolist() == answer
    drafted, accepted = np.array(drafting.draft_counts) - before
    assert drafted == accepted >= 30
