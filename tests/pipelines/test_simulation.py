"""The scheduler on a cost model: times that are computed by hand, and differences between policies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.core import InputError
from max.pipelines.scheduler import SchedulerLimits, simulation
from max.pipelines.scheduler.simulation import (
    Arrival,
    CostModel,
    Machine,
    SimulatedEngine,
    Timeline,
    simulate,
)

COST = CostModel(step=1.0, prompt_token=0.1, sequence=0.01, cached_token=0.0)
INF = float("inf")


def random_arrivals(*args: Any, **options: Any) -> list[Arrival]:
    return list(simulation.random_arrivals(*args, **options))


def test_pages_are_those_of_a_cache_without_options() -> None:
    plain, config = Machine(SchedulerLimits(max_batch_size=1), 9), KVCacheConfig()
    assert plain.page_size == config.kv_cache_page_size
    assert plain.prefix_caching is config.enable_prefix_caching


def machine(pages: int = 1000, **limits) -> Machine:
    values = {"max_batch_size": 4, **limits}
    return Machine(SchedulerLimits(**values), pages, 4, cost=COST)


def test_one_request_by_hand() -> None:
    ((timeline,), preemptions) = simulate(machine(), [Arrival(5.0, tuple(range(20)), 3)])
    # a prompt of 20 tokens, then two steps of one
    assert timeline.tokens == pytest.approx([5 + 1.01 + 2.0, 9.02, 10.03]) and preemptions == 0


def test_chunks_and_batches_by_hand() -> None:
    arrivals = [Arrival(0, tuple(range(10)), 2), Arrival(0, tuple(range(50, 55)), 2)]
    (a, b), _ = simulate(machine(prefill_chunk_size=8, enable_in_flight_batching=True), arrivals)
    # step 1: 8 tokens of a; step 2: its last 2 and b's 5; step 3: one token of each
    assert a.tokens == pytest.approx([1.01 + 0.8 + 1.02 + 0.7, 3.53 + 1.02])
    assert b.tokens == pytest.approx(a.tokens)


def test_steps_of_one_execution_by_hand() -> None:
    """They take equal times; a request that has ended is forgotten."""
    engine, timeline = (
        SimulatedEngine(machine(max_num_steps=3)),
        Timeline(Arrival(0, tuple(range(20)), 5)),
    )
    engine.submit(timeline)
    while not engine.is_idle:
        assert engine._open
        engine.begin()
        engine.end()
    assert timeline.tokens == pytest.approx([3.01, 4.02, 5.03, 6.04, 7.05]) and not engine._open


def test_prefixes_are_read_once() -> None:
    prompt = tuple(range(41))
    (first, second), _ = simulate(machine(), [Arrival(0, prompt, 1), Arrival(50, prompt, 1)])
    assert first.tokens[0] == pytest.approx(1.01 + 4.1)
    assert second.tokens[0] - 50 == pytest.approx(1.01, abs=0.2)


@pytest.mark.parametrize("rate", [0.05, 0.5, INF])
def test_every_token_is_generated_in_order(rate: float) -> None:
    arrivals = random_arrivals(120, rate, 12, 6, prefix_tokens=4, clients=3, seed=1)
    timelines, preemptions = simulate(machine(pages=9, prefill_chunk_size=6), arrivals)
    for timeline in timelines:
        assert len(timeline.tokens) == timeline.arrival.output_tokens
        assert timeline.tokens == sorted(timeline.tokens)
        assert timeline.tokens[0] > timeline.arrival.time
    assert preemptions > 0 or rate != INF
    again, _ = simulate(machine(pages=9, prefill_chunk_size=6), arrivals)
    assert [t.tokens for t in again] == [t.tokens for t in timelines]


def test_random_lengths_are_within_half_of_their_mean() -> None:
    arrivals = random_arrivals(400, INF, 100, 40, seed=5)
    for mean, lengths in (
        (100, [len(each.prompt) for each in arrivals]),
        (40, [each.output_tokens for each in arrivals]),
    ):
        assert 0.5 * mean <= min(lengths) < 0.55 * mean and 1.45 * mean < max(lengths) <= 1.5 * mean
    assert random_arrivals(9, 2.0, 20, 5) == random_arrivals(9, 2.0, 20, 5, seed=0)
    (least,) = random_arrivals(1, INF, 0, 0)
    assert len(least.prompt) == least.output_tokens == 1 and least.time == 0


def test_random_prompts_share_their_prefix_only() -> None:
    for prefix in (0, 7):
        prompts = [list(each.prompt) for each in random_arrivals(30, 2.0, 20, 5, prefix)]
        assert {tuple(prompt[:prefix]) for prompt in prompts} == {tuple(range(1, prefix + 1))}
        own = [token for prompt in prompts for token in prompt[prefix:]]
        assert len(set(own)) == len(own) and min(own) > prefix
        assert max(map(len, prompts)) > 25
    plain, of_several = random_arrivals(30, 2.0, 20, 5), random_arrivals(30, 2.0, 20, 5, clients=3)
    assert {each.client for each in plain} == {"client-0"} and len(
        {each.client for each in of_several}
    ) == 3
    assert all(each.priority == 0 for each in plain)


def test_in_flight_batching_shortens_the_longest_pause() -> None:
    """A long prompt arrives while other requests decode."""
    arrivals = [Arrival(0, (1, 2, 3), 40), Arrival(10, tuple(range(10, 210)), 2)]

    def longest(**limits) -> float:
        (first, _), _ = simulate(machine(prefill_chunk_size=20, **limits), arrivals)
        return max(b - a for a, b in zip(first.tokens, first.tokens[1:], strict=False))

    assert longest(enable_in_flight_batching=True) < 4 < 30 < longest()


def pauses(prompt: int, **limits) -> tuple[list[float], list[float]]:
    """The sorted times between tokens of four requests while prompts come in, and the prompts' first tokens."""
    cost = CostModel(step=5e-3, prompt_token=0.3e-3, sequence=0.15e-3, cached_token=0.02e-6)
    values = {"max_batch_size": 8, "prefill_chunk_size": 512, "enable_in_flight_batching": True}
    arrivals = [Arrival(0, tuple(range(i * 50, i * 50 + 32)), 384) for i in range(4)] + [
        Arrival(0.4 + k, tuple(range(10**6 * (k + 1), 10**6 * (k + 1) + prompt)), 1)
        for k in range(3)
    ]
    timelines, _ = simulate(
        Machine(SchedulerLimits(**{**values, **limits}), 4096, cost=cost), arrivals
    )
    between = [b - a for t in timelines[:4] for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
    return sorted(between), [t.tokens[0] - t.arrival.time for t in timelines[4:]]


def test_long_prompts_hardly_delay_the_others() -> None:
    """The p99 of the time between tokens is at most twice the median, and no prompt starves."""
    plain, first = pauses(4096)
    assert plain[int(0.99 * len(plain))] > 20 * plain[len(plain) // 2]
    spread, later = pauses(4096, mixed_step_ratio=1.8)
    assert spread[-1] <= 2 * spread[len(spread) // 2]
    # a step without prompts takes 5.6 ms
    assert spread[int(0.99 * len(spread))] <= 2 * 5.7e-3
    assert max(later) < 4 * max(first)


def test_prompts_of_one_chunk_are_read_at_once() -> None:
    assert pauses(512, mixed_step_ratio=1.8) == pauses(512)
    assert pauses(513, mixed_step_ratio=1.8) != pauses(513)
    # without decoding in steps with prompts, nothing is gained by short chunks
    single = {"enable_in_flight_batching": False}
    assert pauses(4096, mixed_step_ratio=1.8, **single) == pauses(4096, **single)


def test_many_that_wait_outweigh_few_that_run() -> None:
    """One request decodes while 7 with long prompts wait: they are read at two thirds of full speed or more."""
    cost = CostModel(step=5e-3, prompt_token=0.3e-3, sequence=0.15e-3, cached_token=0.0)
    prompts = [tuple(range(10**6 * k, 10**6 * k + 2048)) for k in range(1, 8)]

    def last(waiting: int, ratio: float | None) -> float:
        limits = SchedulerLimits(
            max_batch_size=8, prefill_chunk_size=512, enable_in_flight_batching=True, mixed_step_ratio=ratio
        )  # fmt: skip
        arrivals = [Arrival(0, tuple(range(70)), 900)] + [
            Arrival(0.2, prompt, 1) for prompt in prompts[:waiting]
        ]
        timelines, _ = simulate(Machine(limits, 4096, cost=cost), arrivals)
        return max(t.tokens[0] for t in timelines[1:]) / waiting

    assert last(7, 1.8) < 1.5 * last(7, None)
    assert last(1, 1.8) > 1.5 * last(1, None)


def test_a_small_client_is_not_kept_waiting() -> None:
    greedy = [Arrival(0, tuple(range(i * 50, i * 50 + 20)), 10, "greedy") for i in range(60)]
    small = [Arrival(1, tuple(range(9000 + i * 50, 9020 + i * 50)), 10, "small") for i in range(4)]
    shared = [Arrival(a.time, a.prompt, a.output_tokens, "one") for a in small]

    def last(own: list[Arrival], others: str) -> float:
        load = [Arrival(a.time, a.prompt, a.output_tokens, others) for a in greedy] + own
        timelines, _ = simulate(machine(), load)
        return max(t.tokens[-1] for t in timelines[60:])

    assert last(small, "greedy") * 3 < last(shared, "one")


def test_a_request_that_never_fits() -> None:
    with pytest.raises(InputError, match="needs 26 pages"):
        simulate(machine(pages=10), [Arrival(0, tuple(range(100)), 5)])


def test_the_command(tmp_path, capfd) -> None:
    numbers, picture = tmp_path / "runs.json", tmp_path / "runs.svg"
    command = [
        "benchmark",
        "--simulate",
        "--num-prompts",
        "60",
        "--input-len",
        "40",
        "--output-len",
        "5",
    ]
    files = ["--json", str(numbers), "--plot", str(picture)]
    assert report(cli, [*command, "--request-rate", "1,20,inf", *files]) == 0
    assert "preemptions" in capfd.readouterr().out
    runs = json.loads(numbers.read_text())
    assert [run["request_rate"] for run in runs] == [1.0, 20.0, "inf"]
    assert all(run["completed"] == 60 for run in runs)
    medians = [run["latency_ms"]["median"] for run in runs]
    assert (
        medians == sorted(medians) and runs[0]["output_throughput"] < runs[2]["output_throughput"]
    )
    assert picture.read_text().count("<circle") == 6
    assert report(cli, [*command, "--costs", "1,2"]) == 2
    assert "give four numbers" in capfd.readouterr().err
