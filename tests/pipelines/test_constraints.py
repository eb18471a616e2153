"""Masks, matchers and end tokens of requests with grammars, with a tokenizer and no model."""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from max.interfaces import GenerationStatus
from max.pipelines import TextContext
from max.pipelines.core.exceptions import GrammarsWaitError, InputError
from max.pipelines.structured import call_masks, constraint, grammar, step_masks
from max.pipelines.structured.constraint import Constraints, grammar_of, is_constrained
from max.pipelines.structured.known_masks import late_matcher
from max.pipelines.structured.step_masks import (
    MaskThread,
    MaskWork,
    OverdueMatcher,
    StepMasks,
    forced_tokens,
    unpack_mask,
)
from tests.security.test_panics import panic

FILE = Path(__file__).parents[2] / "models" / "tiny-chat" / "tokenizer.json"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'


class Delegate:
    """A tokenizer of one of the libraries, as far as constraints need it."""

    def __init__(self, size: int | None = None) -> None:
        self.tokenizer = Tokenizer.from_file(str(FILE))
        self._size = size or self.tokenizer.get_vocab_size()

    def __len__(self) -> int:
        return self._size

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def delegate() -> Delegate:
    return Delegate()


@pytest.fixture(scope="module")
def end(delegate: Delegate) -> int:
    """A special token."""
    content = json.loads(delegate.to_json())
    return next(each["id"] for each in content["added_tokens"] if each["special"])


def context(end: int, own: str | None = None, **more: Any) -> TextContext:
    return TextContext(
        max_length=64, tokens=np.arange(1, 9), eos_token_ids={end}, grammar=own, **more
    )


def allowed(constraints: Constraints, context: TextContext, size: int) -> np.ndarray:
    masks = constraints.start_masks([context])
    assert masks is not None
    return unpack_mask(masks.result(), size)[0]


def test_a_grammar_comes_before_a_schema() -> None:
    regex = grammar.of_regex("a+")
    for own, schema, expected in (
        (None, None, None),
        (regex, None, regex),
        (None, SCHEMA, grammar.of_json_schema(SCHEMA)),
        (regex, SCHEMA, regex),
    ):
        request = context(0, own, json_schema=schema)
        assert grammar_of(request) == expected
        assert is_constrained(request) is (expected is not None)


def test_masks_have_a_bit_for_each_token() -> None:
    sizes = [(32, 1), (33, 2), (64, 2), (65, 3), (4096, 128), (4097, 129)]
    assert [Constraints(Delegate(size)).words() for size, _ in sizes] == [n for _, n in sizes]


def test_vocabularies_are_made_once_for_each_set_of_end_tokens(
    delegate: Delegate, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int] | None] = []
    real = constraint._tokenizer

    def counted(text: str, **options: Any) -> Any:
        made.append(options["eos_token"])
        return real(text, **options)

    monkeypatch.setattr(constraint, "_tokenizer", counted)
    constraints, size = Constraints(delegate), len(delegate)
    constraints.warm_up([end])
    assert made == [[end]]
    constraints.begin(context(end, grammar.of_regex("a+")))
    constraints.warm_up({end, size, size + 7, -1})  # tokens that there are not
    assert made == [[end]]
    constraints.warm_up([])
    assert made[1:] == [None]
    # an end token with a text is made special
    (plain,) = delegate.encode("a")
    constraints.warm_up([plain, end])
    assert made[2:] == [sorted([plain, end])] * 2
    constraints.warm_up([end])
    assert len(made) == 4


def test_the_last_results_are_kept() -> None:
    results: dict[int, int] = {}
    made: list[int] = []

    def ask(key: int) -> int:
        def make() -> int:
            made.append(key)
            return key * key

        return constraint._recent(results, key, make)

    assert [ask(key) for key in range(16)] == [key * key for key in range(16)]
    assert ask(0) == 0 and len(made) == 16
    ask(16)  # drops 1, as 0 was used after it
    assert [*results] == [*range(2, 16), 0, 16]
    ask(0)
    assert made == [*range(17)]
    assert ask(1) == 1 and made[17:] == [1] and len(results) == 16 and 2 not in results


