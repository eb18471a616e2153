"""Samplers against their distributions, and rejection step by step against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.sampling import MinPSampler, RejectionSampler, RejectionSamplerWithResiduals
from max.pipelines.lib.sampling.sampling import (
    rejection_sampler,
    rejection_sampler_with_residuals,
)
from tests.nn.harness import CPU_REF, Array, evaluate, normal


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_min_p(rng: np.random.Generator) -> None:
    """Only tokens above the threshold are drawn, with their renormalized probabilities."""
    row = np.log(np.array([0.5, 0.3, 0.14, 0.06], np.float32))
    logits = np.broadcast_to(row, (4000, 4)).copy()
    (tokens,) = evaluate(lambda x: MinPSampler(DType.int32, [4000, 1])(x, 0.25), [logits], "engine")
    assert (tokens.dtype, tokens.shape) == (np.int32, (4000, 1))
    shares = np.bincount(tokens[:, 0], minlength=4) / 4000
    assert np.abs(shares - np.array([0.5, 0.3, 0.14, 0]) / 0.94).max() < 0.03
    (greedy,) = evaluate(
        lambda x: MinPSampler(DType.int64, [4000], temperature=0)(x, 0.0), [logits], "interpreter"
    )
    assert not greedy.any()


@pytest.mark.parametrize("shape", [(6, 9), (6, 1), (6,), ("b", 9), ("b",), (6, 3)])
@pytest.mark.parametrize("backend", ["interpreter", "engine"])
def test_min_p_of_the_logits_shape(
    shape: tuple[int | str, ...], backend: str, rng: np.random.Generator
) -> None:
    """The tokens are in the first column, as MAX writes them."""
    likeliest = rng.integers(0, 9, 6)
    logits = np.where(np.arange(9) == likeliest[:, None], 40, 0).astype(np.float32)
    named = isinstance(shape[0], str)
    (tokens,) = evaluate(
        lambda x: MinPSampler(DType.float32, shape)(x, 0.5),
        [logits],
        backend,
        dims=[("b", 9)] if named else None,
    )
    want = np.zeros((6, *[int(s) for s in shape[1:]]), np.float32)
    want.reshape(6, -1)[:, 0] = likeliest
    np.testing.assert_array_equal(tokens, want)


@pytest.mark.parametrize("backend", ["interpreter", "engine"])
def test_rejection(rng: np.random.Generator, backend: str) -> None:
    """Acceptance ratios far from any random number decide; the target's token follows the first rejected position."""
    batch, steps, vocab = 5, 3, 11
    target = np.abs(normal(rng, (batch * (steps + 1), vocab))) + 0.1
    tokens = rng.integers(0, vocab, (batch, steps))
    offsets = np.arange(batch + 1) * (steps + 1)
    kept = rng.random((batch, steps)) < 0.6
    rows = offsets[:-1, None] + np.arange(steps)
    of_target = np.take_along_axis(target[rows], tokens[..., None], 2)[..., 0]
    draft = np.where(kept, of_target / 2, of_target * 1e9).astype(np.float32)
    count, after = evaluate(
        RejectionSampler(CPU_REF), [tokens, draft, target, offsets.astype(np.int64)], backend
    )
    want = [int(np.argmin([*row, False])) for row in kept]
    np.testing.assert_array_equal(count[:, 0], want)
    np.testing.assert_array_equal(after[:, 0], target.argmax(1)[offsets[:-1] + want])


@pytest.mark.parametrize("backend", ["interpreter", "engine"])
@pytest.mark.parametrize("top_k", [1, -1])
def test_residuals(rng: np.random.Generator, backend: str, top_k: int) -> None:
    batch, steps, vocab = 4, 3, 7
    target, draft = normal(rng, (batch * (steps + 1), vocab)), normal(rng, (steps, batch, vocab))
    tokens = rng.integers(0, vocab, (batch, steps))
    offsets = (np.arange(batch + 1) * (steps + 1)).astype(np.int64)
    of_draft = np.take_along_axis(draft.transpose(1, 0, 2), tokens[..., None], 2)[..., 0]
    chance = rng.random((batch, steps)).astype(np.float32)
    noise = rng.uniform(0.01, 0.99, (batch, steps, vocab)).astype(np.float32)
    layer = RejectionSamplerWithResiduals(CPU_REF, top_k=top_k, temperature=0.8, debug=True)
    count, recovered, bonus = evaluate(
        layer, [tokens, of_draft, target, offsets, draft, chance, noise], backend
    )
    rows = offsets[:-1, None] + np.arange(steps)
    p, q = softmax(target / 0.8)[rows], softmax(draft.transpose(1, 0, 2) / 0.8)
    p_token, q_token = (np.take_along_axis(x, tokens[..., None], 2)[..., 0] for x in (p, q))
    want = [int(np.argmin([*row, False])) for row in p_token / q_token > chance]
    np.testing.assert_array_equal(count, want)
    arrivals = -np.log(noise) / np.maximum(np.maximum(p - q, 0), 1e-30)
    np.testing.assert_array_equal(recovered, arrivals.argmin(-1))
    if top_k == 1:
        np.testing.assert_array_equal(bonus[:, 0], target[offsets[1:] - 1].argmax(-1))


