"""Sampling and penalties against a plain reference that sorts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import Runner, run
from tests.tolerance import assert_close

MASK64 = (1 << 64) - 1


def uniform(seed: int) -> float:
    x = (seed + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return ((x ^ (x >> 31)) >> 40) / 2**24


def distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The weights of all tokens, 0 for removed ones."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    share = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(share, top_p * share[-1])) + 1] if top_p < 1 else order
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    kept[weights < min_p] = 0
    return kept


def operands(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> list[np.ndarray]:
    rows = len(logits)
    kinds = ((temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (min_p, np.float32))
    seeds = np.arange(seed, seed + rows, dtype=np.uint64)
    return [logits, *(np.full(rows, value, kind) for value, kind in kinds), seeds]


def sample(logits: np.ndarray, **options: float) -> np.ndarray:
    return run("mo.sample.token", operands(logits, **options), [(np.int64, (len(logits),))])[0]


@pytest.mark.parametrize("vocabulary", [1, 3, 16, 1000])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_greedy(vocabulary: int, options: dict[str, float], rng: np.random.Generator) -> None:
    logits = rng.standard_normal((5, vocabulary)).astype(np.float32)
    np.testing.assert_array_equal(sample(logits, **options), logits.argmax(1))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((3, 200), np.float32)
    logits[0, [40, 41, 199]] = 7
    logits[1, [3, 19, 35]] = 7
    logits[2] = -np.inf
    np.testing.assert_array_equal(sample(logits, temperature=0.0), [40, 3, 0])


def test_greedy_ignores_nan() -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, 7], logits[0, 33] = np.nan, 1
    np.testing.assert_array_equal(sample(logits, temperature=0.0), [33])


@pytest.mark.parametrize("size", [1, 16, 37])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}], ids=str
)
def test_a_row_of_nan_has_no_token(size: int, options: dict[str, float]) -> None:
    logits = np.full((3, size), np.nan, np.float32)
    logits[1, size - 1] = -np.inf  # a number: the first index, as for a row of -inf
    logits[2, size // 2] = -1
    got = sample(logits, **options)
    assert got[0] == -1 and got[1] == 0 and got[2] == size // 2


@settings(max_examples=40)
@given(
    vocabulary=st.sampled_from([1, 5, 33, 700]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 2, 7, 256, 300, 10000]),
    top_p=st.sampled_from([1.0, 0.9, 0.37, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 2**40),
)
def test_against_sorting(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal((6, vocabulary)).astype(np.float32) * 2
    got = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for row in range(6):
        weights = distribution(logits[row], temperature, top_k, top_p, min_p)
        running = np.cumsum(weights)
        want = int(np.searchsorted(running, uniform(seed + row) * running[-1], side="right"))
        if top_k != 1:
            assert got[row] == want


@pytest.mark.parametrize("top_k", [3, 300])
def test_a_cut_through_equals_keeps_the_first(top_k: int) -> None:
    logits = np.zeros((400, 500), np.float32)
    logits[:, 450] = 1
    got = sample(logits, top_k=top_k)
    assert set(got.tolist()) <= {*range(top_k - 1), 450}
    assert len(set(got.tolist())) > min(top_k, 100) // 2


@pytest.mark.parametrize("top_p", [0.25, 0.5])
@pytest.mark.parametrize("top_k", [0, 100])
def test_top_p_cuts_through_equals(top_p: float, top_k: int) -> None:
    got = sample(np.zeros((500, 100), np.float32), top_p=top_p - 0.001, top_k=top_k)
    assert got.max() == round(top_p * 100) - 1


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]], np.float32))
    got = sample(np.repeat(logits, 20000, 0))
    np.testing.assert_allclose(np.bincount(got, minlength=5) / 20000, np.exp(logits[0]), atol=0.015)


def test_an_infinite_logit_wins_and_minus_infinity_is_never_drawn() -> None:
    logits = np.zeros((200, 40), np.float32)
    logits[:100, 17] = np.inf
    logits[100:, 1:] = -np.inf
    got = sample(logits, top_k=50)
    np.testing.assert_array_equal(got, [17] * 100 + [0] * 100)
    np.testing.assert_array_equal(sample(logits, top_p=0.9), got)


def test_equal_seeds_draw_equally() -> None:
    logits = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    runners = [
        Runner("mo.sample.token", operands(logits, seed=5), [(np.int64, (8,))], workers=n)
        for n in (1, 2)
    ]
    first, second = (runner()[0].copy() for runner in runners)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("machine", ["avx2", "generic"])
def test_other_targets(machine: str) -> None:
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    inputs = operands(logits, top_k=20, top_p=0.8)
    (host,) = run("mo.sample.token", inputs, [(np.int64, (4,))])
    (other,) = run("mo.sample.token", inputs, [(np.int64, (4,))], machine=machine)
    np.testing.assert_array_equal(host, other)


def test_penalties(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    offsets = np.array([0, 3, 3, 7], np.uint32)
    tokens = np.array([1, 49, 7, 0, 2, 4, 6], np.int32)
    counts = np.array([1, 3, 0, 2, 1, 1, 5], np.int32)
    frequency, presence, repetition = (rng.uniform(0.1, 2, 3).astype(np.float32) for _ in range(3))
    want = logits.astype(np.float64)
    for row in range(3):
        for i in range(offsets[row], offsets[row + 1]):
            if counts[i]:
                at = row, tokens[i]
                want[at] = (
                    want[at] / repetition[row] if want[at] > 0 else want[at] * repetition[row]
                )
                want[at] -= frequency[row] * counts[i] + presence[row]
    inputs = [logits, tokens, counts, offsets, frequency, presence, repetition]
    (got,) = run("mo.penalties", inputs, [(np.float32, logits.shape)])
    assert_close(got, want.astype(np.float32))
    tokens[2] = 50
    with pytest.raises(KernelRunError, match="token 50 is out of range for 50 logits"):
        run("mo.penalties", inputs, [(np.float32, logits.shape)])
