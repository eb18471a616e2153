"""Text of tokens that are bytes, one at a time: when it comes, and what it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.generation.process.events import TokenLogProbabilities
from max.pipelines.tokenization.text_stream import GeneratedText, StopStrings, TextPiece, TextStream

BROKEN = "\ufffd"
INVISIBLE = 256


class Bytes:
    """Decodes tokens that are bytes, as byte-level tokenizers do; one token has no text."""

    def __init__(self) -> None:
        self.decoded, self.longest, self.last = 0, 0, 0
        """The number of tokens that were decoded, the most at once, and that of the last call."""

    def __call__(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        self.longest, self.last = max(self.longest, len(tokens)), len(tokens)
        return bytes(token for token in tokens if token != INVISIBLE).decode("utf-8", "replace")


def whole(data: bytes) -> str:
    """The whole characters at the begin of valid text that may be cut."""
    return data.decode("utf-8", "ignore")


@pytest.mark.parametrize("seed", range(8))
def test_each_character_comes_with_its_last_byte(seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choices("aé日🙂\n ", k=60)).encode()
    decode = Bytes()
    stream, text, at = TextStream(decode), "", 0
    while at < len(data):
        count = rng.choice([1, 1, 1, 2, 5, 30])
        text += stream.push(data[at : at + count])
        at += count
        assert text == whole(data[:at])
    assert stream.finish() == "" == stream.finish() and decode.decoded < 40 * len(data)


def test_few_tokens_are_decoded_again() -> None:
    """The last eight at most, and those of the character that is not complete; shorter windows are not tried often."""
    # whole characters in more than eight bytes
    for text, longest in {"a": 9, "é": 10, "日": 9, "🙂": 12, "日🙂": 11}.items():
        decode = Bytes()
        stream, data = TextStream(decode), (text * 300).encode()
        assert "".join(stream.push([byte]) for byte in data) == text * 300
        assert decode.longest == longest and decode.decoded < 13 * len(data)
        # the next token has at least four before it, on which its space may depend
        for _ in range(10):
            stream.push(b"a")
            assert decode.last >= 4


def test_a_space_depends_on_the_token_before() -> None:
    """The first one has none; tokens without a text between do not make the next one the first."""

    def decode(tokens: Sequence[int]) -> str:
        return Bytes()(tokens).removeprefix(" ")

    for count in (3, 7, 20, 300):
        tokens = [*b" a", *[INVISIBLE] * count, *b" b"]
        stream = TextStream(decode)
        assert "".join(stream.push([token]) for token in tokens) + stream.finish() == "a b"


@pytest.mark.parametrize("first", [4, 60, 63, 70])
@pytest.mark.parametrize("later", [1, 3, 8, 200])
def test_bytes_and_tokens_without_a_text_in_turn(first: int, later: int) -> None:
    for end in ([], [0xFF], [*[INVISIBLE] * 3, 0xFF], [0x9F, 0x99, 0x82], [0xFF] * 90):
        data = [*[0xFF] * first, *[INVISIBLE] * later, 0xF0, *[INVISIBLE] * later, *end, *b"ab"]
        stream = TextStream(Bytes())
        assert "".join(stream.push([byte]) for byte in data) + stream.finish() == Bytes()(data)


@pytest.mark.parametrize("seed", range(12))
def test_any_bytes_give_what_decoding_them_at_once_gives(seed: int) -> None:
    """Also long runs of which no character becomes whole, and tokens without a text."""
    rng = random.Random(seed)
    data: list[int] = []
    for _ in range(12):
        parts = [list("ab🙂".encode()), [0xFF], [0xF0, 0x9F], [0x98], [0x80, INVISIBLE]]
        data += rng.choice(parts) * rng.choice([1, 1, 90])
    stream, decode = TextStream(Bytes()), Bytes()
    pieces = [stream.push([token]) for token in data]
    text = "".join(pieces) + stream.finish()
    assert text == decode(data)


@pytest.mark.parametrize("token", [0xFF, 0x80, 0xF0, INVISIBLE])
def test_a_long_run_without_a_character_costs_as_much_as_its_length(token: int) -> None:
    """And is not held back, but for what could become a character."""
    decode = Bytes()
    stream = TextStream(decode)
    text = stream.push(b"a")
    for count in range(1, 3001):
        text += stream.push([token])
        if token == INVISIBLE or count < 64:
            assert text == "a"
        else:
            assert count - 64 < len(text) <= count - 2 and (count > 64 or len(text) == 62)
    assert decode.decoded < 3000 * 150
    text += stream.push(b"b") + stream.finish()
    assert text == "a" + BROKEN * (0 if token == INVISIBLE else 3000) + "b"


def test_a_stream_begins_anew_after_its_end() -> None:
    stream = TextStream(Bytes())
    assert stream.push([97, 0xF0]) == "a" and stream.finish() == BROKEN and stream.finish() == ""
    assert stream.push(b"bc") == "bc" and stream.finish() == ""


def test_an_error_of_the_tokenizer_is_raised() -> None:
    def fails(tokens: Sequence[int]) -> str:
        raise ValueError(f"no text for {len(tokens)}")

    with pytest.raises(ValueError, match="no text for 2"):
        TextStream(fails).push([1, 2])


def test_an_error_of_no_class_is_one_of_the_model_s_files() -> None:
    def fails(tokens: Sequence[int]) -> str:
        raise Exception(f"no piece of {len(tokens)}")

    with pytest.raises(ModelFilesError, match="cannot handle its own tokens: no piece of 2"):
        TextStream(fails).push([1, 2])


def test_what_a_stop_text_may_begin_with_is_held_back() -> None:
    search = StopStrings(["", "abc", "cd"])
    assert search.push("xab") == "x" and search.push("a") == "ab" and search.push("b") == ""
    assert search.push("d") == "abd" and search.push("c") == "" and search.finish() == "c"
    assert search.finish() == "" and not search.found
    # a whole stop text is not held back but found
    assert search.push("zabc") == "z" and search.found and search.stop == "abc"
    assert search.push("more") == "" == search.finish()
    assert StopStrings([]).push("abc") == "abc"


def test_the_number_of_tokens_and_the_last_one() -> None:
    """Only a token that ends sequences has no text; a sequence may end otherwise, such as by a stop sequence."""
    end, active = GenerationStatus.END_OF_SEQUENCE, GenerationStatus.ACTIVE
    for last, text in ((ord("!"), "ab"), (ord("?"), "ab?")):
        generated = GeneratedText(Bytes(), {ord("!")})
        assert generated.tokens == 0
        first = generated.push(b"a", active)
        piece = generated.push([ord("b"), last], end)
        assert first.text + piece.text == text and piece.finish_reason == "stop"
        assert (first.tokens, piece.tokens, generated.tokens) == (1, 3, 3)
    kept = GeneratedText(Bytes(), {ord("!")}).push(b"a!", GenerationStatus.MAXIMUM_LENGTH)
    assert (kept.text, kept.finish_reason) == ("a!", "length")
    assert GeneratedText(Bytes(), {1}).push([], end).text == ""


def test_tokens_of_the_prompt_have_no_number_and_no_place() -> None:
    generated = GeneratedText(Bytes(), ())
    entry = TokenLogProbabilities((-3.0, -2.0, -1.0), (((7, -3.0),), ((8, -2.0),), ((9, -1.0),)))
    piece = generated.push(b"a", GenerationStatus.ACTIVE, [entry])
    assert [(log.token, log.offset, log.top) for log in piece.prompt_logs] == [
        (-1, 0, ((7, -3.0),)), (-1, 0, ((8, -2.0),)),
    ]  # fmt: skip
    assert [(log.token, log.log_probability, log.offset) for log in piece.logs] == [(97, -1.0, 0)]


def test_a_stop_text_is_part_of_the_text_if_that_is_asked_for() -> None:
    for options, text in (({}, "a"), ({"include_stop": True}, "abc")):
        generated = GeneratedText(Bytes(), (), ["bc"], **options)
        pieces = [generated.push([byte], GenerationStatus.ACTIVE) for byte in b"abc"]
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]
        assert [piece.stop for piece in pieces] == [None, None, "bc"]
    assert TextPiece("x").tokens == 0


def test_the_first_complete_stop_text_ends_the_text() -> None:
    """Of those that are complete at one letter the longest, however the text is cut."""
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        expected, found = text, None
        for end in range(len(text) + 1):
            ended = [stop for stop in stops if text[:end].endswith(stop)]
            if ended:
                found = max(ended, key=len)
                expected = text[: end - len(found)]
                break
        search, shown, at = StopStrings(stops), "", 0
        while at < len(text):
            count = rng.randint(1, 4)
            shown += search.push(text[at : at + count])
            at += count
            # only what may be the begin of a stop text is held back
            begins = [stop[:size] for stop in stops for size in range(len(stop))]
            held = max(len(begin) for begin in begins if text[:at].endswith(begin))
            assert search.found or shown == text[:at][: len(text[:at]) - held]
        assert shown + search.finish() == expected and search.stop == found


def logged(*bytes_: int) -> list[TokenLogProbabilities]:
    return [
        TokenLogProbabilities((-9.0, -float(byte)), (((1, -9.0),), ((byte, -1.0),)))
        for byte in bytes_
    ]


def test_logs_come_with_the_text_in_which_their_tokens_begin() -> None:
    active, full = GenerationStatus.ACTIVE, GenerationStatus.MAXIMUM_LENGTH
    generated = GeneratedText(Bytes(), ())
    first, second = "é".encode()
    assert generated.push([first], active, logged(first)).logs == ()
    piece = generated.push([second, 97], active, logged(second, 97))
    assert [(log.token, log.offset, log.log_probability, log.top) for log in piece.logs] == [
        (first, 0, -float(first), ((first, -1.0),)), (second, 0, -float(second), ((second, -1.0),)),
        (97, 1, -97.0, ((97, -1.0),)),
    ]  # fmt: skip
    # what is held back comes at the end
    last = generated.push([first], full, logged(first))
    assert (last.text, last.finish_reason) == (BROKEN, "length")
    assert [(log.token, log.offset) for log in last.logs] == [(first, 2)]
    stopped = GeneratedText(Bytes(), (), ["b"])
    piece = stopped.push(b"abc", active, logged(*b"abc"))
    assert (piece.text, piece.stop, piece.tokens, piece.token_ids) == ("a", "b", 2, tuple(b"ab"))
    assert [log.token for log in piece.logs] == [97]


@pytest.mark.parametrize("seed", range(6))
def test_text_with_and_without_logs(seed: int) -> None:
    """The text up to the first stop text, in any pieces; each token's log comes with the text that it begins."""
    rng = random.Random(seed)
    for _ in range(40):
        data = "".join(rng.choices("abé日🙂", k=rng.randrange(1, 9))).encode()
        data = data[: rng.randint(len(data) - 2, len(data))]
        stops = rng.sample(["ab", "é", "日b", "🙂", "ba", "aa"], rng.randrange(3))
        include, with_logs, ends = (rng.random() < 0.5 for _ in range(3))
        text, stop, used = Bytes()(data), None, len(data) + ends
        found = [(text.index(each) + len(each), each) for each in stops if each in text]
        if found:
            end, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            text = text[: end - (0 if include else len(stop))]
            used = next(n for n in range(len(data) + 1) if len(whole(data[:n])) >= end)
        generated = GeneratedText(Bytes(), {INVISIBLE}, stops, include)
        tokens, shown, at = [*data, *([INVISIBLE] if ends else [])], "", 0
        logs: list[tuple[int, int]] = []
        taken: list[int] = []
        piece = TextPiece("")
        while piece.finish_reason is None:
            pushed = tokens[at : at + rng.randint(1, 4)]
            at += len(pushed)
            final = GenerationStatus.END_OF_SEQUENCE if ends else GenerationStatus.MAXIMUM_LENGTH
            status = GenerationStatus.ACTIVE if at < len(tokens) else final
            piece = generated.push(pushed, status, logged(*pushed) if with_logs else None)
            shown += piece.text
            taken += piece.token_ids
            logs += [(log.token, log.offset) for log in piece.logs]
            begun = [(byte, len(whole(data[:n]))) for n, byte in enumerate(data[:at])]
            if piece.finish_reason is None or stop is not None:
                begun = [each for each in begun if each[1] < len(shown)]
            assert logs == (begun if with_logs else []), (data, stops)
        assert (shown, piece.stop) == (text, stop), (data, stops)
        assert piece.finish_reason == ("stop" if ends or stop is not None else "length")
        # without those of its step after the stop text
        assert taken == tokens[:used] and piece.tokens == used <= at