def test_tokens_are_distributed_as_the_target_s(rng: np.random.Generator) -> None:
    """Returns the first token: an accepted draft token, or one drawn from the residuals."""
    batch, vocab = 20000, 4
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    tokens = rng.choice(vocab, (batch, 1), p=q)
    target = np.broadcast_to(np.log(p), (2 * batch, vocab)).astype(np.float32)
    draft = np.broadcast_to(np.log(q), (1, batch, vocab)).astype(np.float32)
    offsets = np.arange(batch + 1, dtype=np.int64) * 2
    layer = RejectionSamplerWithResiduals(CPU_REF, top_k=-1, seed=7)
    inputs = [tokens, np.zeros((batch, 1), np.float32), target, offsets, draft]
    count, recovered, bonus = evaluate(layer, inputs, "engine")
    first = np.where(count > 0, tokens[:, 0], recovered[:, 0])
    assert np.abs(np.bincount(first, minlength=vocab) / batch - p).max() < 0.015
    assert np.abs(np.bincount(bonus[:, 0], minlength=vocab) / batch - p).max() < 0.015


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        RejectionSamplerWithResiduals(CPU_REF, temperature=0)
    with pytest.raises(ValueError, match="the temperature is -1"):
        MinPSampler(DType.int64, [1], temperature=-1)
    types = [TensorType(DType.float32, shape, CPU_REF) for shape in (["b", 9], ["b", 2], ["b", 3])]
    with Graph("g", input_types=types) as graph:
        logits, tokens, others = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match="min_p is 1.5, expected 0 to 1"):
            MinPSampler(DType.int64, ["b"])(logits, 1.5)
        with pytest.raises(ValueError, match="draft tokens"):
            RejectionSampler(CPU_REF)(tokens, others, logits, tokens[:, 0])


def test_the_graph_of_rejection(rng: np.random.Generator) -> None:
    """One graph with symbolic sizes serves two batch sizes."""
    model = InferenceSession().load(rejection_sampler(CPU_REF, seed=3))
    for batch, steps, vocab in ((2, 3, 5), (4, 1, 9)):
        target = np.abs(normal(rng, (batch * (steps + 1), vocab))) + 0.1
        tokens = rng.integers(0, vocab, (batch, steps))
        offsets = np.arange(batch + 1) * (steps + 1)
        kept = rng.random((batch, steps)) < 0.6
        rows = offsets[:-1, None] + np.arange(steps)
        of_target = np.take_along_axis(target[rows], tokens[..., None], 2)[..., 0]
        draft = np.where(kept, of_target / 2, of_target * 1e9).astype(np.float32)
        count, after = (x.to_numpy() for x in model.execute(tokens, draft, target, offsets))
        expected = [int(np.argmin([*row, False])) for row in kept]
        np.testing.assert_array_equal(count[:, 0], expected)
        np.testing.assert_array_equal(after[:, 0], target.argmax(1)[offsets[:-1] + expected])


def test_the_graph_of_residuals(rng: np.random.Generator) -> None:
    batch, steps, vocab = 3, 2, 6
    model = InferenceSession().load(rejection_sampler_with_residuals(CPU_REF, debug=True))
    target, draft = normal(rng, (batch * (steps + 1), vocab)), normal(rng, (steps, batch, vocab))
    tokens = rng.integers(0, vocab, (batch, steps))
    offsets = np.arange(batch + 1) * (steps + 1)
    of_draft = np.take_along_axis(draft.transpose(1, 0, 2), tokens[..., None], 2)[..., 0]
    chance = rng.random((batch, steps)).astype(np.float32)
    noise = rng.uniform(0.01, 0.99, (batch, steps, vocab)).astype(np.float32)
    count, recovered, bonus = (
        x.to_numpy() for x in model.execute(tokens, of_draft, target, offsets, draft, chance, noise)
    )
    p = softmax(target)[offsets[:-1, None] + np.arange(steps)]
    q = softmax(draft.transpose(1, 0, 2))
    p_token, q_token = (np.take_along_axis(x, tokens[..., None], 2)[..., 0] for x in (p, q))
    expected = [int(np.argmin([*row, False])) for row in p_token / q_token > chance]
    np.testing.assert_array_equal(count, expected)
    arrivals = -np.log(noise) / np.maximum(np.maximum(p - q, 0), 1e-30)
    np.testing.assert_array_equal(recovered, arrivals.argmin(-1))
    np.testing.assert_array_equal(bonus[:, 0], target[offsets[1:] - 1].argmax(-1))
    assert len(rejection_sampler_with_residuals(DeviceRef.CPU()).inputs) == 5
