"""Log-probabilities of ragged batches, by the graph and by NumPy, against SciPy's formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.pipelines.sampling.log_probabilities import (
    compute_log_probabilities_ragged,
    log_probabilities_ragged_graph,
    of_rows,
)
from tests.tolerance import assert_close


@pytest.fixture(scope="module")
def model():
    return InferenceSession([CPU()]).load(log_probabilities_ragged_graph(DeviceRef.CPU(), levels=3))


def reference(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


@pytest.mark.parametrize("vocab", [8, 97, 1000])
def test_a_ragged_batch(model, rng, vocab):
    offsets = np.array([0, 3, 4, 9], np.uint32)
    tokens, sampled = rng.integers(0, vocab, 9), rng.integers(0, vocab, 3)
    logits = (rng.normal(size=(9, vocab)) * 5).astype(np.float32)
    last = logits[offsets[1:] - 1]
    found = compute_log_probabilities_ragged(
        CPU(), model, input_row_offsets=offsets, logits=Tensor.from_numpy(logits),
        next_token_logits=Tensor.from_numpy(last), tokens=tokens, sampled_tokens=sampled,
        batch_top_n=[2, 0, 7], batch_echo=[False, False, True],
    )  # fmt: skip
    assert found[1] is None
    for i, rows, chosen, n in (
        (0, last[:1], sampled[:1], 2),
        (2, logits[4:], [*tokens[5:], sampled[2]], 7),
    ):
        logs = found[i]
        assert logs is not None and len(logs.token_log_probabilities) == len(rows)
        for j, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            expected = reference(row)
            assert_close(np.float32(logs.token_log_probabilities[j]), expected[token], scale=5)
            top = logs.top_log_probabilities[j]
            assert list(top)[:n] == np.argsort(-row, kind="stable")[:n].tolist()
            assert int(token) in top and len(top) in (n, n + 1)
            assert_close(np.array(list(top.values()), np.float32), expected[list(top)], scale=5)
        assert (
            of_rows(rows, list(map(int, chosen)), n).top_log_probabilities[0].keys()
            == logs.top_log_probabilities[0].keys()
        )


def test_what_does_not_fit(model, rng):
    logits = Tensor.from_numpy(rng.random((1, 20), np.float32))
    given = dict(
        input_row_offsets=np.array([0, 1]), logits=None, next_token_logits=logits, tokens=np.array([1]),
        sampled_tokens=np.array([2]),
    )  # fmt: skip
    compute = lambda **more: compute_log_probabilities_ragged(CPU(), model, **given, **more)  # noqa: E731
    assert compute(batch_top_n=[0], batch_echo=[False]) == [None]
    with pytest.raises(ValueError, match="need the logits of all tokens"):
        compute(batch_top_n=[1], batch_echo=[True])
    with pytest.raises(
        ValueError, match="8 log-probabilities per token are requested, and the graph returns 7"
    ):
        compute(batch_top_n=[8], batch_echo=[False])
    with pytest.raises(ValueError, match="levels is 0"):
        log_probabilities_ragged_graph(DeviceRef.CPU(), levels=0)
