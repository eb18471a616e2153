"""The router and the scheduler of several replicas in simulated time, and the files of traces."""

from __future__ import annotations

import json
import operator
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.entrypoints.cli import cli
from max.entrypoints.load_test.replicas import ReplicaNumbers, run_replicas
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.entrypoints.load_test.traces import BLOCK, read_trace
from max.pipelines.core import InputError
from max.pipelines.scheduler import SchedulerLimits, simulation
from max.pipelines.scheduler.scheduler import TextScheduler
from max.pipelines.scheduler.simulation import (
    Arrival,
    Machine,
    Timeline,
    TokenRanges,
    simulate,
)

PAGE = 16
LIMITS = SchedulerLimits(
    max_batch_size=8, prefill_chunk_size=128, enable_in_flight_batching=True, max_num_steps=1
)


def random_arrivals(*args: Any, **options: Any) -> list[Arrival]:
    return list(simulation.random_arrivals(*args, **options))


def machine(pages: int) -> Machine:
    return Machine(LIMITS, pages, PAGE)


@dataclass(frozen=True)
class Run:
    """A simulation with the course of each request, in the order of the arrivals."""

    timelines: list[Timeline]
    numbers: ReplicaNumbers


def run(machine: Machine, arrivals: list[Arrival], count: int, routing: Any = "prefix") -> Run:
    timelines = [Timeline(arrival) for arrival in arrivals]
    coming = sorted(timelines, key=lambda each: each.arrival.time)
    return Run(timelines, run_replicas(machine, coming, count, routing))


def tenants(count: int, rate: float, prefix: int = 256, seed: int = 0) -> list[Arrival]:
    """Eight tenants, each with a prompt of its own before every question."""
    draw, now, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        first = draw.randrange(8) * 10_000
        own = ((number + 1) * 1_000_003 + i for i in range(draw.randint(8, 24)))
        arrivals.append(Arrival(now, (*range(first, first + prefix), *own), draw.randint(4, 12)))
        now += draw.expovariate(rate)
    return arrivals


@pytest.mark.parametrize("routing", ["prefix", "load", "round-robin", "power-of-two"])
def test_one_replica_is_an_engine(routing) -> None:
    arrivals = random_arrivals(60, 30.0, 90, 12, 20, seed=3)
    for pages in (40, 400):
        alone, preemptions = simulate(machine(pages), arrivals)
        done = run(machine(pages), arrivals, 1, routing)
        assert [each.tokens for each in done.timelines] == [each.tokens for each in alone]
        assert done.numbers.preemptions == preemptions and done.numbers.shares == [60]


def test_requests_are_not_kept_after_their_end() -> None:
    arrivals = random_arrivals(300, 60.0, 90, 12, 40, clients=3, seed=5)
    kept = run(machine(90), arrivals, 4)
    ended: list[Timeline] = []
    done = run_replicas(machine(90), map(Timeline, arrivals), 4, note_end=ended.append)
    assert done == kept.numbers
    key = operator.attrgetter("arrival.time")
    assert [each.tokens for each in sorted(ended, key=key)] == [
        each.tokens for each in kept.timelines
    ]
    assert [each.tokens[-1] for each in ended] == sorted(each.tokens[-1] for each in ended)


def test_numbers_of_a_simulation_are_those_of_its_requests() -> None:
    """Of random requests, which are made one after another, and of a trace whose times are in no order."""
    arrivals = random_arrivals(120, 40.0, 90, 12, 20, clients=2, seed=9)
    done = run(machine(90), arrivals, 3, "load")
    tokens = [np.array(each.tokens) for each in done.timelines]
    for trace in (None, random.Random(1).sample(arrivals, len(arrivals))):
        load = SimulatedLoad(120, 90, 20, 12, clients=2, seed=9, trace=trace)
        found = run_simulated(machine(90), load, 40.0, 3, "load")
        assert found["completed"] == 120 and found["failed"] == 0
        assert (
            found["total_input_tokens"]
            == done.numbers.prompt_tokens
            == sum(len(a.prompt) for a in arrivals)
        )
        assert found["total_output_tokens"] == sum(map(len, tokens))
        assert found["duration_s"] == max(each[-1] for each in tokens) - arrivals[0].time
        first = [each[0] - arrival.time for each, arrival in zip(tokens, arrivals, strict=True)]
        assert found["ttft_ms"]["mean"] == pytest.approx(1e3 * np.mean(first))
        assert found["ttft_ms"]["max"] == pytest.approx(1e3 * max(first))
        pauses = np.concatenate([np.diff(each) for each in tokens])
        assert found["itl_ms"]["median"] == pytest.approx(1e3 * np.median(pauses))
        each_token = [(each[-1] - each[0]) / (len(each) - 1) for each in tokens if len(each) > 1]
        assert found["tpot_ms"]["mean"] == pytest.approx(1e3 * np.mean(each_token))
        whole = [each[-1] - arrival.time for each, arrival in zip(tokens, arrivals, strict=True)]
        assert found["latency_ms"]["median"] == pytest.approx(1e3 * np.median(whole))


