"""Grammars in Lark's syntax as expressions: llguidance's parser of a grammar accepts what its expression matches."""

from __future__ import annotations

import random
import re
import tracemalloc
from functools import cache
from pathlib import Path

import llguidance
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from max.pipelines.structured.validation import is_regex
from max.serve.openai.lark_patterns import LarkError, UnheldGrammarError, pattern_of_lark

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
PATCH = r"""
// a patch of files
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF [move] change?
filename: /[^\n]+/
add_line: "+" /[^\n]*/ LF -> line
move: "*** Move to: " filename LF
change: (context | changed_line)+
context: ("@@" | "@@ " /[^\n]+/) LF
changed_line: ("+" | "-" | " ") /[^\n]*/ LF
%import common.LF
"""
SUM = r"""
?start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP "*" SP factor)*
factor: INT | "(" expr ")"
SP: " "
ADD: "+" | "-"
%import common.INT
"""
LISTS = r"""
start: items
items: items "," item | item
item: "a".."f"~2..3 | "x"i ESCAPED | tail
tail: "<" tail | "." | /\d\/\d/
ESCAPED: "\t" | "\u00e9\x41" | "\"" "\\"
"""
GRAMMARS = {"patch": PATCH, "sum": SUM, "lists": LISTS}


@cache
def read_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(Tokenizer.from_file(str(TINY / "tokenizer.json")).to_str())


