"""Log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, TensorType, ops
from max.interfaces import LogProbabilities

Floats = npt.NDArray[np.floating[Any]]


def log_totals(logits: Floats) -> npt.NDArray[np.float64]:
    """What to subtract from rows of logits for their log-probabilities: ``log(sum(exp(logits)))``, ``[rows, 1]``.

    Args:
        logits: ``[rows, vocab]``.
    """
    most = logits.max(axis=-1, keepdims=True).astype(np.float64)
    # only the sum is in float64: float32 loses digits in that over a vocabulary, not in each exp
    exponentials = np.exp(logits - most.astype(np.float32), dtype=np.float32)
    return most + np.log(np.sum(exponentials, axis=-1, keepdims=True, dtype=np.float64))


def log_softmax(logits: Floats) -> npt.NDArray[np.float32]:
    """The log-probabilities of rows of logits.

    Args:
        logits: ``[rows, vocab]``.
    """
    return (logits - log_totals(logits)).astype(np.float32)


def of_rows(
    logits: Floats, tokens: Sequence[int], top_n: int, more: Sequence[int] = ()
) -> LogProbabilities:
    """The log-probabilities of one token per row, and of the likeliest tokens of each row.

    Args:
        logits: ``[rows, vocab]``.
        tokens: The token of each row.
        top_n: The number of likeliest tokens; the row's own token is returned besides.
        more: Further tokens to return for each row.
    """
    token_logs: list[float] = []
    top: list[dict[int, float]] = []
    for row, token, total in zip(logits, tokens, log_totals(logits)[:, 0], strict=True):
        named = list(dict.fromkeys([*_likeliest_tokens(row, top_n).tolist(), token, *more]))
        logs = (row[named] - total).astype(np.float32).tolist()
        top.append(dict(zip(named, logs, strict=True)))
        token_logs.append(top[-1][token])
    return LogProbabilities(token_logs, top)


def _likeliest_tokens(row: Floats, count: int) -> npt.NDArray[np.int64]:
    """The likeliest tokens of a row; of equal ones the lower token comes first, as in sampling."""
    if count == 1 and not np.isnan(row[best := row.argmax()]):
        return np.array([best])
    if 0 < count < len(row):
        least = np.partition(row, -count)[-count]
        found = np.flatnonzero(row >= least)  # with all tokens that are equal to the last one
        if len(found) < len(row):  # NaN sorts last and compares with nothing
            return found[np.argsort(-row[found], kind="stable")][:count]
    return np.argsort(-row, kind="stable")[:count]


def log_probabilities_ragged_graph(device: DeviceRef, *, levels: int) -> Graph:
    """Builds the graph that :func:`compute_log_probabilities_ragged` runs.

    Inputs: logits float32 ``[rows, vocab]``; the token of each row int64 ``[rows]``. Outputs: the
    log-probability of that token float32 ``[rows]``; the likeliest ones' float32 ``[rows, k]``; their
    tokens int64 ``[rows, k]``; k is ``2 ** levels - 1``.

    Args:
        device: The device of the graph.
        levels: The graph returns ``2 ** levels - 1`` likeliest tokens; 3 suffices for the 5 of
            OpenAI's API.

    Raises:
        ValueError: ``levels`` is less than 1.
    """
    if levels < 1:
        raise ValueError(f"log_probabilities_ragged_graph: levels is {levels}; expected at least 1")
    types = [
        TensorType(DType.float32, ["rows", "vocab"], device),
        TensorType(DType.int64, ["rows"], device),
    ]
    with Graph("log_probabilities_ragged", input_types=types) as graph:
        logits, tokens = (value.tensor for value in graph.inputs)
        logs = ops.logsoftmax(logits, axis=-1)
        token_logs = ops.gather_nd(logs, ops.unsqueeze(tokens, -1), batch_dims=1)
        values, indices = ops.top_k(logs, 2**levels - 1, -1)
        graph.output(token_logs, values, indices)
    return graph


def compute_log_probabilities_ragged(
    device: Device,
    model: Model,
    *,
    input_row_offsets: npt.NDArray[np.integer[Any]],
    logits: Tensor | None,
    next_token_logits: Tensor,
    tokens: npt.NDArray[np.integer[Any]],
    sampled_tokens: npt.NDArray[np.integer[Any]],
    batch_top_n: Sequence[int],
    batch_echo: Sequence[bool],
) -> list[LogProbabilities | None]:
    """The log-probabilities of a ragged batch: of the sampled tokens, with echo also of the prompts.

    Args:
        device: The device of the graph.
        model: The loaded graph of :func:`log_probabilities_ragged_graph`.
        input_row_offsets: The offset of each request in ``tokens`` and ``logits``; ``[batch + 1]``.
        logits: The logits of all tokens ``[tokens, vocab]``; not needed without echo.
        next_token_logits: The logits of each request's last token ``[batch, vocab]``.
        tokens: The input tokens ``[tokens]``.
        sampled_tokens: The sampled tokens ``[batch]``.
        batch_top_n: The number of likeliest tokens per request; 0: no log-probabilities.
        batch_echo: Whether a request gets those of its prompt too.

    Returns:
        The log-probabilities of each request, or None; with echo one position per token of the prompt
        but the first, then the sampled token's.

    Raises:
        ValueError: Echo without ``logits``, or more likeliest tokens than the graph returns.
    """
    requested = [i for i, top in enumerate(batch_top_n) if top > 0]
    if not requested:
        return [None] * len(batch_top_n)
    rows: list[npt.NDArray[Any]] = []
    chosen: list[npt.NDArray[Any]] = []
    last = next_token_logits.to(CPU()).to_numpy()
    all_logits = None if logits is None else logits.to(CPU()).to_numpy()
    for i in requested:
        begin, end = int(input_row_offsets[i]), int(input_row_offsets[i + 1])
        if batch_echo[i]:
            if all_logits is None:
                raise ValueError("log-probabilities with echo need the logits of all tokens")
            rows.append(all_logits[begin:end])
            # each token of the prompt is predicted by the row before it
            chosen.append(np.append(tokens[begin + 1 : end], sampled_tokens[i]))
        else:
            rows.append(last[i : i + 1])
            chosen.append(sampled_tokens[i : i + 1])
    inputs = (
        np.concatenate(rows).astype(np.float32, copy=False),
        np.concatenate(chosen).astype(np.int64),
    )
    outputs = model.execute(*(Tensor.from_numpy(array).to(device) for array in inputs))
    token_logs, values, indices = (cast(Tensor, out).to(CPU()).to_numpy() for out in outputs)
    if max(batch_top_n) > values.shape[1]:
        raise ValueError(
            f"{max(batch_top_n)} log-probabilities per token are requested, and the graph returns "
            f"{values.shape[1]}; build it with more levels"
        )
    results: list[LogProbabilities | None] = [None] * len(batch_top_n)
    first_row = 0
    for i, part in zip(requested, rows, strict=True):
        positions = range(first_row, first_row + len(part))
        first_row += len(part)
        top_n = batch_top_n[i]
        tops: list[dict[int, float]] = []
        for row in positions:
            top = dict(
                zip(indices[row, :top_n].tolist(), values[row, :top_n].tolist(), strict=True)
            )
            # the token itself need not be among the likeliest
            top.setdefault(int(inputs[1][row]), float(token_logs[row]))
            tops.append(top)
        results[i] = LogProbabilities([float(token_logs[row]) for row in positions], tops)
    return results
