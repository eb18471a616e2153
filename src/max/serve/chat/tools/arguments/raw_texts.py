"""Texts of arguments that stand between marks without quotes, as terminals of llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from max._dataclass import dataclass
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
from max.pipelines.structured.schema_check import misfit
from max.pipelines.structured.validation import guarded, is_regex, kept_results, llguidance
from max.serve.chat.tools.arguments.alternatives import alternatives
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
_INTEGER = "-?(0|[1-9][0-9]{0,15})"
_WORDS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]{{1,16}})?([eE][+-]?[0-9]{{1,3}})?",
}
_TEXT_KEYWORDS = frozenset(("pattern", "format", "minLength", "maxLength"))
LIMITS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
"""Keywords of numbers."""


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
    if writer.takes_any:
        # lists and objects that fit any schema are among the texts
        if tells_texts or all(each.keys() <= {"type"} for each in writer.others):
            return ValueForms(None, tuple(writer.others) if tells_texts else (), lacks)
        writer.terms = [writer.unlike(("[", "{"))]
    if not writer.terms:
        return ValueForms("", tuple(writer.others), lacks)
    terminal = f"({' | '.join(writer.terms)}) & {without(mark)}"
    if not has_texts(terminal):
        return ValueForms(None, lacks=(*lacks, "what its texts are"))
    return ValueForms(terminal, tuple(writer.others), lacks)


class _FormWriter:
    """Collects the forms of a value.

    Args:
        types: The types that it may have.
        tells_texts: Whether marks tell texts from other values.
    """

    def __init__(self, types: frozenset[str], tells_texts: bool) -> None:
        self._types, self._tells_texts = types, tells_texts
        self.terms: list[str] = []
        self.others: list[dict[str, Any]] = []
        self.lacks: list[str] = []
        self.takes_any = False

    def add(self, option: dict[str, Any]) -> None:
        """Adds the values of one of its alternatives.

        Args:
            option: The schema.
        """
        if "enum" in option:
            self._choices(option)
            return
        kinds = option.get("type", "string" if option.keys() & _TEXT_KEYWORDS else [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "string" in kinds or not kinds:
            terms, lacks = text_terms(option)
            self.lacks += lacks
            self.takes_any |= not terms
            if terms and self._types != {"string"} and not self._tells_texts:
                starts = ("[",) * ("array" in self._types) + ("{",) * ("object" in self._types)
                terms.append(self.unlike(starts))
            self.terms += [" & ".join(terms)] if terms else []
        for kind in kinds:
            if kind == "string":
                continue
            own = {key: option[key] for key in option if key not in _TEXT_KEYWORDS}
            if self._tells_texts or kind not in _WORDS:
                self.others.append({**own, "type": kind})
            else:
                self.terms.append(expression(_WORDS[kind]))
                self.lacks += sorted(own.keys() & LIMITS)

    def unlike(self, starts: Sequence[str]) -> str:
        """The texts that are not read as something else, if that may begin with some characters.

        Args:
            starts: These characters, beside quotes.
        """
        # texts in quotes lose them where a value need not be a text
        characters = re.escape("".join(("'", '"', "(", *starts)))
        begin = rf"[ \t\r\n]*[{characters}]"
        return f"~{expression(begin + _ANY)}"

    def _choices(self, option: Mapping[str, Any]) -> None:
        rest = {key: option[key] for key in option if key not in ("enum", "pattern")}
        for value in option["enum"]:
            if misfit(value, rest) is not None:
                continue
            if not isinstance(value, str) and self._tells_texts:
                self.others.append({"const": value})
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if self._tells_texts or typed_value(text, self._types) == value:
                self.terms.append(json.dumps(text))
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


_TOKENS: list[Any] = []


def _byte_tokens() -> Any:
    """A vocabulary of bytes."""
    if not _TOKENS:
        _TOKENS.append(llguidance().LLTokenizer("byte"))
    return _TOKENS[0]


@kept_results(1024, longest=16 << 10)
def whole_pattern(pattern: str) -> str | None:
    """An expression of the whole texts in which a pattern is found; None where there is none.

    Args:
        pattern: The pattern, in the syntax of grammars.
    """
    wholes: list[str] = []
    for each in _alternatives(pattern):
        begins = each.startswith("^")
        ends = each.endswith("$") and (len(each) - len(each[:-1].rstrip("\\"))) % 2 == 1
        inner = each[begins : len(each) - ends]
        if _has_places(inner) or not is_regex(f"(?:{inner})"):
            return None
        wholes.append(f"{'' if begins else _ANY}(?:{inner}){'' if ends else _ANY}")
    return "|".join(wholes)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern that stand in no brackets."""
    found, depth, in_set = [""], 0, False
    for match in re.finditer(r"\\[\s\S]|[\s\S]", pattern):
        part = match[0]
        if in_set:
            in_set = part != "]"
        elif part == "[":
            in_set = True
        elif part in "()":
            depth += 1 if part == "(" else -1
        elif part == "|" and not depth:
            found.append("")
            continue
        found[-1] += part
    return found


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