def accepts(text: str, lark: str) -> bool:
    """Whether llguidance's parser of a grammar accepts a text."""
    tokenizer = read_tokenizer()
    matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_of_the_expression_fit_the_grammar(name: str) -> None:
    pattern = pattern_of_lark(GRAMMARS[name]).pattern
    found: list[str] = []

    @seed(7)
    @settings(
        # a text of nested sums takes a quarter of a second to draw
        max_examples=10 if name == "sum" else 40,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    def draw(text: str) -> None:
        found.append(text)

    draw()
    draws = random.Random(5)
    for text in found:
        # what the tokenizer cannot write is no text of the model
        if text.isascii() and "\0" not in text:
            assert accepts(text, GRAMMARS[name]), text
            place = draws.randrange(len(text) + 1)
            changed = text[:place] + draws.choice("+*a\n(~") + text[place + 1 :]
            # nested deeper, a text fits the grammar and not the expression
            if name != "sum":
                assert (re.fullmatch(pattern, changed) is not None) == accepts(
                    changed, GRAMMARS[name]
                ), changed


@pytest.mark.parametrize(
    ("name", "depth", "fitting", "others"),
    [
        ("patch", None,
         ["*** Begin Patch\n*** Add File: a b\n+x\n+\n*** End Patch\n",
          "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ f\n-x\n y\n*** Delete File: c\n*** End Patch"],
         ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch", ""]),
        ("sum", 2, ["1", "1 + 23 * 4 - 5", "(1 + 2) * 3", "(1 + (2)) * (3 * 4)"], ["1+2", "(1", "1 + ", "()"]),
        ("lists", None, ["ab", "abc,de,<<<<<<<<.", 'X\t,x\u00e9A,x"\\,1/2'], ["a", "abcd", "ab,", "x", "<", "1\\/2"]),
    ],
)  # fmt: skip
def test_known_texts(name: str, depth: int | None, fitting: list[str], others: list[str]) -> None:
    found = pattern_of_lark(GRAMMARS[name])
    assert found.depth == depth
    for text in fitting:
        assert re.fullmatch(found.pattern, text), text
        assert accepts(text, GRAMMARS[name]), text
    for text in others:
        assert not re.fullmatch(found.pattern, text), text
        assert not accepts(text, GRAMMARS[name]), text


def test_what_is_ignored_may_stand_after_terminals() -> None:
    lark = 'start: A+ "!"\nA.2: "a" B\nB: "b"\n%import common.WS -> W\n%ignore W\n%ignore "#"\n'
    pattern, parsed = pattern_of_lark(lark).pattern, lark.replace("A.2", "A")
    for text, fits in {"ab!": 1, "ab ab\n\n!": 1, "ab#ab!": 1, "a b!": 0, "ab!x": 0}.items():
        assert (re.fullmatch(pattern, text) is not None) == accepts(text, parsed) == bool(fits)
    assert re.fullmatch(pattern, " ab! ") and not re.fullmatch(pattern, "ab##!")


def test_signs_of_texts_mean_themselves() -> None:
    plain = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\')
    lark = 'start: "' + plain + '\\\\" "-".."a"'
    found = pattern_of_lark(lark).pattern
    assert is_regex(found)
    for last, fits in {"-": True, "a": True, "b": False}.items():
        text = f"{plain}\\{last}"
        assert (re.fullmatch(found, text) is not None) == fits == accepts(text, lark)


@pytest.mark.parametrize(
    "name", ["INT", "SIGNED_FLOAT", "NUMBER", "ESCAPED_STRING", "CNAME", "WS", "NEWLINE"]
)
def test_common_terminals(name: str) -> None:
    lark = f"start: T\nT: {name}\n%import common.{name}\n"
    several = pattern_of_lark(lark.replace(f".{name}", f" ({name}, DIGIT)")).pattern
    pattern, fitting = pattern_of_lark(lark).pattern, 0
    texts = '0;12;-1.5e+3;1.;.5;1e5;"a\\"b";"\\";_a1;1a; \t;\r\n\n;;a'.split(";")
    for text in texts:
        fits = re.fullmatch(pattern, text) is not None
        fitting += fits
        assert fits == accepts(text, lark), text
    assert 0 < fitting < len(texts) and several == pattern


@pytest.mark.parametrize(
    "lark",
    ["begin: A\nA: \"a\"", "start: a", "start: \"a", "start \"a\"", "start: (\"a\"", "start: \"a\"~3..2",
     'start: "\\q"', "start: \"z\"..\"a\"", "start: A\nA: \"a\"\nA: \"b\"", "", "start: $"],
)  # fmt: skip
def test_what_is_no_grammar_is_an_error(lark: str) -> None:
    with pytest.raises(LarkError):
        pattern_of_lark(lark)


@pytest.mark.parametrize(
    "lark",
    ["start: a{b}", "start: a\n%import python.NAME -> a", "start: /a/i", "start: start \"a\"", "start: a\na: b\nb: a",
     "start: " + "(" * 200 + '"a"' + ")" * 200, "start: \"a\"" + "?" * 200, 'start: "a"~2000',
     "start: " + " ".join(f"a{n}" for n in range(1)) + "\n"
     + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(60)) + '\na60: "a"',
     'start: "' + "a" * 70_000 + '"', "start: \"a\"\n%declare B"],
    ids=range(11),
)  # fmt: skip
def test_what_no_expression_holds_is_said_soon(lark: str) -> None:
    with pytest.raises(UnheldGrammarError):
        pattern_of_lark(lark)


def test_what_is_ignored_is_written_once() -> None:
    """Its names do not count again for each terminal."""
    chain = "\n".join(f"W{n}: W{n + 1}" for n in range(20))
    lark = f'start: {" ".join(["A"] * 900)}\nA: "a"\n{chain}\nW20: " "\n%ignore W0\n'
    found = pattern_of_lark(lark)
    assert found.depth is None
    for text, fits in {"a " * 900: 1, "a" * 900: 1, " " + "a" * 900: 1, "a" * 899: 0}.items():
        assert (re.fullmatch(found.pattern, text) is not None) == bool(fits)
    for lost in ('start: "a"\n%ignore W', "start: start\n%ignore W"):
        with pytest.raises(LarkError, match="no rule named W"):
            pattern_of_lark(lost)


@pytest.mark.parametrize(
    "lark",
    ['start: {" ".join(t)}\nt: "{a}"', 'start: {"|".join(t)}\nt: "{a}"', 'start: "b"\n{ignored}T: "{a}"'],
    ids=range(3),
)  # fmt: skip
def test_copies_of_a_long_part_take_little_memory(lark: str) -> None:
    long, names = "a" * 15_000, ["t"] * 3000
    for sign, value in {
        '{" ".join(t)}': " ".join(names), '{"|".join(t)}': "|".join(names), "{a}": long,
        "{ignored}": "%ignore T\n" * 4000,
    }.items():  # fmt: skip
        lark = lark.replace(sign, value)
    tracemalloc.start()
    try:
        with pytest.raises(UnheldGrammarError):
            pattern_of_lark(lark)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_limits_of_grammars() -> None:
    lark = 'start: "a"\n#'
    assert pattern_of_lark(lark + "x" * (65_536 - len(lark))).pattern == "a"
    with pytest.raises(UnheldGrammarError, match="too long"):
        pattern_of_lark(lark + "x" * (65_537 - len(lark)))
    for count, held in ((99, True), (100, False)):
        nested = f'start: {"(" * count}"a"{")" * count}'
        if held:
            assert pattern_of_lark(nested).pattern == "a"
        else:
            with pytest.raises(UnheldGrammarError, match="nests too deeply"):
                pattern_of_lark(nested)
    # the error is that of the least depth
    with pytest.raises(UnheldGrammarError, match="too large"):
        pattern_of_lark(f'start: "{"a" * 16_001}"')
    with pytest.raises(UnheldGrammarError, match="within themselves"):
        pattern_of_lark('start: "(" start ")"')


@pytest.mark.parametrize(
    ("lark", "depth", "fitting", "others"),
    [
        ('start: start | "x"', None, ["x"], ["", "xx"]),
        ('start: | start "x"', None, ["", "xxx"], ["y"]),
        ('start: "x" start |', None, ["", "xxx"], ["y"]),
        ('start: "<" start ">" | "a" "b"', 3, ["ab", "<ab>", "<<<ab>>>"], ["<ab", "a"]),
        # deeper ones are longer
        ('start: "<" start ">" | "' + "a" * 6000 + '"', 1, ["<" + "a" * 6000 + ">"], ["<<" + "a" * 6000 + ">>"]),
        ('start: "<" start ">" start | "' + "a" * 9000 + '"', 0, ["a" * 9000], ["<" + "a" * 9000 + ">"]),
        ('start: "(" "a"\nother: ")"', None, ["(a"], ["(a)"]),
    ],
    ids=range(7),
)  # fmt: skip
def test_recursion_and_lines(
    lark: str, depth: int | None, fitting: list[str], others: list[str]
) -> None:
    found = pattern_of_lark(lark)
    assert found.depth == depth
    for text in fitting:
        assert re.fullmatch(found.pattern, text), text
        assert len(text) > 1000 or accepts(text, lark)
    for text in others:
        assert not re.fullmatch(found.pattern, text), text
        assert len(text) > 1000 or not accepts(text, lark)


def test_lines_end_nothing_in_brackets() -> None:
    found = pattern_of_lark('start: ("a"\n "b") ["c"\n\n"d"]\n').pattern
    for text, fits in {"ab": True, "abcd": True, "a": False, "abc": False}.items():
        assert (re.fullmatch(found, text) is not None) is fits
    for wrong in ('start: "a" )\n"b"', 'start: ("a"\n"b"', 'start: "a"\n"b"'):
        with pytest.raises(LarkError):
            pattern_of_lark(wrong)


@pytest.mark.parametrize(
    "lark",
    ['start: "a" %ignore "b"', 'start: "a"~b', 'start: "ab".."c"', 'start: "a".."bc"', 'start: "a"..""',
     'start: "\\U00110000"', 'start: "a" | "b" other: "c"', 'start: "a"~'],
)  # fmt: skip
def test_more_that_is_no_grammar(lark: str) -> None:
    with pytest.raises(LarkError):
        pattern_of_lark(lark)


@pytest.mark.parametrize(
    ("lark", "text"),
    [
        ('start{x}: "a"', "it has templates"), ('start: a{"b"}\na{x}: x', "it has templates"),
        ("start: INT\n%import python.INT", "imports python.INT"),
        ("start: X\n%import common.X", "imports common.X"),
        ('start: "a"~1001', "more than 1000 times"), ('start: "a"~1..99999', "more than 1000 times"),
        ('start: "a"' + "?" * 101, "nests too deeply"), ('start: "a"i.."b"', "case of a range"),
        ('start: "a".."b"i', "case of a range"), ('start: "a"..b', "no last character"),
        ('start: "a"..', "no last character"),
    ],
)  # fmt: skip
def test_what_is_not_held_is_named(lark: str, text: str) -> None:
    with pytest.raises((UnheldGrammarError, LarkError), match=text):
        pattern_of_lark(lark)


@pytest.mark.parametrize(
    ("lark", "fitting", "others"),
    [
        ('start: A\nA.-2: "a"', ["a"], ["b"]),
        ("start: NUM\n%import common.INT -> NUM", ["12"], ["a"]),
        ("start: INT DIGIT\n%import common (INT, DIGIT)", ["12"], ["a", "1"]),
        ('start: "a" |\n "b"', ["a", "b"], ["ab"]),
        ("start: " + '("a") ' * 150, ["a" * 150], ["a" * 149]),
        ('start: "a"~1000', ["a" * 1000], ["a" * 999, "a" * 1001]),
        ('start: "a"~2..2 "b"~0..1', ["aa", "aab"], ["a", "aabb"]),
        ('start: "a"' + "?" * 20, ["", "a"], ["aa"]),
        ('start: ["a"] ("b")', ["ab", "b"], ["a"]),
        ('start: "c".."c" "\\U0001f642" "\\U0010ffff" "\\u00e9" "\\x41"',
         ["c\U0001f642\U0010ffff\u00e9A"], ["d\U0001f642\U0010ffff\u00e9A"]),
        ('start: "\\x1f\\x20\\x7f\\x7e" "sS1"i', ["\x1f \x7f~ss1", "\x1f \x7f~SS1"], ["\x1f \x7f~ss2"]),
        # what goes too deep is left out where it may be missing
        ('start: "a" (other "b")?\nother: "(" start ")" | other "c" other', ["a"], ["b"]),
        ('start: "a" (other "b")~0..2\nother: other "c" other', ["a"], ["ab"]),
        ('start: "a" (other "b")*\nother: other "c" other', ["a"], ["ab"]),
        # names in capitals are terminals, in which nothing is ignored
        ('start: a B\na: "a" "a"\n_B: "b" "b"\nB: _B\n%ignore " "', ["aabb", " a a bb "], ["aab b"]),
    ],
    ids=range(15),
)  # fmt: skip
def test_parts_of_grammars(lark: str, fitting: list[str], others: list[str]) -> None:
    found = pattern_of_lark(lark).pattern
    assert is_regex(found)
    for text in fitting:
        assert re.fullmatch(found, text), text
    for text in others:
        assert not re.fullmatch(found, text), text


def test_controls_are_written_as_numbers() -> None:
    """All other characters as they are, or behind a backslash."""
    for code in range(128):
        found = pattern_of_lark(f'start: "\\x{code:02x}"').pattern
        assert re.fullmatch(found, chr(code)) and is_regex(found)
        assert found.isprintable()
        assert (len(found) == 4) is (code < 32 or code == 127)


def test_sizes_of_expressions() -> None:
    for size in (16_000, 16_001):
        for lark in (f'start: "{"a" * size}"', f'start: "{"a" * 8000}" "{"b" * (size - 8000)}"'):
            if size == 16_000:
                assert len(pattern_of_lark(lark).pattern) == size
            else:
                with pytest.raises(UnheldGrammarError, match="too large"):
                    pattern_of_lark(lark)