def test_prefixes_stay_where_they_are_cached() -> None:
    """Where no cache holds the prompts of all tenants, each keeps those of some."""
    arrivals = tenants(240, 20.0)
    medians, hits = {}, {}
    for routing in ("prefix", "load", "round-robin"):
        # room for the running requests and three of the eight prompts
        done = run(machine(72), arrivals, 4, routing)
        waits = sorted(each.tokens[0] - each.arrival.time for each in done.timelines)
        medians[routing], hits[routing] = waits[len(waits) // 2], done.numbers.cached_tokens
        assert sum(done.numbers.shares) == 240 and max(done.numbers.shares) <= 120
        assert all(len(each.tokens) == each.arrival.output_tokens for each in done.timelines)
    most = 256 * (240 - 8)
    assert hits["prefix"] >= 0.95 * most and hits["load"] == 0
    assert medians["prefix"] < 0.7 * medians["round-robin"]


def test_more_replicas_share_the_load() -> None:
    arrivals = random_arrivals(200, float("inf"), 60, 10, seed=1)
    ends = []
    for count in (1, 2, 4, 70):
        done = run(machine(4000), arrivals, count)
        ends.append(max(each.tokens[-1] for each in done.timelines))
        assert max(done.numbers.shares) - min(done.numbers.shares) <= 0.5 * 200 / count + 2
    assert ends[1] < 0.6 * ends[0] and ends[2] < 0.6 * ends[1] and ends[3] < 0.3 * ends[2]


def test_the_less_busy_of_two() -> None:
    """Shares are more even than those of single random choices, and each replica gets some."""
    arrivals = random_arrivals(400, float("inf"), 30, 4, seed=2)
    shares = run(machine(4000), arrivals, 8, "power-of-two").numbers.shares
    single = [0] * 8
    for number in random.Random(0).choices(range(8), k=400):
        single[number] += 1
    assert sum(shares) == 400 and max(shares) - min(shares) <= 4 < max(single) - min(single)


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_no_more_requests_than_clients(most: int) -> None:
    """Each request but the first ones arrives when another one ends."""
    arrivals = random_arrivals(80, float("inf"), 60, 10, seed=4)
    ended: list[Timeline] = []
    timelines = [Timeline(arrival) for arrival in arrivals]
    run_replicas(machine(200), timelines, 3, note_end=ended.append, most_open=most)
    assert len(ended) == 80
    ends = sorted(each.tokens[-1] for each in timelines)
    begins = [each.arrival.time for each in timelines]
    assert begins == sorted(begins) and begins == [0.0] * min(most, 80) + ends[: max(80 - most, 0)]
    assert all(each.tokens[0] > each.arrival.time for each in timelines)


def test_traces(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 9, "hash_ids": [7, 8, 10]},
        {"timestamp": 3500, "input_length": 3, "output_length": 1, "hash_ids": [7]},
    ]
    mooncake.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second, third = read_trace(mooncake)
    assert [each.time for each in (first, second, third)] == [0.0, 0.5, 1.5]
    assert len(first.prompt) == 1100 and len(second.prompt) == 1030 and second.output_tokens == 9
    assert first.prompt[: 2 * BLOCK] == second.prompt[: 2 * BLOCK]
    assert first.prompt[2 * BLOCK] != second.prompt[2 * BLOCK]
    assert tuple(third.prompt) == first.prompt[:3]
    assert read_trace(mooncake, 1) == [first]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, two = read_trace(azure)
    assert (
        two.time == pytest.approx(4.314579) and len(one.prompt) == 374 and two.output_tokens == 109
    )
    assert not set(one.prompt) & set(two.prompt)
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,ChatGPT,472,18,490\n"
    )
    assert len(read_trace(burst)[0].prompt) == 472


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("a,b\n1,2\n", "request 1 .*none of the fields timestamp"),
        ('{"timestamp": 1, "input_length": 5}', "request 1 .*output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5}', "'?0'? tokens; at least 1"),
        ('{"timestamp": 1, "input_length": 99999999, "output_length": 5}', "99999999"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 5}', "its time is -1"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 5}', "its time is nan"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 5, "hash_ids": [-1]}', "-1 tokens"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 5, "hash_ids": 4}', "request 1"),
        ("{no json", "line 1 is no JSON"),
        ("[" * 100_000, "no requests|request 1"),
    ],
)
def test_traces_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(file)


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps({**row, "timestamp": 1000 * i}) for i in range(9)))
    out = tmp_path / "numbers.json"
    cli(
        ["benchmark", "--simulate", "--trace", str(trace), "--replicas", "3", "--json", str(out)],
        standalone_mode=False,
    )
    (run,) = json.loads(out.read_text())
    assert run["completed"] == 9 and run["replicas"] == 3 and run["routing"] == "prefix"
    assert run["cached_share"] > 0.7


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets simulations run each decoding step alone."""
    monkeypatch.setattr(TextScheduler, "steady_steps", lambda self: 0)


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_run_at_once_are_those_of_single_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    limits = SchedulerLimits(
        max_batch_size=draw.randint(1, 6),
        prefill_chunk_size=draw.choice((20, 64, 300)),
        enable_in_flight_batching=draw.random() < 0.7,
        mixed_step_ratio=draw.choice((None, 1.5)),
        max_batch_context_length=draw.choice((None, 400)),
    )
    loads = [
        random_arrivals(50, draw.choice((2.0, 40.0, float("inf"))), 90, 40, 20, 3, seed),
        tenants(50, 30.0, 64, seed),
    ]
    for arrivals in loads:
        arrivals = [
            Arrival(each.time, each.prompt, each.output_tokens, each.client, draw.randrange(2))
            for each in arrivals
        ]
        for pages, replicas in ((14, 1), (24, 2), (200, 3)):
            machine_ = Machine(limits, pages, PAGE, draw.random() < 0.8)
            at_once = run(machine_, arrivals, replicas)
            with monkeypatch.context() as patch:
                one_by_one(patch)
                single = run(machine_, arrivals, replicas)
            assert at_once == single
            if replicas == 1:
                timelines, preemptions = simulate(machine_, arrivals)
                assert timelines == single.timelines and preemptions == single.numbers.preemptions


def test_decoding_steps_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps are few batches of the scheduler: a batch for each arrival and end, and for prompts."""
    batches: list[int | None] = []
    schedule = TextScheduler.schedule

    def noted(self: TextScheduler, steps: int | None = None) -> object:
        batches.append(steps)
        return schedule(self, steps)

    monkeypatch.setattr(TextScheduler, "schedule", noted)
    simulate(machine(400), random_arrivals(20, 1.0, 60, 200, seed=2))
    several = [steps for steps in batches if steps is not None]
    assert sum(several) > 1000 and len(batches) < 100


def test_tokens_of_a_prompt_in_runs() -> None:
    for runs in ((), (range(5, 9),), (range(3), range(-7, -12, -1), range(100, 101))):
        prompt, plain = TokenRanges(runs), [token for run in runs for token in run]
        assert len(prompt) == len(plain) and list(prompt) == plain
        assert prompt[1:6] == tuple(plain[1:6]) and prompt == TokenRanges(runs)
        for dtype in (None, np.int64, np.int32):
            array = np.asarray(prompt, dtype)
            assert array.dtype == (dtype or np.int64) and array.tolist() == plain
            assert prompt.__array__(dtype).dtype == array.dtype
    assert TokenRanges((range(3),)) != TokenRanges((range(4),))
