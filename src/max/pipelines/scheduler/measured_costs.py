"""What steps of an engine cost, learned from a log of its steps."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import TextGenerationContext
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.exceptions import InputError

_LEAST_STEPS = 32
"""The fewest decoding steps, and steps with prompts, that costs are learned from."""
_MOST_STEPS = 1 << 20
"""The most lines of a log that are read."""
_DRAWN_FROM = (
    4096  # the most deviations of a kind that are kept, spread over all that were measured
)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the costs of a batch depend on.

    Args:
        rows: Its requests.
        prompts: Those whose prompt, or a chunk of it, is read.
        prompt_tokens: The tokens that are read of prompts.
        cached_tokens: The lengths of all sequences together.
        pairs: The pairs of a query and a key that attention has for the tokens of prompts.
        draft_tokens: Drafted tokens that are verified.
    """

    rows: int
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    pairs: int
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class Step(BatchShape):
    """An execution of a batch, as a log has it.

    Args:
        wait: The seconds since the one before, for scheduling and messages; 0 where no request waited.
        steps: How often the model ran.
        seconds: How long that took.
    """

    wait: float = 0.0
    steps: int = 1
    seconds: float = 0.0


def shape_of(batch: Sequence[TextGenerationContext]) -> BatchShape:
    """What the costs of a batch depend on, before it runs.

    Args:
        batch: The requests.
    """
    prompts = prompt_tokens = cached_tokens = pairs = draft_tokens = 0
    for context in batch:
        draft = draft_length(context)
        new = context.active_length - draft
        cached_tokens += context.current_length
        draft_tokens += draft
        if new > 1:
            prompts += 1
            prompt_tokens += new
            # the rest of a prompt that is read in chunks is not attended to yet
            pairs += new * context.start_idx + new * (new + 1) // 2
    return BatchShape(len(batch), prompts, prompt_tokens, cached_tokens, pairs, draft_tokens)


class MeasuredCosts:
    """The costs of the steps of an engine that was measured, as `CostModel` has them.

    A decoding execution takes a constant, and for each step a duration that is a line between numbers of sequences
    (1, 2, 4, 8, …) plus a part per cached token. One that reads prompts takes what its sequences take, a constant, and
    parts per prompt, per token, and per pair of query and key. All are at least 0, fitted for the least squares of
    relative errors, and scaled such that each kind takes as long in all as was measured. What a single execution
    deviated is drawn from what was measured: otherwise the slowest tenth of a simulation would be too fast.

    Args:
        steps: The log.
        seed: Of the drawn deviations.

    Raises:
        InputError: There are too few steps of a kind, or some verify drafted tokens: how many of those are right is
            not simulated.
    """

    def __init__(self, steps: Sequence[Step], seed: int = 0) -> None:
        if any(step.draft_tokens for step in steps):
            raise InputError(
                "the log has steps that verify drafted tokens",
                "Start the server with --speculative-method none.",
            )
        decoding = [step for step in steps if not step.prompts]
        reading = [step for step in steps if step.prompts]
        for name, found in (("decode", decoding), ("read prompts", reading)):
            if len(found) < _LEAST_STEPS:
                raise InputError(
                    f"the log has {len(found)} steps that {name}, at least {_LEAST_STEPS} are needed",
                    "Send the server more requests, at the rates that matter.",
                )
        most = max(step.rows for step in steps)
        self._knots = [1 << power for power in range((most - 1).bit_length() + 1)]
        self._draw = random.Random(seed)
        # rows that no decoding step had take no part in the fit: they cost what their neighbors do
        table = np.array([self._decoding_parts(step) for step in decoding])
        measured = np.array([step.wait + step.seconds for step in decoding])
        self._decoding = _fit(table, measured)
        self._decoding[1:-1] = _fill_gaps(
            self._decoding[1:-1], (table[:, 1:-1] > 0).sum(axis=0) > 0
        )
        self._decoding_deviations = _deviations(table @ self._decoding, measured)
        # what an execution lasts that nothing interrupts
        self._call_s = float(np.quantile([step.seconds for step in decoding], 0.9))
        table = np.array([self._reading_parts(step) for step in reading])
        measured = np.array([step.wait + step.seconds for step in reading])
        rows = np.array([self._step_s(step.rows, step.cached_tokens) for step in reading])
        self._reading = _fit(table, measured - rows, measured)
        self._reading_deviations = _deviations(rows + table @ self._reading, measured)

    def parts_ms(self) -> dict[str, Any]:
        """What was learned, in milliseconds: of decoding by the number of sequences, of prompts by their parts."""
        names = ("prompts_call", "prompt", "prompt_token", "prompt_pair")
        return {
            "decoding_call": 1e3 * float(self._decoding[0]),
            "decoding_step": {
                rows: 1e3 * float(seconds)
                for rows, seconds in zip(self._knots, self._decoding[1:-1], strict=True)
            },
            "cached_token": 1e3 * float(self._decoding[-1]),
            **dict(zip(names, (1e3 * self._reading).tolist(), strict=True)),
            "longest_call": 1e3 * self._call_s,
        }

    def seconds(self, batch: Sequence[TextGenerationContext], steps: int) -> float:
        """The duration of an execution.

        Args:
            batch: The requests.
            steps: The number of tokens that each request gets.
        """
        shape = shape_of(batch)
        rows = self._step_s(shape.rows, shape.cached_tokens)
        if shape.prompts:
            whole = rows + float(np.dot(self._reading_parts(shape), self._reading))
            return whole * self._draw.choice(self._reading_deviations)
        whole = float(self._decoding[0]) + rows * steps
        return whole * self._draw.choice(self._decoding_deviations)

    def decoding_seconds(self, batch: int, cached_tokens: int, steps: int) -> list[float]:
        """The durations of steps that give the same requests a token each.

        Args:
            batch: The number of requests.
            cached_tokens: The tokens that they have before the first step.
            steps: The number of steps.
        """
        durations: list[float] = []
        while len(durations) < steps:
            first = self._step_s(batch, cached_tokens + batch * len(durations))
            count = min(max(round(self._call_s / first), 1), steps - len(durations))
            deviation = self._draw.choice(self._decoding_deviations)
            last = self._step_s(batch, cached_tokens + batch * (len(durations) + count - 1))
            middle = ((first + last) / 2 + float(self._decoding[0]) / count) * deviation
            durations += [middle] * count
        return durations

    def _step_s(self, rows: int, cached_tokens: float) -> float:
        """The seconds that a number of sequences add to a step."""
        table, token = self._decoding[1:-1], float(self._decoding[-1])
        last = self._knots[-1]
        if rows > last:  # the last line goes on; it comes from 0 where there is one number only
            low, begin = (0, 0.0) if len(table) == 1 else (self._knots[-2], float(table[-2]))
            slope = (float(table[-1]) - begin) / (last - low)
            return float(table[-1]) + slope * (rows - last) + token * cached_tokens
        return float(np.interp(rows, self._knots, table)) + token * cached_tokens

    def _decoding_parts(self, step: Step) -> list[float]:
        """What the constants of a decoding execution are multiplied by."""
        parts = np.zeros(len(self._knots))
        upper = int(np.searchsorted(self._knots, step.rows))
        if upper == 0 or self._knots[upper] == step.rows:
            parts[upper] = step.steps
        else:
            low, high = self._knots[upper - 1], self._knots[upper]
            share = (step.rows - low) / (high - low)
            parts[upper - 1], parts[upper] = step.steps * (1 - share), step.steps * share
        # the sequences grow with each step
        grown = step.cached_tokens + step.rows * (step.steps - 1) / 2
        return [1.0, *parts, step.steps * grown]

    @staticmethod
    def _reading_parts(shape: BatchShape) -> list[float]:
        """What the constants of an execution that reads prompts are multiplied by."""
        return [1.0, shape.prompts, shape.prompt_tokens, shape.pairs]


