"""Several rounds of a draft model in one call: texts are those of plain steps, and Python does not run in between."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from max._backends.cpu.runtime.executor import Executor
from max.driver import Tensor
from max.engine import InferenceSession
from max.engine.joined_models import JoinedModels
from max.graph import DeviceRef
from max.interfaces import (
    GenerationStatus,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
)
from max.pipelines import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.draft_model import DraftedText, ModelDrafter
from max.pipelines.generation.drafts.draft_rounds import (
    DraftRounds,
    RoundPlan,
    round_graph,
    rows_graph,
)
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.sampling.inputs import step_seed
from tests.pipelines.test_draft_models import pipeline_of, released, smaller, texts
from tests.pipelines.test_drafts import TINY, generated, requests

__all__ = ["smaller"]


@pytest.fixture(scope="module")
def plain():
    return pipeline_of(max_num_steps=1)


@pytest.fixture(scope="module")
def drafting(smaller):
    return pipeline_of(smaller, num_speculative_tokens=4, max_num_steps=8)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, smaller) -> Path:
    """A draft model of random weights, whose tokens are hardly ever right, and of tokens that the model lacks."""
    folder = tmp_path_factory.mktemp("wrong") / "model"
    shutil.copytree(smaller, folder)
    draw, file = np.random.default_rng(0), folder / "model.safetensors"
    weights = {
        name: draw.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in load_file(file).items()
    }
    config = json.loads((folder / "config.json").read_text())
    embedding = weights["model.embed_tokens.weight"]
    more = draw.normal(0, 0.05, (64, embedding.shape[1])).astype(np.float32)
    weights["model.embed_tokens.weight"] = np.concatenate([embedding, more])
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": len(embedding) + len(more)})
    )
    save_file(weights, file)
    return folder


@pytest.fixture
def ran(monkeypatch) -> list[tuple[RoundPlan, Any]]:
    """What was planned, and what came of it."""
    calls, run = list[tuple[RoundPlan, Any]](), DraftRounds.run

    def recorded(self, batch, plan, *given):
        found = run(self, batch, plan, *given)
        calls.append((plan, found))
        return found

    monkeypatch.setattr(DraftRounds, "run", recorded)
    return calls


def greedy(pipeline, text: str, new: int, **values) -> TextContext:
    tokens = pipeline.tokenizer.encode_now(text)
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + new,
        sampling_params=SamplingParams(top_k=1, ignore_eos=True), **values,
    )  # fmt: skip


def run(pipeline, steps: int, *contexts: TextContext):
    return pipeline.execute(TextGenerationInputs([{c.request_id: c for c in contexts}], steps))


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_of_plain_steps(plain, drafting, ran, seed: int) -> None:
    """Greedy and sampled, of several requests that end at other places."""
    assert texts(drafting, requests(drafting, seed)) == generated(plain, requests(plain, seed))
    released(drafting)
    assert sum(found.rounds > 1 for _, found in ran) > 3
    assert any(len(found.tokens) > 1 for _, found in ran)
    rights = {int(right) for _, found in ran for right in found.num_accepted.ravel()}
    assert rights == {0, 1, 2, 3, 4}


def test_a_draft_model_that_is_always_right(plain, ran) -> None:
    """Each round gives all its drafted tokens and one more, up to the last place."""
    pipeline: Any = pipeline_of(TINY, num_speculative_tokens=3, max_num_steps=8)
    for new in (1, 2, 6, 33, 120):
        one = greedy(pipeline, "one two three four five", new)
        assert texts(pipeline, [one]) == generated(
            plain, [greedy(plain, "one two three four five", new)]
        )
    assert {int(right) for _, found in ran for right in found.num_accepted.ravel()} == {3}
    # the last call: of 117 tokens after the first one and a plain step
    assert max(found.rounds for _, found in ran) == 8
    assert texts(pipeline, requests(pipeline, 5)) == generated(plain, requests(plain, 5))
    released(pipeline)


@pytest.mark.parametrize("few", [None, 12])
def test_a_draft_model_that_is_never_right(plain, wrong, ran, few: int | None) -> None:
    """Also with few pages: of those that a call may write, those that it does not need go back."""
    pipeline: Any = pipeline_of(
        wrong, num_speculative_tokens=5, max_num_steps=8, kv_cache_page_size=16
    )
    for pool in pipeline.kv_managers[1].pages.pools if few else ():
        for _ in range(pool.num_pages - few):
            pool._free.popitem()
        pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    engine = Engine(pipeline, limits_of(pipeline))
    contexts = requests(pipeline, 7)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    found = [one.generated_tokens.tolist() for one in contexts]
    assert found == generated(plain, requests(plain, 7))
    accepted = np.concatenate([found.num_accepted.ravel() for _, found in ran])
    assert len(accepted) > 20 and accepted.mean() < 0.3
    if few:
        assert engine.scheduler.preemptions > 0
    else:
        released(pipeline)


def test_swapped_pages_and_reused_prefixes(plain, smaller, ran) -> None:
    pipeline: Any = pipeline_of(
        smaller, num_speculative_tokens=4, max_num_steps=8, kv_cache_page_size=16,
        enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=0.01,
    )  # fmt: skip
    for pool in pipeline.kv_managers[1].pages.pools:
        for _ in range(pool.num_pages - 12):
            pool._free.popitem()
        pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    for seed in (8, 8, 9):
        engine = Engine(pipeline, limits_of(pipeline))
        contexts = requests(pipeline, seed)
        for one in contexts:
            engine.submit(one)
        while not engine.idle:
            engine.step()
        found = [one.generated_tokens.tolist() for one in contexts]
        assert found == generated(plain, requests(plain, seed))
    assert ran


def test_tokens_that_end_a_sequence_end_the_call(plain, drafting, ran) -> None:
    """At any place of a round; the other sequence goes on with the next call."""
    text = "one two three four five six seven one two three"
    ((whole,),) = [generated(plain, [greedy(plain, text, 40)])]
    (other,) = generated(plain, [greedy(plain, "x = [1, 2", 60)])
    for place in range(2, 30, 3):
        end = whole[place]
        first = greedy(drafting, text, 40, eos_token_ids={end})
        first.sampling_params = SamplingParams(top_k=1)
        second = greedy(drafting, "x = [1, 2", 60)
        assert texts(drafting, [first, second]) == [whole[: whole.index(end) + 1], other]
        assert first.status is GenerationStatus.END_OF_SEQUENCE
    run_of_two = greedy(drafting, text, 40, eos_sequences=[whole[12:14]])
    run_of_two.sampling_params = SamplingParams(top_k=1)
    expected = next(n for n in range(2, 40) if whole[n - 2 : n] == whole[12:14])
    assert texts(drafting, [run_of_two]) == [whole[:expected]]
    released(drafting)


def test_what_runs_one_step_a_call(plain, drafting, ran) -> None:
    """Requests with penalties, biases, a least length, log-probabilities, or logits processors."""
    text = "one two three four five six seven one two three"
    values: list[dict[str, Any]] = [
        dict(frequency_penalty=0.4), dict(min_new_tokens=30), dict(logits_processors=[lambda inputs: None]),
    ]  # fmt: skip
    for own in values:
        contexts = [greedy(used, text, 30) for used in (plain, drafting)]
        for one in contexts:
            one.sampling_params = SamplingParams(top_k=1, ignore_eos=True, **own)
        assert texts(drafting, contexts[1:]) == generated(plain, contexts[:1])
    logged = greedy(drafting, text, 30, log_probabilities=1)
    texts(drafting, [logged])
    assert not ran
    texts(drafting, [greedy(drafting, text, 30)])
    assert ran
    # while the model is profiled
    ran.clear()
    with drafting.replicas[0].model.model.profile():
        texts(drafting, [greedy(drafting, text, 30)])
    assert not ran
    released(drafting)


def test_an_interrupt_ends_a_call_after_its_round(drafting, ran) -> None:
    one = greedy(drafting, "one two three four five six seven", 300)
    while not one.draft_length:
        run(drafting, 1, one)
    drafting.interrupt()
    run(drafting, 8, one)
    assert [found.rounds for _, found in ran] == [1]
    run(drafting, 8, one)
    assert ran[1][1].rounds == 8
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(1e-4):
            drafting.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        ran.clear()
        for _ in range(3):
            run(drafting, 8, one)
    finally:
        ended.set()
        thread.join()
    assert min(found.rounds for _, found in ran) < 8
    run(drafting, 1, one)
    drafting.release(one.request_id)
    released(drafting)


def test_an_error_amid_rounds(plain, drafting, monkeypatch) -> None:
    """The draft model reads the text again, as its cache holds other tokens than the drafter knows."""
    text = "one two three four five six seven"
    one = greedy(drafting, text, 60)
    while not one.draft_length:
        run(drafting, 1, one)
    real = JoinedModels.run_parts

    def stopped(self, *arguments):
        real(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(JoinedModels, "run_parts", stopped)
        run(drafting, 8, one)
    assert not drafting._drafter._texts
    while not one.is_done:
        run(drafting, 8, one)
    drafting.release(one.request_id)
    assert [one.generated_tokens.tolist()] == generated(plain, [greedy(plain, text, 60)])
    released(drafting)


def test_python_does_not_run_between_rounds(drafting, ran, monkeypatch) -> None:
    """Calls of functions from the start of the native code on: as many for eight rounds as for two."""
    counts, run_at = dict[int, set[int]](), Executor.run_at
    own = drafting.replicas[0].rounds._joined

    def profiled(self, *arguments):
        calls = 0

        def count(frame: Any, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        if self is not own._joined.executor:
            return run_at(self, *arguments)
        sys.setprofile(count)
        try:
            return run_at(self, *arguments)
        finally:
            sys.setprofile(None)
            counts.setdefault(steps, set()).add(calls)

    monkeypatch.setattr(Executor, "run_at", profiled)
    one = greedy(drafting, "one two three four five six seven", 400)
    while not one.draft_length:
        run(drafting, 1, one)
    for steps in (2, 8, 2, 8):
        run(drafting, steps, one)
    drafting.release(one.request_id)
    assert [found.rounds for _, found in ran] == [2, 8, 2, 8]
    assert counts[2] == counts[8] and len(counts[2]) == 1 and max(counts[2]) < 60
    released(drafting)


def test_tokens_arrive_while_rounds_run(plain, drafting) -> None:
    """What a reader delivers, and what the step returns, are the text together."""
    delivered: list[int] = []
    reader = StepReader(lambda outputs: delivered.extend(outputs[0].tokens))
    engine = Engine(drafting, limits_of(drafting, True), reader)
    one, returned = greedy(drafting, "one two three four five six seven", 200), list[int]()
    engine.submit(one)
    order: list[int] = []
    while not engine.idle:
        before = len(delivered)
        new = [token for outcome in engine.step() for token in getattr(outcome, "tokens", ())]
        order += [*delivered[before:], *new]
        returned += new
    reader.close()
    drafting.read_steps(None)
    expected = generated(plain, [greedy(plain, "one two three four five six seven", 200)])
    assert [order] == expected == [one.generated_tokens.tolist()]
    assert len(delivered) + len(returned) == 200
    released(drafting)


def test_a_text_that_the_draft_model_does_not_have() -> None:
    """Its draft is of another text, shorter, or not read that far: there are no rounds."""
    model: Any = object()
    drafter = ModelDrafter(model, 100, 8)
    one = TextContext(tokens=np.arange(5), max_length=40, request_id=RequestID("one"))
    one.update(7)
    one.set_draft([8, 9, 10])
    assert drafter.written_text(one, 3) is None

    for tokens, read, length, fits in (
        ([0, 1, 2, 3, 4, 7, 8, 9, 10], 8, 3, True),
        ([0, 1, 2, 3, 4, 7, 8, 9, 10], 7, 3, False),
        ([0, 1, 2, 3, 4, 7, 8, 9, 10], 7, 2, True),
        ([0, 1, 2, 3, 4, 7, 8, 9], 8, 3, False),
        ([0, 1, 5, 3, 4, 7, 8, 9, 10], 8, 3, False),
        ([0, 1, 2, 3, 4, 7, 8, 5, 10], 8, 3, False),
        ([0, 1, 2, 3, 4, 7, 8, 5, 10], 8, 1, True),
    ):
        text = DraftedText(tokens=np.array(tokens), max_length=40, request_id=one.request_id)
        text.set_token_indices(start_idx=min(read, len(tokens) - 1))
        drafter._texts[one.request_id] = text
        assert (drafter.written_text(one, length) is text) == fits


@pytest.mark.parametrize("seed", range(4))
def test_the_graph_of_the_rows(seed: int) -> None:
    draw = np.random.default_rng(seed)
    steps, batch = (int(draw.integers(1, 5)) for _ in range(2))
    drafted = draw.integers(-1, 30, (steps, batch))
    rows = draw.integers(0, 20, (batch, steps + 1))
    expected = rows.copy()
    expected[:, 1:] = np.where((drafted >= 0) & (drafted < 20), drafted, 0).T
    model, flat = InferenceSession().load(rows_graph(DeviceRef.CPU())), rows.reshape(-1)
    model.execute(*map(Tensor.from_numpy, (drafted, np.array([20]), flat)))
    np.testing.assert_array_equal(flat.reshape(rows.shape), expected)


def expected_round(
    drafted: list[int], chosen: list[int], ends: list[int], vocabulary: int
) -> tuple[list[int], int, bool]:
    """The new tokens of a sequence, the token before the last one of them, and whether it ends there."""
    new: list[int] = []
    before = drafted[0]
    for place, token in enumerate(chosen):
        new.append(token)
        if place + 1 == len(chosen) or drafted[place + 1] != token:
            break
        before = token
    ended = any(token in ends for token in new) or not 0 <= new[-1] < vocabulary
    return new, before, ended


@pytest.mark.parametrize("seed", range(8))
def test_the_graph_between_two_rounds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    batch, width, rounds = int(draw.integers(1, 4)), int(draw.integers(1, 5)), 6
    model = InferenceSession().load(round_graph(DeviceRef.CPU()))
    count, vocab = batch * width, 5
    first = draw.integers(0, 2**64, batch, np.uint64)
    ends = draw.integers(-1, 60, (batch, int(draw.integers(0, 4))))
    lengths = draw.integers(1, 99, batch, np.uint32)
    bounds = lengths.astype(np.int64) + draw.integers(width, 7 * width, batch)
    rows = draw.integers(0, vocab, count)
    most, pair_most, draft_most = (np.array([[n, 0]], np.uint32) for n in (width, 2, 1))
    seeds, draft_seeds = np.zeros(count, np.uint64), np.zeros(batch, np.uint64)
    pairs, pair_lengths = np.zeros(2 * batch, np.int64), np.zeros(batch, np.uint32)
    draft_lengths, written = np.zeros(batch, np.uint32), np.array([3])
    history, done = np.full((rounds, count), -1), np.zeros(1, np.int64)
    again, interrupted = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    known = np.array([int(draw.integers(vocab - 1, vocab + 2))])
    greedily = (np.zeros(count, np.float32), np.ones(count, np.int64), np.ones(count, np.float32))
    given_inputs = list[Any]()
    for number in range(rounds):
        rows.reshape(batch, width)[:, 1:] = draw.integers(0, vocab, (batch, width - 1))
        logits = draw.normal(size=(count, vocab)).astype(np.float32)
        for row in range(count - 1):
            if draw.random() < 0.6:
                logits[row, rows[row + 1]] = 9  # so that it is right
        if draw.random() < 0.05:
            logits[0] = np.nan
        interrupted[0] = draw.random() < 0.2
        chosen = np.where(np.isnan(logits[:, 0]), -1, np.nan_to_num(logits).argmax(1))
        before, given = lengths.copy(), rows.copy()
        changed = [
            rows, lengths, most, seeds, pairs, pair_lengths, pair_most, draft_lengths, draft_most,
            draft_seeds, written, history, done, again,
        ]  # fmt: skip
        read = [*greedily, np.zeros(count, np.float32), first, ends, bounds, known, interrupted]
        given_inputs = [Tensor.from_numpy(array) for array in (logits, *read, *changed)]
        model.execute(*given_inputs)
        ended = bool(interrupted[0])
        for row in range(batch):
            own = slice(row * width, (row + 1) * width)
            new, last, stops = expected_round(
                given[own].tolist(), chosen[own].tolist(), ends[row].tolist(), int(known[0])
            )
            assert history[number, own].tolist() == [*new, *[-2] * (width - len(new))]
            assert pairs[2 * row : 2 * row + 2].tolist() == [last, new[-1]]
            length = int(before[row]) + len(new)
            assert (lengths[row], draft_lengths[row], pair_lengths[row]) == (
                length, length, length - 1,
            )  # fmt: skip
            ended |= stops or length + width > bounds[row]
            positions = [step_seed(int(first[row]), length + 1 + n) for n in range(width)]
            assert seeds[own].tolist() == positions and draft_seeds[row] == positions[0]
            assert rows[own].tolist() == [new[-1], *given[own].tolist()[1:]]
        longest = int(lengths.max())
        assert most.tolist() == [[width, longest]] and draft_most.tolist() == [[1, longest]]
        assert pair_most.tolist() == [[2, longest - 1]] and written[0] == 0
        assert done[0] == number + 1
        assert again[0] == (not ended and number + 1 < rounds)
        rows[rows < 0] = 0
    with pytest.raises(IndexError, match=f"round {rounds} of {rounds}"):
        model.execute(*given_inputs)