def test_tokens_become_special() -> None:
    added = [
        {"id": 5, "content": "<e>", "special": False, "lstrip": True},
        {"id": 0, "content": "<s>", "special": True},
    ]
    for vocabulary in ({"<s>": 0, "b": 1, "c": 2, "<e>": 5}, [["<s>", 0.0], ["b", -1.0], ["c", -2.0]]):  # fmt: skip
        text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added, "other": 1})
        found = json.loads(constraint._with_special(text, [5, 2]))
        assert found["added_tokens"] == [
            added[1],
            {"id": 2, "content": "c", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True},
            {**added[0], "special": True},
        ]  # fmt: skip
        assert found["other"] == 1 and found["model"] == {"vocab": vocabulary}


def test_a_matcher_follows_the_tokens_that_there_are(delegate: Delegate, end: int) -> None:
    constraints = Constraints(delegate)
    tokens = delegate.encode("abc")
    request = context(end, grammar.of_regex("abc[0-9]"))
    for token in tokens:
        request.update(token)
    constraints.begin(request)
    found = allowed(constraints, request, len(delegate)).nonzero()[0].tolist()
    assert all(delegate.tokenizer.decode([t]).isdigit() for t in found) and len(found) >= 10
    # one that is there stays; one without a grammar gets none
    matcher = request.matcher
    constraints.begin(request)
    assert request.matcher is matcher
    free = context(end)
    constraints.begin(free)
    assert free.matcher is None and constraints.start_masks([free]) is None
    # strings of JSON are followed later
    of_string = context(end, json_schema=SCHEMA)
    constraints.begin(of_string)
    assert isinstance(of_string.matcher, late_matcher.LateMatcher)
    assert not isinstance(matcher, late_matcher.LateMatcher)


