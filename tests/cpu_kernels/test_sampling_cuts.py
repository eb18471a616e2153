"""Cuts and draws of long rows, on each path of the kernel, against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.generation.candidates import CAPACITY, MOST_KEPT
from max._backends.cpu.kernels.generation.logit_rows import BLOCKS, FORBIDDEN, LINE
from max._interpreter.models import sampling
from max.kernel.interpreter.interpret import ArrayView
from tests.cpu_kernels.harness import lowered, run
from tests.cpu_kernels.test_sampling import operands, sample

SIZES = [
    1, 2, 3, 17, 63, 64, 65, 700, MOST_KEPT, MOST_KEPT + 1, BLOCKS * LINE, BLOCKS * LINE + 1,
    CAPACITY - 1, CAPACITY + 1, 20011, 49152,
]  # fmt: skip
KINDS = [
    "normal", "equal", "outlier", "steps", "one number", "rising", "falling", "nan", "minus infinity", "infinity",
    "heavy tails", "zeros", "forbidden",
]  # fmt: skip
TOLERANCE = 3e-6
"""By what a share, or a number in [0, 1), may differ: the kernel adds up weights in float32, block by block."""


def make_row(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """A row of logits of a kind."""
    row = rng.normal(0, rng.choice([0.1, 1, 3, 30]), size)
    some = rng.random(size)
    if kind in ("equal", "outlier"):
        row[:] = rng.normal()
    if kind == "outlier":
        row[rng.integers(size)] = rng.choice([3, 50, 1e30, -1e30])
    elif kind == "steps":
        row = np.round(row * 2) / 2
    elif kind == "one number":
        row[:] = -np.inf
        row[rng.integers(size)] = rng.normal()
    elif kind in ("rising", "falling"):
        row = np.sort(row) if kind == "rising" else -np.sort(row)
    elif kind == "nan":
        row[some < 0.4] = np.nan
    elif kind == "minus infinity":
        row[some < 0.4] = -np.inf
    elif kind == "infinity":
        row[some < 0.01] = np.inf
    elif kind == "heavy tails":
        row = rng.standard_t(2, size) * 2
    elif kind == "zeros":
        row = np.where(some < 0.4, 0.0, np.where(some < 0.7, -0.0, row))
    elif kind == "forbidden":
        row = np.where(some < 0.9, FORBIDDEN, row)
    return row.astype(np.float32)


def defined_tokens(inputs: list[np.ndarray], row: int) -> set[int]:
    """The tokens of a row by the definition, with `top_p` and the random number up to a tolerance."""
    logits, temperature, top_k, top_p, min_p, seed = (x[row] for x in inputs)
    found = set[int]()
    for change in (0, -TOLERANCE, TOLERANCE):
        share = float(top_p) if top_p == 1 else min(max(float(top_p) * (1 + change), 0.0), 1.0)
        for shift in (0, -TOLERANCE, TOLERANCE):
            u = min(max(sampling.uniform(int(seed)) + shift, 0.0), np.nextafter(1, 0))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampling, "uniform", lambda _, u=u: u)
                found.add(
                    sampling._sample_row(
                        logits, float(temperature), int(top_k), share, float(min_p), int(seed)
                    )
                )
    return found


def check(inputs: list[np.ndarray]) -> np.ndarray:
    """Samples rows and compares them with the definition."""
    (got,) = run("mo.sample.token", inputs, [(np.int64, (len(inputs[0]),))])
    for row, token in enumerate(got):
        # of the definition alone first: the others take nine times as long
        exact = sampling._sample_row(*(x[row].item() if x.ndim == 1 else x[row] for x in inputs))
        assert token == exact or token in defined_tokens(inputs, row), row
    return got


@settings(max_examples=120)
@given(
    size=st.sampled_from(SIZES),
    kind=st.sampled_from(KINDS),
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.0, 100.0, 1e30]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 256, 1000, MOST_KEPT, MOST_KEPT + 1, 5000, 49151]),
    top_p=st.sampled_from([1.0, 1 - 2**-24, 0.999, 0.95, 0.5, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.4]),
    seed=st.integers(0, 2**32),
)
def test_against_the_definition(
    size: int, kind: str, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.stack([make_row(kind, size, rng) for _ in range(3)])
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    check(operands(logits, temperature=temperature, seed=seed, **options))


@pytest.mark.parametrize("kind", ["normal", "equal", "outlier", "heavy tails"])
@pytest.mark.parametrize("size", [151_936, 262_144])
def test_large_vocabularies(size: int, kind: str) -> None:
    logits = make_row(kind, size, np.random.default_rng(size))
    parameters = [
        (1.0, -1, 1.0), (1.0, -1, 0.95), (1.0, 50, 0.95), (0.8, 2000, 1.0), (1.0, 9000, 0.9), (50.0, 0, 0.7),
        (0.0, 0, 1.0),
    ]  # fmt: skip
    temperature, top_k, top_p = zip(*parameters, strict=True)
    rows = len(parameters)
    check(
        [
            np.repeat(logits[None], rows, 0),
            np.array(temperature, np.float32),
            np.array(top_k),
            np.array(top_p, np.float32),
            np.zeros(rows, np.float32),
            np.arange(rows).astype(np.uint64),
        ]  # fmt: skip
    )


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9])
def test_a_nucleus_of_two_neighboring_logits(top_p: float) -> None:
    """The cut to many tokens goes through those one unit in the last place below the greatest."""
    logits = np.full((40, 3000), np.nextafter(np.float32(2), np.float32(0)))
    logits[:, 1000:1900] = 2
    got = check(operands(logits, top_k=MOST_KEPT + 50, top_p=top_p))
    # the greatest ones come first, then the others from the first index on
    others = max(int(np.ceil(top_p * (MOST_KEPT + 50))) - 900, 0)
    assert {*got.tolist()} <= {
        *range(min(others, 1000)),
        *range(1000, 1900 + max(others - 1000, 0)),
    }


def test_a_late_token_joins_equal_ones() -> None:
    """The memory of candidates is full of equal ones before it is found."""
    logits = np.full((60, 2 * CAPACITY + 3000), -1, np.float32)
    logits[:, 2 * CAPACITY + 10] = 0
    got = {*check(operands(logits, top_k=300)).tolist()}
    assert got <= {*range(299), 2 * CAPACITY + 10} and len(got) > 30


PATHS: dict[str, dict[str, float]] = {
    "no cut": {},
    "min_p": {"min_p": 0.02},
    "best tokens": {"top_k": 40},
    "best tokens and nucleus": {"top_k": 900, "top_p": 0.8},
    "nucleus": {"top_p": 0.8},
    "many best tokens": {"top_k": 2200},
    "many best tokens and nucleus": {"top_k": 2200, "top_p": 0.95},
}


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_frequencies_follow_the_weights(options: dict[str, float]) -> None:
    """Pearson's chi-square of the drawn tokens, in groups with at least 20 expected ones."""
    draws, size = 3000, 2600
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, size).astype(np.float32)
    got = sample(np.repeat(logits[None], draws, 0), seed=77, **options)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")
    kept = order[: options.get("top_k", size)]
    if "top_p" in options:
        share = np.cumsum(weights[kept])
        kept = kept[: int(np.searchsorted(share, options["top_p"] * share[-1])) + 1]
    kept = kept[weights[kept] >= options.get("min_p", 0)]
    assert set(got.tolist()) <= set(kept.tolist())
    expected = draws * weights[kept] / weights[kept].sum()
    seen = np.bincount(got, minlength=size)[kept]
    groups = (np.cumsum(expected) // 20).astype(int)
    expected, seen = np.bincount(groups, expected), np.bincount(groups, seen)
    used = expected > 10
    statistic = float(((seen - expected) ** 2 / np.maximum(expected, 1))[used].sum())
    freedom = int(used.sum())
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom), (statistic, freedom)


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    rng = np.random.default_rng(2)
    logits = np.stack([make_row(kind, 9001, rng) for kind in KINDS])
    rows = len(logits)
    parameters = [
        rng.choice([0.0, 0.7, 1.0], rows).astype(np.float32), rng.choice([-1, 60, 3000], rows),
        rng.choice([1, 0.9], rows).astype(np.float32), rng.choice([0, 0.1], rows).astype(np.float32),
        np.arange(rows).astype(np.uint64),
    ]  # fmt: skip
    inputs = [logits, *parameters]
    (together,) = run("mo.sample.token", inputs, [(np.int64, (rows,))], workers=1)
    np.testing.assert_array_equal(
        run("mo.sample.token", inputs, [(np.int64, (rows,))], workers=3)[0], together
    )
    order = rng.permutation(rows)
    (moved,) = run("mo.sample.token", [x[order] for x in inputs], [(np.int64, (rows,))])
    np.testing.assert_array_equal(moved, together[order])
    for row in range(0, rows, 4):
        (alone,) = run("mo.sample.token", [x[row : row + 1] for x in inputs], [(np.int64, (1,))])
        assert alone[0] == together[row]


