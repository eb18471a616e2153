"""Texts of arguments that stand between marks without quotes, as terminals of llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from max._dataclass import dataclass
from max._host.process_caches import cached_results
from max.pipelines.structured.pattern_syntax import (
    BEGIN,
    Ahead,
    Characters,
    Choice,
    Part,
    PatternError,
    Repeat,
    read_pattern,
)
from max.pipelines.structured.validation import guarded, is_regex, kept_results, llguidance
from max.serve.chat.tools.arguments.alternatives import alternatives
from max.serve.chat.tools.arguments.number_texts import WORDS, number_patterns
from max.serve.chat.tools.values import typed_value, types_of

_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,6}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,6}D(T[0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?)?|T[0-9]{1,6}[HMS]|[0-9]{1,6}[YMW])",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}(:{_GROUP}){{0,2}})?::({_GROUP}(:{_GROUP}){{0,2}})?",
    "hostname": _HOST, "email": rf"[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}}){{0,3}}@{_HOST}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{1,16}}://{_HOST}(:[0-9]{{1,4}})?(/[a-zA-Z0-9._~!$&'()*+,;=:@-]*)*"
           r"(\?[a-zA-Z0-9._~!$&'()*+,;=:@/?-]*)?(#[a-zA-Z0-9._~!$&'()*+,;=:@/?-]*)?",
}  # fmt: skip
"""Patterns of texts that have a format; others may have it too."""
_ANY = r"[\s\S]*"
_TEXT_KEYWORDS = frozenset(("pattern", "format", "minLength", "maxLength"))
# what Python's `strip` takes off
_SPACE = (
    r"[\t-\r\x1c-\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]*"
)
_NUMBER = r"-?[0-9]+(\.[0-9]+)?"
_READINGS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": "-?[0-9]+",
    "number": rf"{_NUMBER}([eE][+-]?[0-9]+)?",
    "array": rf"[\[(]{_ANY}",
    "object": rf"[{{]{_ANY}",
}
"""Patterns of all texts that may be read as values of the types that are no texts, without white space around them."""
_CHANGED = rf"['\"]{_ANY}|NaN|-?Infinity|{_NUMBER}[eE][+-]?[0-9]{{3,}}"
"""Texts that lose their quotes, or the space around them, where a value need not be a text."""


@dataclass(frozen=True)
class ValueForms:
    """How a value that may be a text is written.

    Args:
        terminal: The terminal of the values that stand as they are; None: any text, empty: none.
        others: The schemas of those that are JSON.
        lacks: The keywords that these forms do not hold.
    """

    terminal: str | None
    others: tuple[dict[str, Any], ...] = ()
    lacks: tuple[str, ...] = ()


def value_forms(schema: Any, root: Mapping[str, Any], mark: str, tells_texts: bool) -> ValueForms:
    """The forms of a value that may be a text.

    Args:
        schema: Its schema.
        root: The schema that has its definitions.
        mark: What no text may have in it, as it ends there.
        tells_texts: Whether marks tell texts from other values; else what reads as JSON of an allowed type is that.
    """
    options = alternatives(schema, root)
    if options is None:
        return ValueForms(None, lacks=("all but the type",))
    writer = _FormWriter(types_of(schema, root), tells_texts)
    for option in options:
        writer.add(option)
    lacks = tuple(dict.fromkeys(writer.lacks))
    terms = writer.terms()
    if terms is None:
        # lists and objects that fit any schema are among the texts
        return ValueForms(None, tuple(writer.others) if tells_texts else (), lacks)
    if not terms:
        return ValueForms("", tuple(writer.others), lacks)
    terminal = f"({' | '.join(terms)}) & {without(mark)}"
    if not has_texts(terminal):
        return ValueForms(None, lacks=(*lacks, "what its texts are"))
    return ValueForms(terminal, tuple(writer.others), lacks)


class _FormWriter:
    """Collects the forms of a value.

    Args:
        types: The types as which its texts are read; empty: any.
        tells_texts: Whether marks tell texts from other values.
    """

    def __init__(self, types: frozenset[str], tells_texts: bool) -> None:
        self._tells_texts = tells_texts
        self._types = types
        self._texts: list[str] = []
        self._words: list[str] = []
        self._free: set[str] = set()
        self.others: list[dict[str, Any]] = []
        self.lacks: list[str] = []

    def terms(self) -> list[str] | None:
        """Expressions of which one matches each value that stands as it is; None if any text does."""
        read = (
            []
            if self._tells_texts or self._types == {"string"}
            else sorted(self._types or _READINGS)
        )
        held = [kind for kind in read if kind in _READINGS and kind not in self._free]
        takes_any = "" in self._texts
        if takes_any and not held:
            return None
        if not self._texts:
            return self._words
        # a text that reads as such a value would become one
        unlike = [_READINGS[kind] for kind in held]
        if read:
            # brackets may be around any value, and what begins like a list is left to the grammar of lists
            unlike.append(rf"\({_ANY}")
            unlike += [_READINGS[kind] for kind in ("array", "object") if kind in self._free]
        if read and not takes_any:
            unlike.append(_CHANGED)
        texts = f"({' | '.join(dict.fromkeys(filter(None, self._texts)))})" if not takes_any else ""
        either = "|".join(unlike)
        others = f"~{expression(f'{_SPACE}({either}){_SPACE}')}" if unlike else ""
        return [" & ".join(filter(None, (texts, others))), *self._words]

    def add(self, option: dict[str, Any]) -> None:
        """Adds the values of one of its alternatives.

        Args:
            option: The schema.
        """
        if "enum" in option:
            self._choices(option)
            return
        kinds = option.get("type", ("string", *_READINGS))
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind == "string":
                terms, lacks = text_terms(option)
                self.lacks += lacks
                self._texts.append(" & ".join(terms))
                continue
            own = {key: option[key] for key in option if key not in _TEXT_KEYWORDS}
            if not own.keys() - {"type"}:
                self._free |= {"integer", "number"} if kind == "number" else {kind}
            if self._tells_texts or kind in ("array", "object"):
                self.others.append({**own, "type": kind})
            elif kind in ("integer", "number"):
                patterns, lacks = number_patterns(own, kind == "integer")
                self._words.append(" & ".join(map(expression, patterns)))
                self.lacks += lacks
            else:
                self._words.append(expression(WORDS[kind]))

    def _choices(self, option: Mapping[str, Any]) -> None:
        for value in option["enum"]:
            if not isinstance(value, str) and self._tells_texts:
                self.others.append({"const": value})
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            # a value is held only where its text is read back as itself
            if self._tells_texts or typed_value(text, self._types) == value:
                self._words.append(json.dumps(text))
            else:
                self.lacks.append("enum")


def text_terms(schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Expressions that a text has to match as a whole, and the keywords that none holds.

    Args:
        schema: The schema of the text, one of :func:`max.serve.chat.tools.arguments.alternatives.alternatives`.
    """
    terms: list[str] = []
    lacks: list[str] = []
    patterns = schema.get("pattern", [])
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        whole = whole_pattern(pattern)
        terms += [expression(whole)] if whole is not None else []
        lacks += ["pattern"] if whole is None else []
    form = schema.get("format")
    if form in FORMATS:
        terms.append(expression(FORMATS[form]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        terms.append(expression(rf"[\s\S]{{{least},{most}}}"))
        if not is_regex(rf"[\s\S]{{{least},{most}}}") or (most != "" and least > most):
            terms.pop()
            lacks.append("minLength" if least else "maxLength")
    return terms, lacks


def expression(pattern: str) -> str:
    """A regular expression between slashes.

    Args:
        pattern: The expression.
    """
    # a slash may be escaped already
    text = re.sub(
        r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL
    )
    # a terminal is one line
    text = re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02x}", text)
    return f"/{text}/"


def without(mark: str) -> str:
    """The texts that do not have a mark in them.

    Args:
        mark: The mark.
    """
    return f"~{expression(_ANY + re.escape(mark) + _ANY)}"


@kept_results(512, longest=16 << 10)
def has_texts(terminal: str) -> bool:
    """Whether any text matches a terminal.

    Args:
        terminal: Its body.
    """
    return _has_texts(terminal)


@guarded
def _has_texts(terminal: str) -> bool:
    grammar = f"%llguidance {{}}\nstart: TEXT\nTEXT: {terminal}"
    matcher = llguidance().LLMatcher(_byte_tokens(), grammar, log_level=0)
    # where nothing goes on, the first mask fails
    return not matcher.is_error() and bool(matcher.compute_bitmask()) and not matcher.is_error()


@cached_results()
def _byte_tokens() -> Any:
    """A vocabulary of bytes."""
    return llguidance().LLTokenizer("byte")


@kept_results(1024, longest=16 << 10)
def whole_pattern(pattern: str) -> str | None:
    """An expression of the whole texts in which a pattern is found; None where there is none.

    Args:
        pattern: The pattern, in the syntax of grammars.
    """
    wholes: list[str] = []
    for each in _alternatives(pattern):
        begins = each.startswith("^")
        # not after an odd number of backslashes, which make it a plain sign
        ends = each.endswith("$") and (len(each) - len(each[:-1].rstrip("\\"))) % 2 == 1
        inner = each[begins : len(each) - ends]
        if _has_places(inner) or not is_regex(f"(?:{inner})"):
            return None
        wholes.append(f"{'' if begins else _ANY}(?:{inner}){'' if ends else _ANY}")
    return "|".join(wholes)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern that stand in no brackets."""
    found: list[list[str]] = [[]]
    depth, in_set = 0, False
    for match in re.finditer(r"\\[\s\S]|[\s\S]", pattern):
        part = match[0]
        if in_set:
            in_set = part != "]"
        elif part == "[":
            in_set = True
        elif part in "()":
            depth += 1 if part == "(" else -1
        elif part == "|" and not depth:
            found.append([])
            continue
        found[-1].append(part)
    return list(map("".join, found))


def _has_places(pattern: str) -> bool:
    """Whether a pattern has the begin or the end of a text, or something that is not read here."""
    try:
        left: list[Part] = [read_pattern(pattern)]
    except (PatternError, RecursionError):
        # classes of Unicode, flags: signs of places are then searched in the text
        bare = re.sub(r"\\[\s\S]|\[\^?\]?[^\]]*\]", "", pattern)
        return "^" in bare or "$" in bare or bool(re.search(r"\\[bBAzZ]", pattern))
    while left:
        match left.pop():
            case Characters(ranges):
                if any(high >= BEGIN for _, high in ranges):
                    return True
            case Ahead():
                return True
            case Repeat(part):
                left.append(part)
            case Choice(parts):
                left += parts
            case sequel:
                left += sequel.parts
    return False
