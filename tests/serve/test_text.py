"""Text from tokens: the joined text does not depend on how the tokens are split into steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.events import TokenLogProbabilities
from max.pipelines.tokenization.text_stream import GeneratedText
from max.pipelines.tokenization.tokenizer import TextTokenizer
from max.serve.models.vocabulary import Vocabulary
from tests.serve.conftest import TINY

TOKENIZER = TextTokenizer(str(TINY))
ALPHABET = st.sampled_from("ab \n\u00e9\u4e16\U0001f600")
END = 2


def decode(tokens) -> str:
    return TOKENIZER.decode_now(tokens, skip_special_tokens=True)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first complete stop text, read character by character."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(ALPHABET, max_size=30),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    data=st.data(),
    include=st.booleans(),
    with_logs=st.booleans(),
)
def test_every_split_gives_the_same_text(text, stops, data, include, with_logs) -> None:
    tokens = [*TOKENIZER.encode_now(text, add_special_tokens=False).tolist(), END]
    generated = GeneratedText(decode, frozenset({END}), stops, include)
    expected, stop = cut(text, stops)
    joined, logs, piece = "", [], None
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        part, tokens = tokens[:count], tokens[count:]
        entries = tuple(TokenLogProbabilities((-1.0,), (((t, -1.0),),)) for t in part)
        status = GenerationStatus.ACTIVE if tokens else GenerationStatus.END_OF_SEQUENCE
        piece = generated.push(part, status, entries if with_logs else None)
        joined += piece.text
        logs += piece.logs
        if piece.finish_reason:
            break
    assert piece is not None and piece.finish_reason == "stop" and piece.stop == stop
    assert joined == expected + (stop if include and stop else "")
    if with_logs:
        vocabulary = Vocabulary(TOKENIZER.delegate)
        shown = b"".join(vocabulary.token_bytes(log.token) for log in logs)
        if stop is None:
            assert shown.decode() == text
        else:  # the tokens that the text begins in, the last of which may go on in the stop
            assert shown.startswith(joined.encode()) and text.encode().startswith(shown)
            assert all(log.offset < len(joined) for log in logs)


def test_bytes_of_all_tokens() -> None:
    vocabulary = Vocabulary(TOKENIZER.delegate)
    special = set(TOKENIZER.delegate.all_special_ids)
    for token in range(len(TOKENIZER.delegate)):
        text = TOKENIZER.decode_now([token])
        own = vocabulary.token_bytes(token)
        if "\ufffd" not in text:
            assert own.decode() == text
        assert token in special or own


def test_an_invisible_token_keeps_the_logs_of_the_prompt() -> None:
    """With echo, the first token may be the end of the sequence."""
    generated = GeneratedText(decode, frozenset({END}), [])
    entry = TokenLogProbabilities((-3.0, -2.0, -1.0), tuple(((t, -1.0),) for t in (7, 8, END)))
    piece = generated.push([END], GenerationStatus.END_OF_SEQUENCE, (entry,))
    assert [log.log_probability for log in piece.prompt_logs] == [-3.0, -2.0]
    assert (piece.text, piece.logs, piece.finish_reason) == ("", (), "stop")


def test_the_token_that_begins_a_stop_text_has_no_log() -> None:
    """All tokens in one step: the text ends exactly at the start of that token."""
    tokens = TOKENIZER.encode_now("ab\nb", add_special_tokens=False).tolist()
    texts = [decode([token]) for token in tokens]
    stop = "".join(texts[1:])
    generated = GeneratedText(decode, frozenset({END}), [stop])
    entries = tuple(TokenLogProbabilities((-1.0,), (((t, -1.0),),)) for t in tokens)
    piece = generated.push(tokens, GenerationStatus.ACTIVE, entries)
    assert len(tokens) > 1 and (piece.text, piece.stop) == (texts[0], stop)
    assert [log.token for log in piece.logs] == tokens[:1]