@pytest.mark.parametrize("machine", ["avx2", "generic"])
def test_other_targets(machine: str) -> None:
    rng = np.random.default_rng(4)
    logits = np.repeat(make_row("normal", 5003, rng)[None], 4, 0)
    inputs = operands(logits)
    inputs[2], inputs[3] = np.array([0, 0, 77, 3000]), np.array([1, 0.9, 0.9, 1], np.float32)
    (host,) = run("mo.sample.token", inputs, [(np.int64, (4,))])
    (other,) = run("mo.sample.token", inputs, [(np.int64, (4,))], machine=machine)
    np.testing.assert_array_equal(host, other)


def rows_read(monkeypatch: pytest.MonkeyPatch, logits: np.ndarray, **options: Any) -> float:
    """How often a row of logits is read, in plain Python."""
    inputs = operands(logits[None], **options)
    read, load = 0, ArrayView.load

    def counted(self: ArrayView, *indices: Any, width: int | None = None, **rest: Any) -> Any:
        nonlocal read
        if np.shares_memory(self.array, inputs[0]):
            read += width or 1
        return load(self, *indices, width=width, **rest)

    monkeypatch.setattr(ArrayView, "load", counted)
    out = np.zeros(1, np.int64)
    call = lowered("mo.sample.token", inputs, [out])
    k.interpret(call.kernel, [out, *inputs], call.params)
    monkeypatch.undo()
    assert out[0] in defined_tokens(inputs, 0)
    return read / logits.size


