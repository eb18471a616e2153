"""Texts that fit no pattern, or one with look-ahead, as patterns: compared with Python's regular expressions."""

from __future__ import annotations

import random
import re

import pytest

from max.pipelines.structured.pattern_automata import other_texts, unlike_pattern, without_ahead
from max.pipelines.structured.pattern_syntax import (
    BEGIN,
    END,
    LAST,
    Characters,
    PatternError,
    Ranges,
    merge_ranges,
    others,
    read_pattern,
)
from max.pipelines.structured.validation import is_regex

ENDS = ["", "https:", "ab", "1 ", "foo", "x-1", "con", ".py", "\n"]


def texts(seed: str, count: int = 600) -> list[str]:
    numbers = random.Random(seed)
    return [
        "".join(numbers.choices("abcx_d.1 \n:-fo", k=numbers.randint(0, 5))) + numbers.choice(ENDS)
        for _ in range(count)
    ]


def in_python(pattern: str) -> re.Pattern[str]:
    """A pattern that was made, without the codes of Rust."""
    text = re.sub(r"\\x\{(\w+)\}", lambda match: re.escape(chr(int(match[1], 16))), pattern)
    return re.compile(text[1:-1])


def fits(pattern: str, text: str) -> bool:
    # `$` is the end of a text, not that of its last line; classes are those of ECMAScript
    return re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None


@pytest.mark.parametrize(
    "pattern",
    ["^_", "^ab$", "^[a-c]x", "^[^a-c]$", r"^\d\s", r"^\.a$", r"^https:", "a", "^a+", "^(a|b)", "^a.b", "^$", "^a|b$",
     "^" + "a" * 17, "x{2,3}", r"^\d{4}-\d{2}$", r"\.py$", "foo|bar", "(ab)+c", "^(?:a|bc)*$", "^.{0,9}$", r"[\w-]+$",
     r"^(?P<n>a)?\W", r"\x61\u0062", "[]a]", r"^\Aab\Z", "a*?b"],
)  # fmt: skip
def test_texts_unlike_a_pattern(pattern: str) -> None:
    if pattern in ("[]a]", r"^\Aab\Z"):
        pattern = {"[]a]": "[.a]", r"^\Aab\Z": r"\Aab\Z"}[pattern]
    unlike = unlike_pattern(pattern)
    assert unlike is not None and is_regex(unlike)
    compiled = in_python(unlike)
    for text in [*texts(pattern), chr(LAST), f"a{chr(LAST)}"]:
        assert (compiled.fullmatch(text) is not None) is not fits(pattern, text), text


def some_pattern(numbers: random.Random, depth: int = 0) -> str:
    """A random pattern of what is read."""
    kind = numbers.randrange(8 if depth < 3 else 4)
    if kind < 3:
        return numbers.choice(
            ["a", "b", "x", ".", r"\d", r"\s", "[ab]", "[^a-c_]", r"\.", r"[\d:-]", "-"]
        )
    if kind == 3:
        return numbers.choice(["a", "b", "[a-d]"]) + numbers.choice(
            ["*", "+", "?", "{2}", "{1,2}", "{0,}", "+?"]
        )
    parts = [some_pattern(numbers, depth + 1) for _ in range(numbers.randint(1, 3))]
    if kind < 6:
        return "".join(parts)
    return (
        f"({numbers.choice(['', '?:'])}{'|'.join(parts)}){numbers.choice(['', '*', '?', '{1,2}'])}"
    )


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 400))]
)
def test_random_patterns(seed: int) -> None:
    numbers = random.Random(seed)
    pattern = numbers.choice(["", "^"]) + some_pattern(numbers) + numbers.choice(["", "$"])
    unlike = unlike_pattern(pattern)
    if unlike is None:  # too large, or every text fits
        assert len(pattern) > 12 or all(fits(pattern, text) for text in texts(pattern)), pattern
        return
    compiled = in_python(unlike)
    for text in texts(pattern, 200):
        assert (compiled.fullmatch(text) is not None) is not fits(pattern, text), (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!a).*$",
        "^(?!x)",
        "^(?=.*1).{4,8}$",
        "^(?!.*foo)[a-z]+$",
        "^(?!(con|ab)$)[a-z]+$",
        "^(?!_)(?=[ab]).*[^-]$",
        "^ab?$",
    ],
)
def test_look_ahead_at_the_begin(pattern: str) -> None:
    other = without_ahead(pattern)
    assert other is not None
    compiled = in_python(other)
    for text in texts(pattern):
        assert (compiled.fullmatch(text) is not None) is fits(pattern, text), text