def test_grammars_wait_for_masks_that_nothing_ends(
    delegate: Delegate, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = Constraints(delegate)
    for overdue, waits in ((3, False), (4, True)):
        monkeypatch.setattr(MaskThread, "overdue", overdue)
        request = context(end, grammar.of_regex("a+"))
        if waits:
            with pytest.raises(GrammarsWaitError, match="nothing ends them"):
                constraints.begin(request)
        else:
            constraints.begin(request)
        assert (request.matcher is None) is waits
        constraints.begin(context(end))  # has no grammar


def test_masks_are_those_of_whole_prompts(delegate: Delegate, end: int) -> None:
    constraints, size = Constraints(delegate), len(delegate)
    batch = [context(end, own) for own in (None, grammar.of_regex("[0-9]"), grammar.of_regex("x"), None)]  # fmt: skip
    for each in batch:
        constraints.begin(each)
    batch[2].bump_token_indices(active_idx=-5)
    assert constraints.start_masks([batch[2]]) is None
    masks = constraints.start_masks(batch)
    assert masks is not None
    found = unpack_mask(masks.result(), size)
    assert found.shape == (4, size) and found[[0, 2, 3]].all()
    texts = {delegate.tokenizer.decode([token]) for token in found[1].nonzero()[0]}
    assert texts == set("0123456789")


def test_ordinary_tokens_are_whole_characters_within_a_string(delegate: Delegate, end: int) -> None:
    constraints = Constraints(delegate)
    found = constraints.ordinary_tokens([end])
    assert constraints.ordinary_tokens({end}) is found and found.dtype == bool
    special = {each["id"] for each in json.loads(delegate.to_json())["added_tokens"]}
    vocabulary = constraints._vocabulary([end])
    for token in range(len(delegate)):
        data = vocabulary.decode_bytes([token])
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = '"'
        ordinary = token not in special and bool(re.fullmatch(r'[^"\\<]+', text))
        assert found[token] == ordinary, (token, data)


def test_the_end_token_is_no_part_of_an_answer(delegate: Delegate, end: int) -> None:
    def ended(text: str, plain: bool = False) -> TextContext:
        constraints = Constraints(delegate)
        request = context(end, grammar.of_regex("ab+"))
        if plain:
            request.eos_token_ids = {*request.eos_token_ids, *delegate.encode("z")}
        constraints.begin(request)
        for token in delegate.encode(text):
            request.update(token)
            constraints.advance(request, token)
        last = delegate.encode("z")[0] if plain else end
        request.update(last)
        assert request.status is GenerationStatus.END_OF_SEQUENCE
        constraints.advance(request, last)
        return request

    for plain in (False, True):
        assert ended("abb", plain).failure is None
        early = ended("a", plain)
        assert early.status is GenerationStatus.CANCELLED
        assert isinstance(early.failure, InputError)
        assert "the answer's grammar cannot be followed" in str(early.failure)


def test_a_token_that_is_not_allowed_ends_the_request(delegate: Delegate, end: int) -> None:
    constraints, request = Constraints(delegate), context(end, grammar.of_regex("ab+"))
    constraints.begin(request)
    (token,) = delegate.encode("z")
    request.update(token)
    constraints.advance(request, token)
    assert request.status is GenerationStatus.CANCELLED and request.failure is not None
    free = context(end)
    free.update(token)
    constraints.advance(free, token)
    assert free.status is GenerationStatus.ACTIVE and constraints.forced_tokens(free) == []
    overdue = context(end)
    overdue.set_matcher(OverdueMatcher("too slow"))
    overdue.update(token)
    constraints.advance(overdue, token)
    assert "too slow" in str(overdue.failure)


def test_forced_tokens_end_at_an_end_token() -> None:
    class Matcher:
        def __init__(self, tokens: list[int], error: bool = False) -> None:
            self.tokens, self.error = tokens, error

        def is_error(self) -> bool:
            return self.error

        def compute_ff_tokens(self) -> list[int]:
            assert not self.error
            return self.tokens

    for tokens, expected in (([], []), ([1, 2], [1, 2]), ([1, 9, 2], [1]), ([9, 1], []), ([1, 8, 9], [1])):  # fmt: skip
        assert forced_tokens(Matcher(tokens), {8, 9}) == expected
    assert forced_tokens(Matcher([1], error=True), {9}) == []


class Row:
    """A matcher whose mask is a number, waits for an event, or fails."""

    def __init__(
        self, line: int, waits: threading.Event | None = None, error: BaseException | None = None
    ) -> None:
        self.line, self.waits, self.error = line, waits, error
        self.masks: Any = None

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        if self.waits is not None:
            while not self.waits.is_set():  # uses CPU time, as its limit counts it
                pass
        if self.error is not None:
            raise self.error
        ctypes.memmove(pointer, np.full(size // 4, self.line, np.int32).tobytes(), size)


def step(thread: MaskThread, rows: list[Row]) -> tuple[StepMasks, dict[int, OverdueMatcher]]:
    failed: dict[int, OverdueMatcher] = {}
    work = MaskWork(np.full((len(rows), 2), -1, np.int32), deque((row, n) for n, row in enumerate(rows)))  # fmt: skip
    return StepMasks(thread, work, failed.__setitem__), failed


def test_rows_that_fail_leave_the_others() -> None:
    masks, failed = step(MaskThread(), [Row(1), Row(2, error=panic()), Row(3)])
    assert masks.result().tolist() == [[1, 1], [-1, -1], [3, 3]]
    assert [*failed] == [1] and failed[1].is_error() and not failed[1].consume_token(3)
    assert failed[1].get_error().startswith("the grammar's package fails: ")
    masks, failed = step(MaskThread(), [Row(1, error=ValueError("wrong")), Row(2)])
    with pytest.raises(ValueError, match="wrong"):
        masks.result()
    assert not failed


def test_a_row_that_fails_amid_its_mask_allows_all() -> None:
    class Torn(Row):
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            super().unsafe_compute_mask_ptr(pointer, size)
            raise panic()

    masks, failed = step(MaskThread(), [Row(1), Torn(2)])
    assert masks.result().tolist() == [[1, 1], [-1, -1]] and [*failed] == [1]


def test_a_row_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    thread, go = MaskThread(), threading.Event()
    try:
        masks, failed = step(thread, [Row(1), Row(2, go), Row(3), Row(4, error=panic())])
        found = masks.result()
        assert found.tolist() == [[1, 1], [-1, -1], [3, 3], [-1, -1]]
        assert sorted(failed) == [1, 3] and thread.overdue == 1
        assert failed[1].get_error() == "the tokens that may follow take more than 0.05 s to find"
        # the abandoned thread writes no more into what was given
        go.set()
        while thread.overdue:
            time.sleep(0.001)
        assert found.tolist()[1] == [-1, -1]
        assert step(thread, [Row(7)])[0].result().tolist() == [[7, 7]]
    finally:
        go.set()


def test_any_row_may_be_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written of its mask does not count, and rows that have failed before it stay so."""

    class Torn(Row):
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            ctypes.memmove(pointer, np.full(size // 4, self.line, np.int32).tobytes(), size)
            super().unsafe_compute_mask_ptr(pointer, size)

    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    thread = MaskThread()
    for slow, rows in ((0, [Row(5), Row(6)]), (1, [Row(1, error=panic()), Row(2), Row(3)])):
        go = threading.Event()
        rows[slow] = Torn(9, go)
        masks, failed = step(thread, rows)
        first = masks._work
        try:
            wanted = [-1 if row.error or row.waits else row.line for row in rows]
            assert masks.result().tolist() == [[line, line] for line in wanted]
            assert sorted(failed) == [at for at, line in enumerate(wanted) if line == -1]
        finally:
            go.set()
        # it ends just when it is given up
        assert first.finished.wait(10)
        again = failed.copy()
        masks._give_up(first)
        assert failed == again and masks.result().tolist() == [[line, line] for line in wanted]


def test_a_grammar_without_a_first_token_is_not_followed() -> None:
    class Nothing(Row):
        def deep_copy(self) -> Nothing:
            return self

        def is_error(self) -> bool:
            return False

        def consume_token(self, token: int) -> bool:
            raise AssertionError(token)

    Constraints(Delegate())._check_beginning(Nothing(0))


def test_what_is_left_alone_holds_up_the_next_work_for_a_mask_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread, go = MaskThread(), threading.Event()
    slow = MaskWork(np.zeros((1, 2), np.int32), deque([(Row(5, go), 0)]))
    try:
        thread.submit(slow)
        thread.leave(slow)
        monkeypatch.setattr(step_masks, "MASK_S", 0.05)
        assert step(thread, [Row(7)])[0].result().tolist() == [[7, 7]]
        assert slow.abandoned and thread.overdue == 1
    finally:
        go.set()
    assert slow.finished.wait(10) and thread.overdue == 0 and slow.error is None
    # one that ends by itself is no longer looked at
    quick = MaskWork(np.zeros((1, 2), np.int32), deque([(Row(5), 0)]))
    thread.submit(quick)
    thread.leave(quick)
    thread.settle()
    assert quick.finished.is_set() and not quick.abandoned and quick.masks.tolist() == [[5, 5]]
    assert quick.row == -1 and quick.seconds() == 0 and thread._unattended is None


def taken(constraints: Constraints, request: TextContext, tokens: list[int]) -> TextContext:
    """A request after some tokens."""
    constraints.begin(request)
    for token in tokens:
        request.update(token)
        constraints.advance(request, token)
    return request


def test_an_end_token_within_an_answer(delegate: Delegate, end: int) -> None:
    constraints, (a,), (b,) = Constraints(delegate), delegate.encode("a"), delegate.encode("b")
    within = grammar.of_lark(f'start: "a" <[{end}]> "b"')
    failed = taken(constraints, context(end, within), [a, end])
    assert failed.status is GenerationStatus.CANCELLED
    assert f"it needs the end token {end} within the answer" in str(failed.failure)
    # it is a token as others where it does not end the answer
    goes_on = taken(constraints, context(end, within, ignore_eos=True), [a, end])
    assert goes_on.failure is None and goes_on.status is GenerationStatus.ACTIVE
    # a sequence of tokens ends an answer wherever it is
    cut = context(end, grammar.of_regex("abc"), eos_sequences=[[a, b]])
    assert taken(constraints, cut, [a, b]).status is GenerationStatus.END_OF_SEQUENCE
    assert cut.failure is None


def test_grammars_that_fail_after_a_token_are_refused(delegate: Delegate, end: int) -> None:
    rules = [f'r{number}: "a" r{(number * 7 + 1) % 800} | "b"' for number in range(800)]
    starts = " | ".join(f"r{number}" for number in range(800))
    request = context(end, grammar.of_lark("\n".join([f"start: {starts}", *rules])))
    with pytest.raises(InputError, match=r"cannot be followed: .*2400 items; max is 2000"):
        Constraints(delegate).begin(request)
    assert request.matcher is None


def test_tokens_within_strings_are_taken_at_once(delegate: Delegate, end: int) -> None:
    constraints, begin = Constraints(delegate), delegate.encode('{"a": "some birds')
    plain, closing = delegate.encode("lark"), delegate.encode('"')
    request = taken(constraints, context(end, json_schema=SCHEMA), begin)
    assert not constraints.take_plain(request, plain)  # the mask is not known
    masks = constraints.start_masks([request])
    assert masks is not None and isinstance(request.matcher, late_matcher.LateMatcher)
    request.matcher.run.learn(masks.result()[0])
    assert constraints.take_plain(request, plain) and constraints.take_plain(request, [])
    assert not constraints.take_plain(request, [*plain, *closing])
    rest = delegate.encode('"}')
    for token in rest:
        assert request.matcher is not None and request.matcher.consume_token(token)
    assert request.matcher is not None and request.matcher.is_accepting()
    # no others have such tokens
    regex = taken(constraints, context(end, grammar.of_regex("[a-z]+")), [])
    assert not constraints.take_plain(regex, plain) and not constraints.take_plain(context(end), [])
    texts = constraints._token_texts([end])
    assert constraints._token_texts([]) is texts
    forced = taken(constraints, context(end, grammar.of_regex("a(bcdefghij klmno){9}")), [])
    text = delegate.tokenizer.decode(constraints.forced_tokens(forced), skip_special_tokens=False)
    assert text and ("a" + "bcdefghij klmno" * 9).startswith(text)


def test_masks_of_a_wider_vocabulary() -> None:
    """Tokens that a mask does not have are allowed where there is no grammar; NumPy's own bits are the reference."""
    for batch, vocabulary in ((1, 64), (3, 64), (3, 63), (3, 65), (2, 90), (70, 65)):
        masks = np.random.default_rng(batch).integers(-(2**31), 2**31, (batch, 2)).astype(np.int32)
        masks[0] = -1
        found = unpack_mask(masks, vocabulary)
        assert found.shape == (batch, vocabulary) and found.dtype == bool
        for row in range(batch):
            bits = [
                bool(masks[row, at // 32] >> (at % 32) & 1) for at in range(min(64, vocabulary))
            ]
            assert found[row].tolist() == bits + [row == 0] * (vocabulary - len(bits))


def test_works_run_one_after_the_other() -> None:
    thread, go = MaskThread(), threading.Event()
    slow, quick = (MaskWork(np.zeros((1, 2), np.int32), deque([(row, 0)])) for row in (Row(5, go), Row(6)))  # fmt: skip
    try:
        thread.submit(slow)
        thread.submit(quick)
        assert not quick.finished.wait(0.05) and slow.row == 0
    finally:
        go.set()
    assert quick.finished.wait(10) and slow.finished.is_set()


def test_what_is_abandoned_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its thread ends after it."""
    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    others = {*threading.enumerate()}
    thread, go = MaskThread(), threading.Event()
    slow = MaskWork(np.zeros((1, 2), np.int32), deque([(Row(5, go), 0)]))
    assert slow.seconds() == 0, "no row is begun"
    try:
        thread.submit(slow)
        (own,) = {*threading.enumerate()} - others
        thread.leave(slow)
        thread.replace(slow)
        thread.settle()
        assert thread.overdue == 1
    finally:
        go.set()
    own.join(10)
    assert not own.is_alive()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of threads")
def test_a_row_that_waits_for_the_processor_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Row):
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            time.sleep(0.2)
            super().unsafe_compute_mask_ptr(pointer, size)

    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    masks, failed = step(MaskThread(), [Waits(3)])
    assert masks.result().tolist() == [[3, 3]] and not failed


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of threads")
def test_each_row_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Works(Row):
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            end = time.thread_time() + 0.04
            while time.thread_time() < end:
                pass
            super().unsafe_compute_mask_ptr(pointer, size)

    monkeypatch.setattr(step_masks, "MASK_S", 0.1)
    masks, failed = step(MaskThread(), [Works(n) for n in range(5)])
    assert masks.result().tolist() == [[n, n] for n in range(5)] and not failed


class Scripted:
    """A matcher that is told how a token goes."""

    def __init__(
        self, accepts: tuple[bool, bool] = (False, False), follows: Any = True, error: bool = False
    ) -> None:
        self.accepts, self.follows, self.error = accepts, follows, error
        self.consumed: list[int] = []

    def is_error(self) -> bool:
        return self.error

    def is_accepting(self) -> bool:
        return self.accepts[bool(self.consumed)]

    def get_error(self) -> str:
        return "the reason"

    def consume_token(self, token: int) -> bool:
        self.consumed.append(token)
        if isinstance(self.follows, BaseException):
            raise self.follows
        return self.follows


@pytest.mark.parametrize(
    ("token", "matcher", "consumes", "problem"),
    [
        # the end of an answer that is complete is no part of it
        (9, Scripted((True, True)), False, None),
        (9, Scripted((True, False), follows=False, error=True), True, "the reason"),
        # an end token that completes the answer, or stands within it
        (9, Scripted((False, True)), True, None),
        (9, Scripted((False, False)), True, "it needs the end token 9 within the answer"),
        (9, Scripted((False, False), follows=False), True, "the reason"),
        # other tokens
        (5, Scripted((True, True)), True, None),
        (5, Scripted((False, False)), True, None),
        (5, Scripted((True, True), follows=False), True, "the reason"),
        (5, Scripted(follows=panic()), True, ""),
    ],
)
def test_what_a_token_does_to_an_answer(
    token: int, matcher: Scripted, consumes: bool, problem: str | None
) -> None:
    request = context(9)
    request.set_matcher(matcher)
    request.update(token)
    status = request.status
    Constraints(Delegate()).advance(request, token)
    assert matcher.consumed == [token] * consumes
    if problem is None:
        assert request.status is status and request.failure is None
        return
    assert request.status is GenerationStatus.CANCELLED
    assert isinstance(request.failure, InputError) and problem in request.failure.problem


def test_the_masks_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known, or a thread's that follows copies: requests follow their tokens after the call."""

    class Copied:
        def __init__(self, of: object = None) -> None:
            self.of = of

        def deep_copy(self) -> Copied:
            return Copied(self)

        copy = deep_copy

    matcher, runs = Copied(), Copied()
    runs.run = Copied()  # type: ignore[attr-defined]
    batch = [context(9), context(9), context(8)]
    batch[0].set_matcher(matcher)
    batch[1].set_matcher(runs)
    constraints, memory, kept = Constraints(Delegate()), object(), object()
    ready: list[Any] = [None, "ready"]
    asked: list[Any] = []

    def of(thread: Any, rows: Any, *more: Any) -> Any:
        asked.append([(row.matcher, row.jumps, row.ends, row.run) for row in rows])
        assert more == (memory, 4)
        return ready.pop(0)

    calls = SimpleNamespace(
        FollowedRow=call_masks.FollowedRow, ReadyMasks=SimpleNamespace(of=of), CallMasks=lambda *given: given
    )  # fmt: skip
    monkeypatch.setattr(constraint, "call_masks", calls)
    thread, rows, *more = constraints.call_masks(batch, [True, False, True], memory, kept, 4)  # type: ignore[arg-type]
    assert more == [memory, kept] and thread is constraints._thread
    assert asked == [
        [(matcher, True, {9}, None), (runs, False, {9}, runs.run), (None, True, {8}, None)]
    ]  # type: ignore[attr-defined]
    assert [getattr(row.matcher, "of", None) for row in rows] == [matcher, runs, None]
    assert [getattr(row.run, "of", None) for row in rows] == [None, runs.run, None]  # type: ignore[attr-defined]
    assert [one.matcher for one in batch] == [matcher, runs, None]
    assert constraints.call_masks(batch, [True, False, True], memory, kept, 4) == "ready"  # type: ignore[arg-type]