def _fit(
    table: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """The factors of columns, none below 0, with the least squares of errors relative to `scale` (None: `seconds`);
    their sum over all rows is that of `seconds`.
    """
    weights = 1 / np.maximum(seconds if scale is None else scale, 1e-9)
    weighted, goal = table * weights[:, None], seconds * weights
    # columns of like size, as tokens and constants differ by many magnitudes
    sizes = np.linalg.norm(weighted, axis=0)
    left = [column for column in range(table.shape[1]) if sizes[column] > 0]
    factors = np.zeros(table.shape[1])
    while left:
        found = np.linalg.lstsq(weighted[:, left] / sizes[left], goal, rcond=None)[0]
        if found.min() >= 0:
            factors[left] = found / sizes[left]
            break
        del left[int(found.argmin())]
    total = float((table @ factors).sum())
    return factors * (max(float(seconds.sum()), 0.0) / total) if total > 0 else factors


def _fill_gaps(
    values: npt.NDArray[np.float64], has_value: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Values by place, with those that are not known on lines between their neighbors."""
    places = np.arange(len(values))
    return np.interp(places, places[has_value], values[has_value])


def _deviations(expected: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> list[float]:
    """What single executions took relative to what was expected, in order; their weighted mean is 1."""
    ratios = np.sort(seconds / np.maximum(expected, 1e-9))
    if len(ratios) > _DRAWN_FROM:
        ratios = ratios[np.linspace(0, len(ratios) - 1, _DRAWN_FROM).astype(int)]
    return (ratios / ratios.mean()).tolist()


def read_steps(path: Path) -> list[Step]:
    """The steps of a log that ``MAX_STEP_LOG`` wrote.

    Args:
        path: The file.

    Raises:
        InputError: It cannot be read, or a line is wrong.
    """
    steps: list[Step] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(steps) >= _MOST_STEPS:
                    break
                try:
                    steps.append(_step(json.loads(line)))
                except (ValueError, TypeError, RecursionError) as error:
                    raise InputError(
                        f"{path}: line {number} is no step: {error}",
                        "A server that is started with MAX_STEP_LOG=FILE writes such a file.",
                    ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}",
            "A server that is started with MAX_STEP_LOG=FILE writes such a file.",
        ) from error
    return steps


def _step(value: Any) -> Step:
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    names = {field.name for field in fields(Step)}
    if value.keys() != names:
        raise ValueError(f"its fields are {sorted(value)}; expected {sorted(names)}")
    for name, number in value.items():
        kind = (int, float) if name in ("wait", "seconds") else int
        if isinstance(number, bool) or not isinstance(number, kind):
            raise ValueError(f"{name} is {number!r}")
        if not 0 <= number < 1e12 or not math.isfinite(number):
            raise ValueError(f"{name} is {number!r}; expected from 0 on, below 1e12")
    step = Step(**value)
    if step.rows < max(step.prompts, 1) or step.rows > 1 << 20 or step.steps < 1:
        raise ValueError(f"{step.prompts} prompts of {step.rows} rows in {step.steps} steps")
    return step