@pytest.mark.parametrize(
    "listed", [["a"], ["abc", "ab", "x"], ["", "b\n"], ["é", "\U0001f600", "."]]
)
def test_all_texts_but_a_few(listed: list[str]) -> None:
    other = other_texts(listed)
    assert other is not None
    compiled = in_python(other)
    for text in [*texts(listed[0]), *listed, "é.", "\U0001f600"]:
        assert (compiled.fullmatch(text) is not None) is (text not in listed), text


@pytest.mark.parametrize(
    "pattern",
    [r"\ba", r"(a)\1", "(?<=a)b", r"\p{L}", "(?i)a", "a(", "a)", "[a", "a**", "^*", "a{2,x}", r"\xg1", r"\ud800",
     "[b-a]", r"[\d-a]", "a{300}", "*a", "\\"],
)  # fmt: skip
def test_patterns_that_are_not_read(pattern: str) -> None:
    with pytest.raises(PatternError):
        read_pattern(pattern)
    assert unlike_pattern(pattern) is None and without_ahead(pattern) is None


def test_codes_of_characters() -> None:
    for code, sign in (
        (r"\x41", "A"),
        (r"\u0041", "A"),
        (r"\x{41}", "A"),
        (r"\u{1F642}", "🙂"),
        (r"\x{0}", "\0"),
    ):
        assert read_pattern(f"{code}b[{code}-{code}]2") == read_pattern(f"{sign}b[{sign}]2")
        for cut in (code[:-1], code[: code.index("}")] if "}" in code else code[:2]):
            with pytest.raises(PatternError):
                read_pattern(cut)
    for code in (
        r"\x{110000}",
        r"\u{D800}",
        r"\uDFFF",
        r"\x{}",
        r"\x4g",
        r"\x+4",
        r"\u 041",
        r"\u0_41",
    ):
        with pytest.raises(PatternError, match="a code is no"):
            read_pattern(code)


def test_look_ahead_after_the_begin_is_not_read() -> None:
    assert without_ahead("^a(?!b)") is None and without_ahead("^(?!b)a(?!b)") is None


@pytest.mark.parametrize(
    "pattern",
    ["", "a(?!b)", "(?!a)b", "^(a|(?!b))", "a.{60}b", "^(a{200}){200}$", "((a{99}){99}){99}"],
)
def test_large_patterns_and_those_of_all_texts_have_no_opposite(pattern: str) -> None:
    assert unlike_pattern(pattern) is None


def test_opposites_of_large_automata() -> None:
    """As large as an automaton may be, and larger; there would be a short opposite of each."""
    assert unlike_pattern(r"[^\s\S]" + "a" * 990) is not None
    assert unlike_pattern(r"[^\s\S]" + "a" * 1010) is None
    # one state for each character, one after the last, and one for other texts
    assert unlike_pattern("^" + "a" * 30 + "$") is not None
    assert unlike_pattern("^" + "a" * 31 + "$") is None
    pairs = "|".join(f"[{a}{b}]" for a in "abcdefghij" for b in "klmnopqrst")
    assert unlike_pattern(f"^b({pairs}|{pairs}|{pairs})*x") is None
    # the place of each `a` is a state, though `c` alone tells which texts fit
    assert unlike_pattern("(a.{4}b)?c") is not None
    assert unlike_pattern("(a.{5}b)?c") is None
    # 17 states, each after two others
    assert unlike_pattern("^[ab]*a[ab]{2}$") is not None
    assert unlike_pattern("^[ab]*a[ab]{3}$") is None


