"""The choice of lengths of drafts against a plain model of it, on random histories."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.pipelines.core.draft_tree import LAST_TOKEN
from max.pipelines.generation.drafts.drafter import KINDS
from max.pipelines.generation.drafts.durations import DraftingSeconds, StepSeconds
from max.pipelines.generation.drafts.lengths import DraftLengths

TRIED = (1, 2, 3, 5, 7, 11, 15, 23, 31)
SEEDS = range(6)


class Mean:
    """The least of three durations, then a mean in which a new one, of at most twice the mean, counts a quarter."""

    def __init__(self, seconds: float) -> None:
        self.mean, self.count = seconds, 1

    def add(self, seconds: float) -> None:
        self.count += 1
        old = self.mean
        self.mean = min(old, seconds) if self.count < 4 else 0.75 * old + min(seconds / 4, old / 2)


class Times:
    """Durations of steps: by the number of requests and of drafted tokens, 0 for plain steps."""

    def __init__(self) -> None:
        self.means: dict[tuple[int, int], Mean] = {}

    def record(self, requests: int, drafted: int, seconds: float) -> None:
        key = requests, drafted
        if key not in self.means:
            self.means[key] = Mean(seconds)
            return
        own = self.means[key]
        old = own.mean
        own.add(seconds)
        if own.count > 3 and old > 0:
            for other, mean in self.means.items():
                if other[0] == requests and other != key:
                    mean.mean *= (own.mean / old) ** 0.75

    def plain(self, requests: int) -> float | None:
        mean = self.means.get((requests, 0))
        return mean.mean if mean is not None and mean.count >= 2 else None

    def of(self, requests: int, drafted: int) -> float | None:
        plain = self.plain(requests)
        if plain is None or drafted == 0:
            return plain
        known = {0: plain}
        for (batch, count), mean in self.means.items():
            if batch == requests and count:
                limit = plain * (1 + count / 20) if mean.count < 3 else math.inf
                known[count] = min(mean.mean, limit)
        if drafted in known:
            return known[drafted]
        below = max(count for count in known if count < drafted)
        assumed = max(known[below], plain * (1 + drafted / 20))
        above = [count for count in known if count > drafted]
        if not above:
            return assumed
        return min(float(np.interp(drafted, *zip(*sorted(known.items()), strict=True))), assumed)


@pytest.mark.parametrize("seed", SEEDS)
def test_times_of_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, model = StepSeconds(), Times()
    for _ in range(60):
        requests, drafted = int(rng.integers(1, 3)), int(rng.choice([0, 0, 1, 2, 5, 6, 12]))
        seconds = float(rng.uniform(0.5, 2.0) * rng.choice([1, 1, 1, 4])) * (1 + drafted / 9)
        if rng.integers(0, 15) == 0:
            seconds = 0.0
        times.record(requests, drafted, seconds)
        model.record(requests, drafted, seconds)
        if rng.integers(0, 20) == 0:
            times.doubt(requests)
            for (batch, count), mean in model.means.items():
                if batch == requests and count:
                    mean.count = min(mean.count, 2)
        for batch in (1, 2, 3):
            assert times.plain(batch) == pytest.approx(model.plain(batch))
            for count in range(14):
                assert times.of(batch, count) == pytest.approx(model.of(batch, count))


class Drafting:
    """A weighted line through the lengths and the durations of drafts."""

    def __init__(self) -> None:
        self.count, self.drafts = 0, list[tuple[int, float]]()

    def add(self, drafted: int, seconds: float) -> None:
        known = self.of(drafted)
        self.count += 1
        if self.count in (2, 3):
            if seconds >= known:
                return
            self.drafts = []
        elif known:
            seconds = min(seconds, 2 * known)
        self.drafts.append((drafted, seconds))

    def of(self, drafted: int) -> float:
        if not self.drafts:
            return 0.0
        x, y = np.array(self.drafts).T
        weights = 0.97 ** np.arange(len(x))[::-1]
        mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
        variance = np.average((x - mean_x) ** 2, weights=weights)
        covariance = np.average((x - mean_x) * (y - mean_y), weights=weights)
        slope = (covariance + 0.1 * mean_y / mean_x) / (variance + 0.1)
        return float(mean_y + np.clip(slope, 0.0, mean_y / mean_x) * (drafted - mean_x))


@pytest.mark.parametrize("seed", SEEDS)
def test_times_of_drafting(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, model = DraftingSeconds(), Drafting()
    for _ in range(25):
        assert [times.of(n) for n in (1, 4, 20)] == pytest.approx(
            [model.of(n) for n in (1, 4, 20)], rel=1e-6
        )
        drafted = int(rng.integers(1, 9))
        seconds = float(rng.uniform(0.2, 3.0) * (1 + drafted * rng.choice([0.0, 0.5])))
        times.add(drafted, seconds)
        model.add(drafted, seconds)


class Shares:
    """What drafts of each request and kind have shown: right tokens and trials, which fade."""

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, int], np.ndarray[Any, Any]] = {}

    def add(self, request: Any, key: int, right: int, trials: int) -> None:
        for who in (request, "all"):
            before = self.seen.get((who, key), np.zeros(2))
            self.seen[who, key] = 0.95 * before + (right, trials)

    def plain(self, requests: list[Any], steps: int) -> None:
        for (who, key), pair in self.seen.items():
            if who in (*requests, "all"):
                self.seen[who, key] = pair * 0.98**steps

    def of(self, request: Any, key: int, first: float) -> float:
        share = first
        for who in ("all", request):
            right, trials = self.seen.get((who, key), np.zeros(2))
            share = (right + 2 * share) / (trials + 2)
        return share


def tree_chances(parents: list[int], share: float, other: float) -> list[float]:
    """The probability of each token of a tree to be right."""
    chances: list[float] = []
    for index, parent in enumerate(parents):
        before = parents[:index].count(parent)
        own = share if not before else (1 - share) * other * (1 - other) ** (before - 1)
        chances.append(own * (1.0 if parent == LAST_TOKEN else chances[parent]))
    return chances


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_right_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, model = DraftLengths(8), Shares()
    requests: list[Any] = ["a", "b", "c"]
    for _ in range(40):
        request, kind = requests[rng.integers(3)], int(rng.choice([0, KINDS]))
        action = rng.integers(4)
        if action == 0:
            drafted = int(rng.integers(1, 6))
            right = int(rng.integers(0, drafted + 1))
            lengths.record_verification(request, drafted, right, kind)
            model.add(request, kind, right, right + (right < drafted))
        elif action == 1:
            # two branches; a right first child, the other one, or none
            parents = [LAST_TOKEN, LAST_TOKEN, 0]
            path = [[0, 2], [1], []][rng.integers(3)]
            lengths.record_tree(request, parents, path, kind)
            model.add(request, kind, *{2: (2, 2), 1: (0, 1), 0: (0, 1)}[len(path)])
            if path != [0, 2]:
                model.add(request, ~kind, len(path), 1)
        elif action == 2:
            ids, steps = requests[: rng.integers(1, 4)], int(rng.integers(1, 4))
            lengths.step(ids, 0, 0, 1.0, steps)
            model.plain(ids, steps)
        elif rng.integers(3) == 0:
            lengths.forget(request)
            for key in [key for key in model.seen if key[0] == request]:
                del model.seen[key]
        for who in (*requests, "new"):
            for key in (0, KINDS):
                assert lengths.share(who, key) == pytest.approx(model.of(who, key, 0.7))
                other = lengths._mean(who, ~key, 0.1)
                assert other == pytest.approx(model.of(who, ~key, 0.1))


def fixed(
    plain: float | None, each: float, drafting: tuple[float, float], most: int, **options: Any
) -> DraftLengths:
    """Lengths with known times: a step of n tokens takes `each` a token more, and drafting a part and one a token."""
    lengths = DraftLengths(most, **options)
    known: Any = SimpleNamespace(
        plain=lambda requests: plain,
        of=lambda requests, count: None if plain is None else plain + each * count**1.3,
    )
    lengths.seconds = known
    line: Any = SimpleNamespace(expected=lambda count: drafting[0] + drafting[1] * count)
    lengths._drafting = {1: line}
    return lengths


def best(
    chances: list[float], others: int, requests: int, plain: float, each: float,
    drafting: tuple[float, float], after: float, reads_again: bool,
) -> int:  # fmt: skip
    """The number of tokens with the most tokens a second, at least 3 % over plain steps; the first one of equals."""
    rates = {0: 1.03 * requests / plain}
    for count in range(1, len(chances) + 1):
        if count in TRIED or count == len(chances):
            expected = sum(chances[:count])
            time = plain + each * ((others + count) ** 1.3 - others**1.3) + after
            time += drafting[1] * count + (0 if others else drafting[0])
            if reads_again:
                time += (1 - chances[count - 1]) * each * (1 + round(expected)) ** 1.3
            rates[count] = (requests + expected) / time
    return max(rates, key=lambda count: rates[count])


@pytest.mark.parametrize("reads_again", [False, True])
def test_the_length_with_the_most_tokens_in_a_time(reads_again: bool) -> None:
    rng = np.random.default_rng(reads_again)
    found = set[int]()
    for _ in range(300):
        plain, each = float(rng.uniform(1, 2)), float(rng.choice([0.0, 0.01, 0.05, 0.2]))
        drafting = float(rng.uniform(0, 0.3)), float(rng.choice([0.0, 0.01, 0.1]))
        most, room, requests = (int(rng.integers(1, 40)) for _ in range(3))
        requests, others = 1 + requests % 3, int(rng.choice([0, 0, 3, 9]))
        options = {"reads_again": True} if reads_again else {}
        lengths = fixed(plain, each, drafting, most, **options)
        kind = KINDS
        for _ in range(int(rng.integers(0, 30))):
            lengths.record_verification("a", 9, int(rng.choice([9, 9, 9, 3, 0])), kind)
        lengths.record_tree("a", [LAST_TOKEN] * 2, [[1], []][rng.integers(2)], kind)
        after = float(rng.choice([0.0, 0.5]))
        if after:
            lengths._after = mean_of(after)
            lengths._run = int(rng.integers(0, 2))
            after *= lengths._run == 0
        share = lengths.share("a", kind)
        limit = min(most, room)
        numbers = requests, plain, each, drafting, after, reads_again
        length = lengths.length("a", requests, others, room, kind)
        chain = [share**count for count in range(1, limit + 1)]
        assert length == best(chain, others, *numbers)
        found.add(length)
        parents = [int(rng.integers(-1, index)) for index in range(12)]
        parents = [LAST_TOKEN if parent < 0 else parent for parent in parents]
        chances = tree_chances(parents, share, lengths._mean("a", ~kind, 0.1))
        order = sorted(range(12), key=lambda i: -chances[i])[:limit]
        count = best([chances[i] for i in order], others, *numbers)
        kept = lengths.kept_of_tree("a", requests, others, room, parents, kind)
        assert kept == sorted(order[:count])
        assert all(parents[i] in (LAST_TOKEN, *kept) for i in kept)
    assert len(found) > 6 and 0 in found


def mean_of(seconds: float) -> Any:
    return SimpleNamespace(mean=seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_which_of_two_kinds_of_drafts_is_preferred(seed: int) -> None:
    """The one with more tokens in a time at its best length; a kind that is new to a request is tried."""
    draw, requests, seen = np.random.default_rng(seed), 2, set[bool]()
    for _ in range(40):
        lengths, other = DraftLengths(8), KINDS + 1
        assert lengths.prefers("a", requests, 5, 2, other), "nothing is measured"
        for _ in range(2):
            lengths.seconds.record(requests, 0, 1.0)
        assert lengths.may_draft(requests)
        shares = dict[int, float]()
        for kind in (2, other):
            right = int(draw.integers(9))
            lengths.record_verification("b", 8, right, kind)
            assert kind != 2 or lengths.prefers("a", requests, 5, kind, other), "it is new"
            right = int(draw.integers(9))
            lengths.record_verification("a", 8, right, kind)
            shares[kind] = lengths.share("a", kind)
        cost = float(draw.choice([0.0, 0.02, 0.1]))
        for _ in range(3):
            lengths.record_drafting(4, 4 * cost, other)
        room = int(draw.integers(1, 9))

        def rate(kind: int) -> float:
            best = 1.03 * requests
            for count in {n for n in (*TRIED, room) if n <= room}:  # noqa: B023
                right = sum(shares[kind] ** n for n in range(1, count + 1))  # noqa: B023
                time = 1 + 0.05 * count + (kind == other) * cost * count  # noqa: B023
                best = max(best, (requests + right) / time)
            return best

        if abs(rate(2) - rate(other)) > 1e-6:
            expected = rate(2) > rate(other)
            assert lengths.prefers("a", requests, room, 2, other) == expected
            seen.add(expected)
    assert seen == {True, False}


def test_other_branches_are_assumed_to_be_right_seldom() -> None:
    """One of ten times, as long as nothing is known."""
    lengths = fixed(1.0, 0.004, (0.0, 0.0), 8)
    parents = [LAST_TOKEN] * 3
    assert lengths.kept_of_tree("a", 1, 0, 8, parents) == [0, 1, 2]
    lengths = fixed(1.0, 0.02, (0.0, 0.0), 8)
    # 1 + 0.7 + 0.3 * 0.1 tokens in a time of 1.05 are fewer than 1.7 in 1.02
    assert lengths.kept_of_tree("a", 1, 0, 8, parents) == [0]


def credit(lengths: DraftLengths, requests: int, expected: float) -> None:
    """Checks what drafts may still lose: with a little less nothing is drafted."""
    for more, drafts in ((-1e-6, True), (1e-6, False)):
        other = copy.deepcopy(lengths)
        other.record_drafting(0, expected + more)
        assert other.may_draft(requests) is drafts, expected


@pytest.mark.parametrize("seed", SEEDS)
def test_what_drafts_may_lose(seed: int) -> None:
    """The credit starts as that of 4 plain steps, grows by 2 % of each up to 8, and changes with what drafts give."""
    rng = np.random.default_rng(seed)
    lengths, times, drafting = DraftLengths(8), Times(), Drafting()
    after: Mean | None = None
    has, spent, run = None, 0.0, 0
    for _ in range(50):
        requests = ["a", "b"][: rng.integers(1, 3)]
        batch = len(requests)
        drafted = int(rng.choice([0, 0, 3, 6]))
        plain = times.plain(batch)
        assert lengths.may_draft(batch) is (
            plain is not None and (has is None or has > 0) and run < 64
        )
        if plain is not None and has is None:
            has = 4 * plain
        if drafted:
            seconds = float(rng.uniform(0.05, 0.2))
            # two kinds of one drafter
            lengths.record_drafting(drafted, seconds, KINDS + int(rng.integers(2)))
            drafting.add(drafted, seconds)
            spent += drafting.of(drafted)
        elif rng.integers(3) == 0:
            lengths.record_drafting(0, 0.01, 0)
            has = None if has is None else has - 0.01
        steps = 1 if drafted else int(rng.integers(1, 4))
        accepted = int(rng.integers(0, drafted + 1))
        seconds = float(rng.uniform(0.9, 1.3)) * (1 + drafted / 30)
        lengths.step(requests, drafted, accepted, seconds, steps)
        if drafted or not run or plain is None:
            times.record(batch, drafted, seconds)
        if plain is not None and has is not None:
            if drafted:
                own = times.of(batch, drafted)
                assert own is not None
                has += accepted * plain / batch - (own - plain) - spent
            elif run:
                more = max(seconds - plain, 0.0) * steps
                after = after or Mean(more)
                if after.mean != more or after.count > 1:
                    after.add(more)
                has -= after.mean
            else:
                has += 0.02 * plain * steps
            has = min(has, 8 * plain)
        spent, run = 0.0, run + 1 if drafted else 0
        if has is not None and has > 0 and times.plain(batch) is not None:
            credit(lengths, batch, has)


def test_runs_of_drafts_end() -> None:
    """After 64 steps with drafts a plain one is measured, and after 256 without, drafts are measured again."""
    lengths = DraftLengths(8)
    for _ in range(3):
        lengths.step(["a"], 0, 0, 1.0)
    for number in range(64):
        assert lengths.may_draft(1), number
        lengths.step(["a"], 2, 2, 1.1)
    assert not lengths.may_draft(1)
    lengths.step(["a"], 0, 0, 1.0)
    assert lengths.may_draft(1)
    for single, steps in ((255, 1), (254, 3)):
        for _ in range(8):
            lengths.step(["a"], 2, 0, 4.0)
        for _ in range(single):
            lengths.step(["a"], 0, 0, 1.0)
            slow = lengths.seconds.of(1, 2)
            assert slow is not None and slow > 1.5
        lengths.step(["a"], 0, 0, 1.0, steps)
        # as assumed before a measurement
        assert lengths.seconds.of(1, 2) == pytest.approx(1.1)


@pytest.mark.parametrize("kind", [0, KINDS + 3])
def test_several_steps_with_drafts_in_a_call(kind: int) -> None:
    """Drafting for all steps but the first one is part of their time, and what they may lose is within the credit: by
    the drafter of these steps.
    """
    lengths = DraftLengths(8)
    assert lengths.rounds(1, 2, 8, kind) == 8  # nothing is known yet
    for _ in range(3):
        lengths.step(["a"], 0, 0, 1.0)
    assert lengths.may_draft(1) and lengths._credit == 4.0
    for _ in range(3):
        lengths.record_drafting(2, 0.25, kind)
        lengths.step(["a"], 2, 2, 1.25)
    # the credit is full: a step without right tokens loses a half
    lengths._credit = 1.6
    assert lengths.rounds(1, 2, 8, kind) == 1 + 3
    assert lengths.rounds(1, 2, 3, kind) == 3
    lengths._credit = -1.0
    assert lengths.rounds(1, 2, 8, kind) == 1
    lengths._credit = 1.6
    lengths.record_drafting(2, 0.25, kind)
    # four steps of 1.25 and three drafts of 0.25
    lengths.step(["a"], 2, 5, 5.75 / 4, 4, kind)
    assert lengths.seconds.of(1, 2) == pytest.approx(1.25)
    assert lengths._credit == pytest.approx(1.6 + 5 - 4 * 0.5)
    # after 64 steps with drafts a plain one is measured again
    lengths._credit = 1e9
    assert lengths._run == 7 and lengths.rounds(1, 2, 80, kind) == 64 - 7


def test_first_steps_count_as_later_ones() -> None:
    lengths = DraftLengths(8)
    assert lengths.length("a", 1, 0, 8) == 0 and lengths.kept_of_tree("a", 1, 0, 8, [-1, 0]) == []
    for _ in range(2):
        lengths.seconds.record(1, 0, 1.0)
    assert lengths.length("a", 1, 0, 8) > 0
    for number in range(64):
        assert lengths.may_draft(1), number
        lengths.step(["a"], 2, 2, 1.1)
    assert not lengths.may_draft(1) and lengths.length("a", 1, 0, 8) == 0
    lengths = DraftLengths(8)
    for _ in range(6):
        lengths.seconds.record(1, 0, 1.0)
        lengths.seconds.record(1, 2, 4.0)
    for _ in range(255):
        lengths.step(["a"], 0, 0, 1.0)
    assert lengths.seconds.of(1, 2) == pytest.approx(4.0)
    lengths.step(["a"], 0, 0, 1.0)
    assert lengths.seconds.of(1, 2) == pytest.approx(1.1)


def test_without_credit_nothing_is_drafted() -> None:
    lengths = DraftLengths(8)
    for _ in range(2):
        lengths.seconds.record(1, 0, 1.0)
    assert lengths.may_draft(1)
    lengths.record_drafting(0, 4.0)
    assert not lengths.may_draft(1) and lengths.length("a", 1, 0, 8) == 0


@pytest.mark.parametrize("limit", range(1, 41))
def test_lengths_that_are_tried(limit: int) -> None:
    """Few ones, and the longest that has room."""
    lengths = fixed(1.0, 0.0, (0.0, 0.0), 40)
    for _ in range(90):
        lengths.record_verification("a", 40, 40, KINDS)
    known: Any = lengths.seconds
    known.of = lambda requests, count: 1.0 if count <= limit else 1000.0
    tried = [count for count in (*TRIED, 40) if count <= limit]
    assert lengths.length("a", 1, 0, 99, KINDS) == tried[-1]
    assert lengths.length("a", 1, 0, limit, KINDS) == limit


def test_the_shortest_of_equally_good_drafts() -> None:
    lengths = fixed(1.0, 0.0, (0.0, 0.0), 3)
    totals = [1.0]
    for count in range(1, 4):
        totals.append(totals[-1] + 0.7**count)
    known: Any = lengths.seconds
    # two tokens a second each
    known.of = lambda requests, count: totals[count] / 2 if count else 1.0
    known.plain = lambda requests: 1.0
    assert lengths.length("a", 1, 0, 3, KINDS) == 1


def test_the_kind_of_a_draft_that_is_not_named() -> None:
    lengths = fixed(1.0, 0.02, (0.0, 0.0), 8)
    parents, tree = [LAST_TOKEN, 0], [LAST_TOKEN, LAST_TOKEN]
    for _ in range(30):
        lengths.record_verification("a", 4, 0)
        lengths.record_tree("b", tree, [])
        for kind in (-1, 1):
            lengths.record_verification("a", 4, 4, kind)
            lengths.record_verification("b", 4, 4, kind)
    for request in ("a", "b"):
        assert lengths.share(request) == lengths.share(request, 0) < 0.1
        assert lengths.length(request, 1, 0, 8) == 0 < lengths.length(request, 1, 0, 8, 1)
        assert lengths.kept_of_tree(request, 1, 0, 8, parents) == []
        assert lengths.kept_of_tree(request, 1, 0, 8, parents, 1) == [0, 1]
    assert lengths.length("c", 1, 0, 8, KINDS) > 0
    for _ in range(4):
        lengths.record_drafting(2, 50.0)
    assert lengths.length("c", 1, 0, 8, 2) == 0 < lengths.length("c", 1, 0, 8, KINDS)


def test_drafts_that_take_as_long_as_expected_are_left_out() -> None:
    times, model = DraftingSeconds(), Drafting()
    for drafted, seconds in ((2, 1.0), (4, 2.0), (3, 9.0), (8, 3.0), (6, 3.5)):
        times.add(drafted, seconds)
        model.add(drafted, seconds)
        assert [times.of(n) for n in (1, 9)] == pytest.approx([model.of(n) for n in (1, 9)])