@pytest.mark.parametrize(
    "options, kind, most",
    [
        ({"temperature": 0.0}, "normal", 1.05),
        ({}, "normal", 2.1),
        ({"top_k": 20, "top_p": 0.9}, "normal", 1.9),
        ({"top_k": 20, "top_p": 0.9}, "rising", 1.1),
        ({"top_k": 400}, "normal", 2.1),
        ({"top_k": 400}, "equal", 2.1),
        # the tops, two passes over intervals, one for candidates, one for the last of equals, the weights, a block
        ({"top_p": 0.9}, "normal", 5.1),
        ({"top_p": 0.9}, "heavy tails", 3.2),
        ({"top_p": 0.9}, "equal", 4.1),
        ({"min_p": 0.3}, "heavy tails", 1.1),
    ],
    ids=str,
)
def test_rows_are_read_a_few_times(
    options: dict[str, float], kind: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = make_row(kind, 70 * LINE, np.random.default_rng(1))
    assert rows_read(monkeypatch, logits, **options) <= most


def allowed_logits(logits: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Logits in which those of tokens that may not follow are the least finite float."""
    allowed = [
        [t // 32 < len(own) and bool(int(own[t // 32]) >> t % 32 & 1) for t in range(len(row))]
        for row, own in zip(logits, words, strict=True)
    ]
    return np.where(np.array(allowed), logits, np.float32(FORBIDDEN))


# each draw of a shape compiles both kernels for it
@settings(max_examples=16)
@given(
    size=st.sampled_from([1, 31, 32, 33, 64, 65, 700, MOST_KEPT + 1, BLOCKS * LINE + 1]),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.002, 0.5, 0.98, 1.0]),
    fewer=st.sampled_from([-1, 0, 0, 1, 20]),
    temperature=st.sampled_from([0.0, 1.0, 1.0, 1e30]),
    top_k=st.sampled_from([-1, 0, 1, 7, 300, MOST_KEPT + 1]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    machine=st.sampled_from(["host", "host", "avx2", "generic"]),
    seed=st.integers(0, 2**32),
)
def test_tokens_that_are_not_allowed_have_the_least_logit(
    size: int,
    kind: str,
    density: float,
    fewer: int,
    temperature: float,
    top_k: int,
    top_p: float,
    machine: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.stack([make_row(kind, size, rng) for _ in range(3)])
    words = max((size + 31) // 32 - fewer, 0)
    bits = rng.random((3, words, 32)) < density
    packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int32).reshape(3, words)
    inputs = operands(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    results = [(np.int64, (3,))]
    (got,) = run("mo.sample.allowed", [*inputs, packed], results, machine=machine)
    inputs[0] = allowed_logits(logits, packed)
    np.testing.assert_array_equal(got, run("mo.sample.token", inputs, results, machine=machine)[0])