def test_opposites_are_written_in_ascii() -> None:
    """Letters and digits of other scripts are codes, too."""
    unlike = unlike_pattern("^[à-ü٣]$")
    assert unlike is not None and unlike.isascii() and r"\xE0-\xFC\x{663}" in unlike


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (r"^\d{4}-\d{2}$", 400),
        ("foo|bar", 600),
        ("^https?://", 400),
        ("a", 40),
        ("^[a-z]{2,10}$", 450),
    ],
)
def test_opposites_are_short(pattern: str, most: int) -> None:
    """States with few paths are left out first."""
    unlike = unlike_pattern(pattern)
    assert unlike is not None and len(unlike) <= most


def characters(pattern: str) -> Ranges:
    part = read_pattern(pattern)
    assert isinstance(part, Characters)
    return part.ranges


def test_sets_of_characters() -> None:
    """Classes are those of ECMAScript, compared with Python's."""
    for pattern in (
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"[\d-]",
        r"[^\w:]",
        "[a-c]",
        "[^a-c]",
        "[b-b]",
        r"[\b]",
        r"[\n-\r]",
        *(rf"\{sign}" for sign in "nrtfv0"),
        ".",
    ):
        ranges = characters(pattern)
        assert ranges == merge_ranges(ranges)
        compiled = re.compile(pattern, re.ASCII)
        for code in (*range(300), 0xD7FF, 0xE000, LAST):
            fits = any(low <= code <= high for low, high in ranges)
            assert fits is (compiled.fullmatch(chr(code)) is not None), (pattern, code)
    # ECMAScript's white space is that of Unicode, with the mark of byte order and without four controls
    spaces = {code for low, high in characters(r"\s") for code in range(low, high + 1)}
    expected = {code for code in range(LAST + 1) if chr(code).isspace()}
    assert spaces == expected - {0x1C, 0x1D, 0x1E, 0x1F, 0x85} | {0xFEFF}
    assert (characters("^"), characters("$")) == (((BEGIN, BEGIN),), ((END, END),))
    assert len({LAST, BEGIN, END}) == 3 and chr(LAST)
    assert others(()) == ((0, LAST),) and others(((0, LAST),)) == ()
    assert others(((0, 3), (9, LAST))) == ((4, 8),)
    assert merge_ranges([(5, 6), (1, 2), (3, 4), (8, 9), (8, 8)]) == ((1, 6), (8, 9))


@pytest.mark.parametrize(
    "pattern",
    [r"\ud7ff", r"\ue000", r"\u{10ffff}", "a{256}", "a{0,256}", "(?P<n>a)", "(?<n>a)", "(?:a)", "[a-z&]", "a{2}?",
     "[-a]",
     "[a-]", r"[\]]", r"\u{10ffff}*"],
)  # fmt: skip
def test_patterns_at_the_limits_are_read(pattern: str) -> None:
    read_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"\ud800", r"\udfff", r"\u{110000}", "a{257}", "a{1,257}", "a+*", "a{2}{3}", "a{x}", "a{1,y}", "a{1", "(?<!a)b",
     "(?<=a)b", "(?#c)", "[[a]]", "[a&&b]", r"[a-\d]", r"[+-\d]", r"[\d-\x{7f}]", r"[+-\w]",
     "(?<=a>b)c", "(?<!a>b)c", "(?=a)*", "$+", "(?<n", "[a", "a|)"],
)  # fmt: skip
def test_patterns_beyond_the_limits_are_not(pattern: str) -> None:
    with pytest.raises(PatternError):
        read_pattern(pattern)


class CountedText(str):
    """A text that counts the characters that are taken of it."""

    taken = 0

    def __getitem__(self, key: object) -> str:
        part = super().__getitem__(key)  # type: ignore[index]
        CountedText.taken += len(part)
        return part


def test_each_sign_of_a_pattern_is_looked_at_a_few_times() -> None:
    text = CountedText(r"^(a{1,2}[b-d-]\u0041\u{42}(?:e|f)*g?|(?=h)i)" * 200 + "$")
    CountedText.taken = 0
    assert read_pattern(text) == read_pattern(str(text))
    assert len(text) <= CountedText.taken <= 8 * len(text)
