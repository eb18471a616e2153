"""Costs of steps that are learned from a log: against costs that are known, and logs of an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from max._config import flags
from max.entrypoints.cli import cli
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.pipelines.core import InputError
from max.pipelines.generation.engine import Engine
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.scheduler.measured_costs import MeasuredCosts, Step, read_steps, shape_of
from max.pipelines.scheduler.simulation import CostModel, Machine
from tests.pipelines.counting_pipeline import CountingPipeline, context

KNOWN = CostModel(step=4e-3, prompt_token=0.3e-3, sequence=0.4e-3, cached_token=1e-6)


def known_steps(
    count: int = 400, noise: float = 0.0, seed: int = 0, most_rows: int = 8
) -> Iterator[Step]:
    """Steps that take what `KNOWN` says, or as much more or less as lognormal noise of a mean of 1."""
    draw = random.Random(seed)
    for number in range(count):
        rows, steps = draw.randint(1, most_rows), draw.randint(1, 12)
        prompts = draw.randint(1, rows) if number % 2 else 0
        lengths = [draw.randint(2, 200) for _ in range(prompts)]
        running = [draw.randint(2, 300) for _ in range(rows - prompts)]
        cached = sum(lengths) + sum(running)
        pairs = sum(each * (each + 1) // 2 for each in lengths)
        steps = 1 if prompts else steps
        # a sequence grows in each step, so the steps have one after another more cached tokens
        seconds = sum(KNOWN.decoding_seconds(rows, cached, steps))
        seconds += KNOWN.prompt_token * sum(lengths)
        seconds *= float(np.exp(draw.gauss(-noise * noise / 2, noise)))
        wait = draw.uniform(0, seconds)
        yield Step(
            rows, prompts, sum(lengths), cached, pairs, 0, wait, steps, max(seconds - wait, 0.0)
        )


def batch(prompts: list[int], running: list[int]) -> list:
    """Requests: prompts of some lengths, and ones that run."""
    found = [context(range(length), 100) for length in prompts]
    for length in running:
        one = context(range(length - 1), 100)
        one.update(0)
        found.append(one)
    return found


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_known_costs_are_found(rows: int) -> None:
    costs = MeasuredCosts(list(known_steps()))
    running = batch([], [40] * rows)
    assert costs.seconds(running, 5) == pytest.approx(KNOWN.seconds(running, 5), rel=5e-3)
    assert costs.decoding_seconds(rows, 40 * rows, 9) == pytest.approx(
        KNOWN.decoding_seconds(rows, 40 * rows, 9), rel=1e-2
    )
    mixed = batch([50, 120], [30] * (rows - 1))
    assert costs.seconds(mixed, 1) == pytest.approx(KNOWN.seconds(mixed, 1), rel=2e-2)


def test_parts_of_long_prompts_and_calls() -> None:
    """A constant for each execution, and what attention costs, which `CostModel` does not have."""
    steps = [
        replace(step, wait=step.wait + 2e-3 + 5e-7 * step.pairs + (1e-3 if step.prompts else 0))
        for step in known_steps(800)
    ]
    parts = MeasuredCosts(steps).parts_ms()
    assert parts["decoding_call"] == pytest.approx(2.0, rel=0.05)
    # the constant of decoding is none of reading prompts: both are fitted by themselves
    assert parts["prompts_call"] == pytest.approx(3.0, rel=0.05)
    assert parts["prompt_pair"] == pytest.approx(5e-4, rel=0.05)
    assert parts["prompt_token"] == pytest.approx(0.3, rel=0.05)
    assert parts["cached_token"] == pytest.approx(1e-3, rel=0.1)


def test_a_curve_of_rows() -> None:
    """A step of two sequences may take as long as one of one, and eight as long as sixteen."""
    table = {1: 2e-3, 2: 2e-3, 4: 3e-3, 8: 9e-3, 16: 9.5e-3}
    draw = random.Random(1)
    steps = [*known_steps(100, most_rows=1)]
    steps = [step for step in steps if step.prompts]
    for _ in range(300):
        rows, count = draw.choice(list(table)), draw.randint(1, 9)
        steps.append(Step(rows, 0, 0, 50 * rows, 0, 0, 0.0, count, 1e-3 + count * table[rows]))
    costs = MeasuredCosts(steps)
    found = costs.parts_ms()["decoding_step"]
    assert found == pytest.approx({rows: 1e3 * value for rows, value in table.items()}, rel=1e-3)
    # between two numbers of sequences a line, which goes on beyond the last one
    for rows, expected in ((3, 2.5e-3), (12, 9.25e-3), (32, 10.5e-3)):
        assert costs.seconds(batch([], [50] * rows), 4) == pytest.approx(1e-3 + 4 * expected)


def test_rows_without_a_step_cost_what_their_neighbors_do() -> None:
    steps = [step for step in known_steps(600) if step.prompts or step.rows in (1, 8)]
    found = MeasuredCosts(steps).parts_ms()["decoding_step"]
    assert found[1] < found[2] < found[4] < found[8]
    assert found[4] - found[2] == pytest.approx(found[8] - found[4], rel=1e-6)


def test_deviations_are_drawn_from_what_was_measured() -> None:
    """Their mean is 1, they are as wide as those of the log, and the same for the same seed."""
    steps = list(known_steps(4000, noise=0.3))
    running = batch([], [40] * 4)
    drawn = MeasuredCosts(steps, seed=3)
    times = [drawn.seconds(running, 5) for _ in range(2000)]
    plain = KNOWN.seconds(running, 5)
    assert fmean(times) == pytest.approx(plain, rel=0.05)
    assert np.std(np.log(times)) == pytest.approx(0.3, rel=0.1)
    assert np.quantile(times, 0.99) / plain == pytest.approx(np.exp(0.3 * 2.33 - 0.045), rel=0.1)
    again = MeasuredCosts(steps, seed=3)
    assert [again.seconds(running, 5) for _ in range(20)] == times[:20]
    # what an execution of several steps deviates, each of its steps does
    durations = drawn.decoding_seconds(4, 160, 500)
    assert len(durations) == 500 and 4 < len(set(durations)) < 200


def test_totals_are_those_of_the_log() -> None:
    """Noise that is skewed biases least squares of relative errors; the sums are right nevertheless."""
    steps = list(known_steps(2000, noise=0.8, seed=4))
    costs = MeasuredCosts(steps)
    for kind in (0, 1):
        chosen = [step for step in steps if bool(step.prompts) is bool(kind)]
        expected = sum(step.wait + step.seconds for step in chosen)
        call, table = costs.parts_ms()["decoding_call"], costs.parts_ms()
        found = 0.0
        for step in chosen:
            rows = 1e3 * costs._step_s(step.rows, step.cached_tokens)
            if kind:
                found += rows + table["prompts_call"] + table["prompt"] * step.prompts
                found += table["prompt_token"] * step.prompt_tokens
                found += table["prompt_pair"] * step.pairs
            else:
                grown = step.cached_tokens + step.rows * (step.steps - 1) / 2
                found += call + step.steps * 1e3 * costs._step_s(step.rows, grown)
        assert found / 1e3 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_simulation_is_that_of_the_known_costs(noise: float) -> None:
    limits = SchedulerLimits(max_batch_size=8, enable_in_flight_batching=True)
    learned = MeasuredCosts(list(known_steps(3000, noise=noise)))
    load = SimulatedLoad(300, 120, 0, 30, 1, 5)
    numbers = [
        run_simulated(Machine(limits, 400, cost=cost), load, rate=15.0) for cost in (KNOWN, learned)
    ]
    for name, close in (("ttft_ms", 0.1), ("latency_ms", 0.05 + noise / 4)):
        for which in ("median", "p99"):
            assert numbers[1][name][which] == pytest.approx(numbers[0][name][which], rel=close)
    assert numbers[1]["output_throughput"] == pytest.approx(
        numbers[0]["output_throughput"], rel=0.02
    )


def test_what_a_log_has(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    pipeline = CountingPipeline(pages=256, seconds=2e-3)
    limits = SchedulerLimits(
        max_batch_size=4, prefill_chunk_size=12, enable_in_flight_batching=True
    )
    with flags.override(MAX_STEP_LOG=path):
        engine = Engine(pipeline, limits)
    engine.submit(context(range(8), 3))
    engine.submit(context(range(100, 120), 2))
    while not engine.idle:
        engine.step()
    engine.submit(context(range(200, 205), 1))
    engine.step()
    steps = read_steps(path)
    shapes = [(s.rows, s.prompts, s.prompt_tokens, s.cached_tokens, s.pairs) for s in steps]
    assert shapes == [
        (2, 2, 8 + 4, 8 + 20, 36 + 10),  # the first prompt, and 4 tokens of the second
        (2, 1, 12, 9 + 20, 12 * 4 + 78),  # a token of the first, 12 tokens of the second
        (2, 1, 4, 10 + 20, 4 * 16 + 10),
        (1, 0, 0, 21, 0),
        (1, 1, 5, 5, 15),
    ]
    assert all(step.seconds >= 2e-3 and step.steps == 1 for step in steps)
    # before the first request, and after the last one, the engine was idle
    assert steps[0].wait == steps[4].wait == 0 and all(0 < step.wait < 1 for step in steps[1:4])


def test_no_log_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = CountingPipeline()
    engine = Engine(pipeline, SchedulerLimits())
    engine.submit(context(range(8), 3))
    while not engine.idle:
        engine.step()
    assert not list(tmp_path.iterdir())


def test_drafted_tokens_are_no_prompt() -> None:
    one = batch([], [9])[0]
    one.set_draft((5, 6, 7))
    assert asdict(shape_of([one])) == {
        "rows": 1, "prompts": 0, "prompt_tokens": 0, "cached_tokens": 9, "pairs": 0, "draft_tokens": 3,
    }  # fmt: skip
    with pytest.raises(InputError, match="drafted") as error:
        MeasuredCosts([*known_steps(), Step(1, 0, 0, 9, 0, 3)])
    assert "--speculative-method none" in str(error.value.remedy)


def test_too_few_steps() -> None:
    with pytest.raises(InputError, match="0 steps that decode, at least 32"):
        MeasuredCosts([step for step in known_steps() if step.prompts])
    with pytest.raises(InputError, match="31 steps that read prompts, at least 32"):
        decoding = [step for step in known_steps() if not step.prompts]
        MeasuredCosts([*decoding, *[step for step in known_steps() if step.prompts][:31]])


WRONG = [
    ("", "no step"),
    ("[1]", "it is no object"),
    ("{}", "its fields are"),
    ({"rows": 0}, "0 prompts of 0 rows"),
    ({"rows": 1.5}, "rows is 1.5"),
    ({"rows": True}, "rows is True"),
    ({"rows": 1 << 21}, "rows in"),
    ({"prompts": 2}, "2 prompts of 1 rows"),
    ({"steps": 0}, "in 0 steps"),
    ({"seconds": -1}, "from 0 on"),
    ({"seconds": float("nan")}, "from 0 on"),
    ({"wait": 1e300}, "below 1e12"),
    ({"wait": "1"}, "wait is '1'"),
    ({"more": 1}, "its fields are"),
    ("[" * 100_000, "no step"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_logs_that_are_wrong(tmp_path: Path, line: str | dict, message: str) -> None:
    path, good = tmp_path / "steps", asdict(Step(1, 0, 0, 9, 0, 0, 0.0, 1, 0.01))
    text = line if isinstance(line, str) else json.dumps({**good, **line})
    path.write_text(json.dumps(good) + "\n" + text + "\n")
    with pytest.raises(InputError, match="line 2 is no step") as error:
        read_steps(path)
    assert message in str(error.value) and "MAX_STEP_LOG" in str(error.value.remedy)


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_steps(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    path, out = tmp_path / "steps", tmp_path / "numbers.json"
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in known_steps(3000)))
    common = ["benchmark", "--simulate", "--num-prompts", "60", "--request-rate", "5"]
    common += ["--max-batch-size", "8", "--input-len", "120", "--output-len", "30"]
    found = []
    for costs in (str(path), "4,0.3,0.4,0.001"):
        cli.main([*common, "--costs", costs, "--json", str(out)], standalone_mode=False)
        found.append(json.loads(out.read_text())[0]["latency_ms"]["median"])
    assert found[0] == pytest.approx(found[1], rel=0.05)
    with pytest.raises(Exception, match="is no file, nor numbers"):
        cli.main([*common, "--costs", str(tmp_path / "absent")], standalone_mode=False)


@pytest.mark.parametrize("seed", range(6))
def test_no_part_costs_less_than_nothing(seed: int) -> None:
    """Of noisy steps, a free fit takes parts away from each other."""
    parts = MeasuredCosts(list(known_steps(200, noise=1.0, seed=seed))).parts_ms()
    rows = parts.pop("decoding_step")
    assert min(parts.values()) >= 0 and min(rows.values()) >= 0, parts
