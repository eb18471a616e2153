"""The tables that the thread of masks writes during a call, against sets of sentences that are searched anew."""

from __future__ import annotations

import ctypes
import random
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest

from max.pipelines.structured import step_masks
from max.pipelines.structured.call_masks import CallMasks, CallMemory, FollowedRow, ReadyMasks
from max.pipelines.structured.kept_tokens import KeptTokens
from max.pipelines.structured.known_masks.string_rules import StringRules
from max.pipelines.structured.known_masks.string_run import StringRun, TokenTexts
from max.pipelines.structured.step_masks import MaskThread, unpack_mask
from tests.security.test_panics import panic

OTHER = 63
"""A token that a mask allows beside one that is forced, as another writing of the same text."""
Sentences = list[tuple[int, ...]]


def next_tokens(sentences: Sentences, before: tuple[int, ...]) -> set[int]:
    """The tokens that follow the first ones of sentences."""
    place = len(before)
    return {s[place] for s in sentences if len(s) > place and s[:place] == before}


class Matcher:
    """A grammar of a set of sentences.

    Args:
        sentences: Their tokens.
        fails: The number of tokens after which the mask (`mask`) or the next token fails; None: never.
        mask: Whether the mask fails.
        error: How it fails.
    """

    def __init__(
        self, sentences: Sentences, fails: int | None = None, mask: bool = True,
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        self.sentences, self.seen = sentences, ()
        self.fails, self.mask, self.error = fails, mask, error

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        if self.mask and self.fails == len(self.seen):
            assert self.error is not None
            raise self.error
        bits = np.zeros(8 * size, np.uint8)
        bits[[*allowed_of(self.sentences, self.seen)]] = 1
        ctypes.memmove(address, np.packbits(bits, bitorder="little").tobytes(), size)

    def consume_token(self, token: int) -> bool:
        if not self.mask and self.fails == len(self.seen):
            assert self.error is not None
            raise self.error
        if token not in next_tokens(self.sentences, self.seen):
            return False
        self.seen = (*self.seen, token)
        return True

    def compute_ff_tokens(self) -> list[int]:
        found = list[int]()
        while len(ways := next_tokens(self.sentences, (*self.seen, *found))) == 1:
            found += ways
        return found


def allowed_of(sentences: Sentences, before: tuple[int, ...]) -> set[int]:
    found = next_tokens(sentences, before)
    return found | {OTHER} if len(found) == 1 else found


def memory_of(batch: int, vocabulary: int, words: int = 2) -> CallMemory:
    """Memory in which no token may follow."""
    allowed = np.zeros((batch, (vocabulary + 31) // 32), np.int32)
    return CallMemory(allowed, np.zeros((batch, vocabulary), np.bool_), words)


def allowed_flags(memory: CallMemory) -> Any:
    """Whether each token may follow ``[batch, vocab]``."""
    bits = np.unpackbits(memory.allowed.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : memory.kept.shape[1]].astype(np.bool_)


class Call:
    """Takes the place of the number of prepared steps: keeps the tables of each step, and samples its tokens.

    Args:
        memory: What the call reads.
        tokens: The tokens of each step ``[steps, batch]``.
        then: Called with the number of prepared steps instead of sampling, if it is given.
    """

    def __init__(
        self, memory: CallMemory, tokens: Any, then: Callable[[int], object] | None = None
    ) -> None:
        self.memory, self.tokens, self.then = memory, tokens, then
        self.history = np.full_like(tokens, -1)
        self.allowed, self.kept = list[Any](), list[Any]()

    def __setitem__(self, place: int, steps: int) -> None:
        self.allowed.append(allowed_flags(self.memory))
        self.kept.append(self.memory.kept.copy())
        assert (place, steps) == (0, len(self.allowed))
        if self.then is not None:
            self.then(steps)
        else:
            self.history[steps - 1] = self.tokens[steps - 1]


def call_of(
    rows: list[FollowedRow], tokens: Any, vocabulary: int, ordinary: Any
) -> tuple[CallMasks, Call]:
    memory = memory_of(len(rows), vocabulary)
    kept = KeptTokens(lambda ends: ordinary, vocabulary)
    return CallMasks(MaskThread(), rows, memory, kept), Call(memory, tokens)


def run(masks: CallMasks, call: Call, step_s: float = 1e-4) -> Any:
    prepared: Any = call
    masks.begin(call.history, prepared, step_s)
    found = masks.last()
    masks.end()
    return found


def flags_of(tokens: set[int], vocabulary: int) -> Any:
    return np.isin(np.arange(vocabulary), [*tokens])


def expected_row(
    sentences: Sentences, jumps: bool, end: int, tokens: list[int], vocabulary: int, ordinary: Any
) -> tuple[list[Any], list[Any]]:
    """The tables of a row, from what its grammar says of the tokens before each step."""
    allowed, kept = list[Any](), list[Any]()
    known: dict[frozenset[int], Any] = defaultdict(ordinary.copy)
    counts: dict[frozenset[int], list[int]] = defaultdict(lambda: [0, 0])
    before, free, learns = (), False, None
    for step in range(len(tokens)):
        if step and not free:
            if tokens[step - 1] in next_tokens(sentences, before):
                before = (*before, tokens[step - 1])
            else:
                free = True
        ways = next_tokens(sentences, before)
        forced = not free and jumps and len(ways) == 1 and ways != {end}
        if learns is not None and not free:
            known[learns][tokens[step - 1]] = not forced
            counts[learns][forced] += 1
            if forced and counts[learns][1] > counts[learns][0] + 2:
                known[learns][:] = False
        learns = None
        if free:
            allowed.append(np.ones(vocabulary, np.bool_))
            kept.append(np.ones(vocabulary, np.bool_))
        elif forced:
            allowed.append(flags_of(ways, vocabulary))
            kept.append(np.zeros(vocabulary, np.bool_))
        else:
            learns = frozenset(allowed_of(sentences, before))
            allowed.append(flags_of({*learns}, vocabulary))
            kept.append(known[learns].copy())
    return allowed, kept


@pytest.mark.parametrize("seed", range(12))
def test_tables_of_random_sentences(seed: int) -> None:
    draw = random.Random(seed)
    vocabulary, steps, batch = draw.choice([41, 64, 70]), 24, draw.randint(1, 4)
    ordinary = np.array([draw.random() < 0.7 for _ in range(vocabulary)])
    words = [draw.choice([0, 7, 30]), 31, 32, 40][: draw.randint(2, 4)]
    given, rows, columns = list[Any](), list[FollowedRow](), list[list[int]]()
    for row in range(batch):
        end = 1 + row  # rows that share no experience
        sentences = [
            (*(draw.choice(words) for _ in range(draw.randint(1, 30))), end) for _ in range(9)
        ]
        if (
            draw.random() < 0.5
        ):  # the same choice again and again, where most tokens force the next one
            parts = [(words[0], 33), (words[1], 33) if draw.random() < 0.7 else (words[1],)]
            sentences = [(*sum(way, ()), end) for way in product(parts, repeat=6)]
        if draw.random() < 0.5:
            sentences = [(35, 36, *each) for each in sentences]
        tokens, before = list[int](), ()
        for _ in range(steps):
            ways = sorted(next_tokens(sentences, before))
            # what is forced is sampled, as its mask allows nothing else
            follows = len(ways) == 1 or (ways and draw.random() < 0.97)
            token = draw.choice(ways if follows else words)
            tokens.append(token)
            before = (*before, token)
        jumps, has_grammar = draw.random() < 0.7, row != 2
        given.append((sentences if has_grammar else None, jumps, end))
        matcher = Matcher(sentences) if has_grammar else None
        rows.append(FollowedRow(matcher, jumps, frozenset({end})))
        columns.append(tokens)
    masks, call = call_of(rows, np.array(columns).T, vocabulary, ordinary)
    run(masks, call)
    assert len(call.allowed) == steps
    for row, (sentences, jumps, end) in enumerate(given):
        if sentences is None:
            allowed = kept = [np.ones(vocabulary, np.bool_)] * steps
        else:
            allowed, kept = expected_row(sentences, jumps, end, columns[row], vocabulary, ordinary)
        np.testing.assert_array_equal(np.array(call.allowed)[:, row], allowed)
        np.testing.assert_array_equal(np.array(call.kept)[:, row], kept)


@pytest.mark.parametrize(
    ("jumps", "mask", "fails"),
    # a mask of a token that is forced is not asked for
    [way for way in product([0, 1], [0, 1], range(4)) if way not in ((1, 1, 2), (1, 1, 3))],
)
def test_a_panic_leaves_its_row_alone(jumps: bool, mask: bool, fails: int) -> None:
    sentences = [(a, b, a, b, 5, 6) for a in (2, 33) for b in (3, 62)]
    tokens, ordinary = (
        np.array([[2, 33, 2], [3, 62, 62], [2, 33, 2], [3, 62, 62]]),
        np.ones(64, np.bool_),
    )
    rows = [
        FollowedRow(Matcher(sentences), False, frozenset({6})),
        FollowedRow(Matcher(sentences, fails, mask, panic()), jumps, frozenset({7})),
        FollowedRow(Matcher(sentences), True, frozenset({8})),
    ]
    masks, call = call_of(rows, tokens, 64, ordinary)
    prepared: Any = call
    masks.begin(call.history, prepared, 1e-4)
    assert masks._work is not None and masks._work.finished.wait(60)
    batch: Any = [Request(), Request(), Request()]
    answer = masks.valid(batch, tokens.T.tolist())  # the masks need not be asked for
    found = masks.last()
    masks.end()
    for row in (0, 2):
        column = tokens[:, row].tolist()
        allowed, kept = expected_row(sentences, row == 2, 6 + row, column, 64, ordinary)
        np.testing.assert_array_equal(np.array(call.allowed)[:, row], allowed)
        np.testing.assert_array_equal(np.array(call.kept)[:, row], kept)
    # the mask of a step fails at it, a token after it
    free = fails + (not mask)
    for step in range(4):
        own = (next_tokens if jumps and step >= 2 else allowed_of)(sentences, (*tokens[:step, 1],))
        expected = np.ones(64, np.bool_) if step >= free else flags_of(own, 64)
        np.testing.assert_array_equal(call.allowed[step][1], expected)
    assert rows[1].matcher is None and rows[0].matcher is not None
    assert (found[1] == -1).all() and not (found[0] == -1).any()
    if mask and fails == 0:
        assert answer == tokens.T.tolist()
        matcher = batch[1].matcher
        assert matcher is not None and matcher.is_error() and not matcher.consume_token(2)
        assert "the grammar's package fails: " in matcher.get_error()
    else:
        assert answer == [
            tokens[:, 0].tolist(), tokens[: fails if mask else 4, 1].tolist(), tokens[:, 2].tolist()
        ]  # fmt: skip
        assert batch[1].matcher is None
    assert batch[0].matcher is None and batch[2].matcher is None


class Request:
    """A request that keeps the matcher that it is given."""

    def __init__(self) -> None:
        self.matcher: Any = None

    def set_matcher(self, matcher: Any) -> None:
        self.matcher = matcher


@pytest.mark.parametrize("mask", [True, False])
def test_another_error_ends_the_work(mask: bool) -> None:
    sentences = [(2, 3, 4, 5), (3, 2, 4, 5)]
    rows = [FollowedRow(Matcher(sentences, 1, mask, KeyError("own")), False, frozenset({5}))]
    masks, call = call_of(rows, np.array([[2], [3], [4]]), 64, np.ones(64, np.bool_))
    with pytest.raises(KeyError, match="own"):
        run(masks, call)
    assert len(call.allowed) == (1 if mask else 2)


@pytest.mark.parametrize("needed", [1, 2, 3])
@pytest.mark.parametrize(("more", "samples"), [(0, False), (0, True), (2, False)])
def test_a_call_that_ends_early_needs_no_further_tables(
    needed: int, more: int, samples: bool
) -> None:
    """Whether the step has tokens or not."""
    sentences = [tuple(draw) for draw in np.random.default_rng(4).integers(2, 9, (50, 9)).tolist()]
    matcher, tokens = Matcher(sentences), sentences[0]
    rows = [FollowedRow(matcher, False, frozenset({1}))]
    masks, call = call_of(rows, np.full((6, 1), 2), 64, np.ones(64, np.bool_))

    def then(steps: int) -> None:
        if steps == needed:
            masks.end(needed + more)
        if steps != needed or samples:
            call.history[steps - 1] = tokens[steps - 1]

    call.then = then
    masks.end()  # nothing has begun
    found = run(masks, call)
    assert len(call.allowed) == needed and matcher.seen == tokens[: needed - (not samples)]
    bits = np.unpackbits(found.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits)) == allowed_of(sentences, tokens[: needed - 1])
    np.testing.assert_array_equal(call.allowed[-1][0], bits)


def test_a_call_that_ends_before_the_thread_begins_has_no_tables() -> None:
    masks, call = call_of([FollowedRow(None, False, frozenset())], np.ones((3, 1)), 64, None)
    goes_on = Event()
    masks._thread._pool.submit(goes_on.wait, 60)
    prepared: Any = call
    masks.begin(call.history, prepared, 1.0)
    masks.end()
    goes_on.set()
    assert (masks.last() == -1).all() and not call.allowed


def test_the_end_wakes_the_thread() -> None:
    """It may expect the tokens of the step in hours."""
    masks, call = call_of([FollowedRow(None, False, frozenset())], np.ones((3, 1)), 64, None)
    begun = Event()
    call.then = lambda steps: begun.set()
    prepared: Any = call
    masks.begin(call.history, prepared, 1e5)
    assert begun.wait(60)
    time.sleep(0.05)  # now the thread waits
    masks.end(1)
    masks.last()
    assert len(call.allowed) == 1


def test_what_a_call_leaves_does_not_hold_up_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that takes long is abandoned then, and its thread writes no tables."""
    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    sentences, goes_on = [(2, 3, 4, 5), (3, 2, 4, 5)], Event()

    class Slow(Matcher):
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            until = time.thread_time() + 20
            while not goes_on.is_set() and time.thread_time() < until:
                pass  # the time of the processor counts
            super().unsafe_compute_mask_ptr(address, size)

    rows = [FollowedRow(Slow(sentences), False, frozenset({5}))]
    masks, slow = call_of(rows, np.array([[2]]), 64, np.ones(64, np.bool_))
    prepared: Any = slow
    masks.begin(slow.history, prepared, 1e-4)
    left = masks._work
    masks.end(1)
    rows = [FollowedRow(Matcher(sentences), False, frozenset({5}))]
    other, call = call_of(rows, np.array([[2]]), 64, np.ones(64, np.bool_))
    other._thread = masks._thread
    run(other, call)
    assert left is not None and not left.finished.is_set() and len(call.allowed) == 1
    goes_on.set()
    assert left.finished.wait(60) and not slow.allowed and not slow.memory.allowed.any()


def test_the_same_mask_in_the_next_call() -> None:
    """The tokens after which a call goes on are those of its own requests."""
    sentences = [(2, 3, 4, 5), (3, 2, 4, 5)]
    memory = None
    for ordinary in (np.arange(64) % 2 == 0, np.arange(64) % 3 == 0):
        rows = [FollowedRow(Matcher(sentences), False, frozenset({5}))]
        masks, call = call_of(rows, np.array([[2]]), 64, ordinary)
        call.memory = masks._memory = memory = memory or call.memory
        run(masks, call)
        np.testing.assert_array_equal(call.allowed[0][0], flags_of({2, 3}, 64))
        np.testing.assert_array_equal(call.kept[0][0], ordinary)


def test_whether_a_row_has_other_tokens_than_before() -> None:
    memory = memory_of(2, 40)
    for row, mask, changes in [
        (0, [5, 0], True),
        (0, [5, 0], False),
        (1, [5, 0], True),
        (0, [5, 1], True),
    ]:
        assert memory.allow(row, np.array(mask, np.int32)) is changes
    assert [np.flatnonzero(flags).tolist() for flags in allowed_flags(memory)] == [
        [0, 2, 32],
        [0, 2],
    ]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 63, 64, 65, 96, 130])
def test_a_model_may_have_more_or_fewer_tokens_than_a_mask(vocabulary: int) -> None:
    """Those past the mask may follow where there is no grammar, as where single steps unpack the mask."""
    memory, rng = memory_of(1, vocabulary), np.random.default_rng(vocabulary)
    masks = [memory.all_tokens, *rng.integers(-(2**31), 2**31, (3, 2)).astype(np.int32)]
    for mask in [*masks, memory.all_tokens, np.array([-1, -2], np.int32), np.zeros(2, np.int32)]:
        memory.allow(0, mask)
        np.testing.assert_array_equal(
            allowed_flags(memory)[0], unpack_mask(mask[None], vocabulary)[0]
        )


def test_the_last_tokens_are_learned_from() -> None:
    """The next call knows what they forced."""
    sentences = [(2, 3, 4, 5), (6, 7, 8, 5), (6, 9, 8, 5)]
    found, kept = list[Any](), None
    for token in (2, 6, 2):
        rows = [FollowedRow(Matcher(sentences), True, frozenset({5}))]
        masks, call = call_of(rows, np.array([[token]]), 64, np.ones(64, np.bool_))
        kept = masks._kept = kept or masks._kept
        run(masks, call)
        found.append(np.flatnonzero(~call.kept[0][0]).tolist())
    assert found == [[], [2], [2]]


QUOTE, LETTER, OTHER_LETTER, LONG, HALF, REST = range(6)
TEXTS = [b'"', b"a", b"b", b"c" * 30, b"\xc3", b"\xa9"]


def string_run(*tokens: int, learned: int | None = None, bounds: tuple[int, ...] = ()) -> StringRun:
    run = StringRun(StringRules(0, bounds), TokenTexts.of(6, TEXTS.__getitem__))
    for token in tokens:
        run.advance(token)
    if learned is not None:
        run.learn(np.array([learned, 0], np.int32))
    return run


def test_known_masks_take_no_thread() -> None:
    sentences = [(QUOTE, LETTER)]
    run = string_run(QUOTE, LETTER, learned=6, bounds=(199,))
    rows = [
        FollowedRow(Matcher(sentences), True, frozenset(), run),
        FollowedRow(None, False, frozenset()),
    ]
    memory = memory_of(2, 8)
    thread, prepared, history = MaskThread(), np.zeros(1, np.int64), np.full((5, 2), -1)
    for _ in range(2):
        ready = ReadyMasks.of(thread, rows, memory, 5)
        assert ready is not None
        ready.begin(history, prepared, 1.0)
        assert prepared[0] == 5
        assert allowed_flags(memory).tolist() == [[False, True, True, *[False] * 5], [True] * 8]
        # neither after the end of the string nor after a long token, and the model has two tokens without a text
        assert memory.kept.tolist() == [[False, True, True, *[False] * 5], [True] * 8]
        assert ready.last().tolist() == [[6, 0], [-1, -1]]
        assert ready.valid([], [[1, 2], [3]]) == [[1, 2], [3]]
        ready.end(3)
        memory.keep(1, np.zeros(8, np.bool_))
    for steps, expected in ((6, True), (7, False)):  # of 24 characters at most, and a token of 30
        assert (ReadyMasks.of(thread, rows, memory, steps) is not None) is expected
    for own in (None, string_run(QUOTE, LETTER), string_run(QUOTE, LETTER, QUOTE, learned=6)):
        rows[1] = FollowedRow(Matcher(sentences), True, frozenset(), own)
        assert ReadyMasks.of(thread, rows, memory, 1) is None


def test_the_thread_has_ended_before_tables_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows the last tokens of a call after the call."""
    goes_on, waits = Event(), Event()

    class Slow(Matcher):
        def consume_token(self, token: int) -> bool:
            waits.set()
            goes_on.wait(60)
            return super().consume_token(token)

    sentences = [(LETTER, LETTER), (OTHER_LETTER, LETTER)]
    rows = [FollowedRow(Slow(sentences), False, frozenset())]
    masks, call = call_of(rows, np.array([[LETTER]]), 64, np.zeros(64, np.bool_))
    prepared: Any = call
    masks.begin(call.history, prepared, 1e-4)
    masks.end(0)
    assert waits.wait(60)
    own = [FollowedRow(None, False, frozenset())]
    Timer(0.05, goes_on.set).start()
    assert ReadyMasks.of(masks._thread, own, call.memory, 1) is not None
    assert masks._work is not None and masks._work.finished.is_set()
    assert call.memory.kept.all() and allowed_flags(call.memory).all()


@pytest.mark.parametrize("jumps", [False, True])
def test_a_known_mask_is_not_computed_in_a_call(jumps: bool) -> None:
    """Its matcher follows the tokens once a mask is computed again."""
    text = [QUOTE, LETTER, LETTER, OTHER_LETTER, HALF, REST, LONG, QUOTE, LETTER]
    ways = [(*text, LETTER), (*text, QUOTE), (*text[:-1], QUOTE)]
    # in each place but one, which forces its token, others may follow too
    ways += [(*text[:n], other) for n in (1, 2, 3, 4, 6, 7) for other in (8, 9)]
    computed, looked = list[int](), list[int]()

    class Counting(Matcher):
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            computed.append(len(self.seen))
            super().unsafe_compute_mask_ptr(address, size)

        def compute_ff_tokens(self) -> list[int]:
            looked.append(len(self.seen))
            return super().compute_ff_tokens()

    rows = [FollowedRow(Counting(ways), jumps, frozenset(), string_run())]
    masks, call = call_of(rows, np.array([[token] for token in text]), 64, np.ones(64, np.bool_))
    run(masks, call)
    # within the string once, after its first character, and within a character
    assert computed == ([1, 2, 8] if jumps else [0, 1, 2, 5, 8])
    assert {*looked} == ({0, 1, 2, 5, 8, 9} if jumps else set())
    allowed = [{*np.flatnonzero(row[0]).tolist()} for row in call.allowed]
    inside = allowed_of(ways, (QUOTE, LETTER))
    assert all(allowed[place] == inside for place in (2, 3, 4, 6, 7))
    assert allowed[1] == allowed_of(ways, (QUOTE,)) and allowed[8] == {LETTER, QUOTE}
    assert allowed[5] == ({REST} if jumps else {REST, OTHER})
    plain = flags_of({LETTER, OTHER_LETTER, LONG}, 64).tolist()
    assert all(call.kept[place][0].tolist() == plain for place in (2, 3, 4, 6, 7))
    assert call.kept[1][0].all() and call.kept[8][0].all()
    assert call.kept[5][0].any() is not jumps


def test_tables_of_kept_tokens() -> None:
    memory, flags = memory_of(1, 3, 1), [True, False]
    own = np.array(flags)
    for value, shared, expected in [
        (own, True, [True, False, False]),
        (own, True, [True, False, False]),
        (True, False, [True, True, True]),
        (own, True, [True, False, False]),
        (False, False, [False, False, False]),
        (own, False, [True, False, False]),
        (np.array([False, True, True, True]), False, [False, True, True]),
        (own, True, [True, False, False]),
    ]:
        memory.keep(0, value, shared)
        assert memory.kept[0].tolist() == expected
    own[:] = False
    memory.keep(0, own)
    assert not memory.kept.any()
