"""The sampling graph against the warpers of transformers, and its parts."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.interfaces import SamplingParams
from max.pipelines import TextContext
from max.pipelines.lib.model_config import SamplingConfig
from max.pipelines.lib.sampling.sampling import penalty_inputs, token_sampler
from max.pipelines.sampling import sampler as samplers
from max.pipelines.sampling.graph import bias_inputs
from max.pipelines.sampling.inputs import SamplingInputs, step_seed
from max.pipelines.sampling.sampler import Sampler, masked_logits, needs_masks, needs_sampler
from tests.tolerance import assert_close

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 301


@pytest.fixture(scope="module")
def sample():
    """Samples one token per row, with the parameters of contexts."""
    model = InferenceSession([CPU()]).load(token_sampler(SamplingConfig(), DeviceRef.CPU()))

    def run(logits: np.ndarray, contexts: list[TextContext]) -> np.ndarray:
        (tokens,) = model.execute(Tensor.from_numpy(logits), *SamplingInputs.of(contexts))
        return tokens.to_numpy()

    return run


def contexts(n: int, **params) -> list[TextContext]:
    return [
        TextContext(
            max_length=9, tokens=np.array([1]), sampling_params=SamplingParams(seed=i, **params)
        )
        for i in range(n)
    ]


def warped(logits: np.ndarray, params: dict) -> np.ndarray:
    """Returns the probabilities from which transformers samples."""
    from transformers.generation import logits_process as warpers

    steps = [warpers.TemperatureLogitsWarper(float(params.get("temperature", 1.0)))]
    if "top_k" in params:
        steps.append(warpers.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(warpers.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(warpers.MinPLogitsWarper(params["min_p"]))
    scores = torch.from_numpy(logits[None].astype(np.float64))
    for step in steps:
        scores = step(torch.zeros((1, 1), dtype=torch.long), scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize(
    "params",
    [
        {}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.05, "top_k": 50}, {"top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    ],
)  # fmt: skip
def test_the_distribution_is_that_of_transformers(sample, rng, params):
    n = 6000
    logits = (rng.normal(size=VOCAB) * 2.5).astype(np.float32)
    tokens = sample(np.tile(logits, (n, 1)), contexts(n, **params))
    found = np.bincount(tokens, minlength=VOCAB) / n
    expected = warped(logits, params)
    assert found[expected == 0].max(initial=0) == 0, "a token that is cut off never comes"
    # five and a half standard deviations of a frequency
    assert (np.abs(found - expected) < 5.5 * np.sqrt(expected * (1 - expected) / n) + 1e-3).all()


def test_greedy_rows_among_sampled_ones(sample, rng):
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    logits[3, [7, 9]] = 50  # of equal logits the lowest index
    rows = [
        *contexts(1, temperature=0),
        *contexts(1, top_k=1),
        *contexts(1, top_p=1e-6),
        *contexts(1, temperature=0),
    ]
    assert sample(logits, rows).tolist() == [*logits.argmax(-1)[:3].tolist(), 7]


def test_seeds(sample, rng):
    assert step_seed(3, 5) == step_seed(3, 5) != step_seed(3, 6)
    assert len({step_seed(s, p) for s in range(50) for p in range(50)}) == 2500
    assert 0 <= step_seed(2**64 - 1, 2**31) < 2**64
    logits = np.tile(rng.normal(size=VOCAB).astype(np.float32), (2, 1))
    one = contexts(1)[0]
    same = sample(logits, [one, one])
    assert same[0] == same[1]
    tensors = list(SamplingInputs.of([one], step=2))
    assert tensors[-1].item() == step_seed(0, 3) and tensors[-1].dtype == DType.uint64


def test_a_sampler_with_penalties_returns_the_logits_it_picked_from(rng):
    config = SamplingConfig(enable_penalties=True, out_dtype="float32")
    graph = token_sampler(config, DeviceRef.CPU(), return_logits=True)
    model = InferenceSession([CPU()]).load(graph)
    settings = [(0.5, 0.25, 1.3), (0.0, 0.0, 1.0), (-0.5, 1.0, 0.8)]
    batch = []
    for frequency, presence, repetition in settings:
        params = SamplingParams(
            temperature=0, frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition
        )  # fmt: skip
        context = TextContext(max_length=40, tokens=np.array([1]), sampling_params=params)
        for token in rng.integers(0, 12, 14).tolist():
            context.update(token)
        batch.append(context)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    inputs = [Tensor.from_numpy(logits), *SamplingInputs.of(batch), *penalty_inputs(batch)]
    tokens, used = model.execute(*inputs)
    expected = logits.astype(np.float64)
    for row, context in enumerate(batch):
        frequency, presence, repetition = settings[row]
        for token, count in zip(
            *np.unique(context.generated_tokens, return_counts=True), strict=True
        ):
            x = expected[row, token]
            x = x / repetition if x > 0 else x * repetition
            expected[row, token] = x - frequency * count - presence
    assert_close(used.to_numpy(), expected)
    assert tokens.to_numpy().tolist() == used.to_numpy().argmax(-1).tolist()


def biased(tokens: dict[int, float], ends: set[int], minimum: int) -> TextContext:
    """A request with biases, whose first tokens may not be its ends."""
    params = SamplingParams(logit_bias=tokens, min_new_tokens=minimum, max_new_tokens=minimum + 4)
    return TextContext(
        max_length=20, tokens=np.array([3]), eos_token_ids=ends, sampling_params=params
    )


def test_biases_and_banned_ends_are_those_of_numpy(rng):
    """Several, one and no bias a row; an end with a bias is banned; penalties see both, a mask comes last."""
    columns = 30
    config = SamplingConfig(
        out_dtype="float32", enable_penalties=True, enable_structured_output=True
    )
    graph = token_sampler(config, DeviceRef.CPU(), return_logits=True, biases=True)
    model = InferenceSession([CPU()]).load(graph)
    batch = [
        biased({4: 2.5, 9: -1.25, 29: 0.5}, {9, 11}, 3),
        biased({0: 7.0}, {5}, 0),
        biased({}, {2}, 1),
        biased({}, {2}, 0),
    ]
    logits = rng.standard_normal((4, columns)).astype(np.float32)
    allowed = rng.random((4, columns)) < 0.8
    expected = masked_logits(logits.copy(), batch)
    assert np.isneginf(expected[0, [9, 11]]).all() and np.isneginf(expected).sum() == 3
    inputs = [*SamplingInputs.of(batch), *bias_inputs(batch), *penalty_inputs(batch)]
    tokens, changed = model.execute(logits.copy(), *inputs, allowed)
    expected = np.where(allowed, expected, np.finfo(np.float32).min)
    np.testing.assert_array_equal(changed.to_numpy(), expected)
    assert all(allowed[row, token] for row, token in enumerate(tokens.to_numpy()))
    # a token that the vocabulary lacks is an error
    wrong = [biased({columns: 1.0}, set(), 0), *batch[1:]]
    inputs = [*SamplingInputs.of(wrong), *bias_inputs(wrong), *penalty_inputs(wrong)]
    with pytest.raises(IndexError):
        model.execute(logits, *inputs, allowed)


@pytest.mark.parametrize(
    ("params", "masks", "sampler"),
    [
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, False, False),
        ({"frequency_penalty": 0.1}, False, True),
        ({"logit_bias": {3: 1.0}}, True, True),
        ({"logits_processors": [lambda inputs: None]}, True, True),
    ],
    ids=("plain", "penalty", "bias", "processor"),
)
def test_what_the_graph_does_not_sample(params: dict, masks: bool, sampler: bool) -> None:
    (context,) = contexts(1, **params)
    assert (needs_masks(context), needs_sampler(context)) == (masks, sampler)


def test_a_minimum_length_counts_the_steps_of_an_execution() -> None:
    (context,) = contexts(1, min_new_tokens=3)
    for generated in range(4):
        for step in range(4):
            wanted = generated + step < 3
            assert needs_masks(context, step) == needs_sampler(context, step) == wanted
        context.update(5)


def test_a_processor_sees_the_row_of_its_request() -> None:
    """After all other changes; what it writes is chosen from."""
    seen: list[np.ndarray] = []

    def process(inputs) -> None:
        row = inputs.logits.to_numpy()
        seen.append(row.copy())
        row[0, 2] = 50

    plain, processed = (
        contexts(1)[0],
        contexts(1, logit_bias={1: 2.5}, logits_processors=[process])[0],
    )
    logits = np.arange(3 * VOCAB, dtype=np.float32).reshape(3, VOCAB)
    before = logits.copy()
    assert masked_logits(logits, [plain, processed, plain]) is logits
    before[1, 1] += 2.5
    np.testing.assert_array_equal(seen, [before[1:2]])
    before[1, 2] = 50
    np.testing.assert_array_equal(logits, before)


def test_rows_without_a_choice_have_the_tokens_of_the_graph(rng, monkeypatch) -> None:
    """Greedy rows need no graph, but for logits that are no numbers; the lowest of equal tokens is taken."""
    config = SamplingConfig(in_dtype=DType.float32, out_dtype=DType.float32)
    sampler = Sampler(InferenceSession(devices=[CPU()]), CPU(), config)
    logits = np.round(rng.standard_normal((6, 257)), 1).astype(np.float32)
    logits[1, 30:] = logits[1].max() + 1  # many equal ones
    rows, steps = contexts(6, top_k=1), list(range(6))
    runs: list[int] = []
    with_graph = Sampler.sample_with

    def counted(self, *operands):
        runs.append(1)
        return with_graph(self, *operands)

    monkeypatch.setattr(Sampler, "sample_with", counted)

    def tokens(values: np.ndarray) -> list[int]:
        return sampler.sample_rows(Tensor.from_numpy(values), rows, steps).to_numpy().tolist()

    def with_a_graph(values: np.ndarray) -> list[int]:
        inputs = SamplingInputs.of(rows, CPU(), steps)
        return with_graph(sampler, Tensor.from_numpy(values), inputs).to_numpy().tolist()

    assert tokens(logits) == with_a_graph(logits) and not runs
    for value in (np.nan, np.inf):
        odd = logits.copy()
        odd[2, 7] = value
        assert tokens(odd) == with_a_graph(odd) and runs.pop()
    none = logits.copy()
    none[3] = np.nan
    assert tokens(none)[3] == -1 and runs.pop()
    monkeypatch.setattr(samplers, "MOST_ON_HOST", logits.size - 1)
    assert tokens(logits) == with_a_graph(logits) and runs.pop()
    monkeypatch.undo()
    rows[4].sampling_params = SamplingParams(top_k=5, temperature=1.0, seed=3)
    assert tokens(logits) == with_a_graph(logits)
