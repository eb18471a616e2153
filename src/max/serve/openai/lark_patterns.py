"""Grammars in Lark's syntax as regular expressions, for texts within JSON, where only expressions can be held.

A rule that refers to itself at the begin or the end of its alternatives is a repetition. Other recursion is unrolled to
a depth: what the expression matches, the grammar matches too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from max._dataclass import dataclass

_LONGEST = 65_536
"""The maximum number of characters of a grammar."""
_MOST_CHARACTERS = 16_000
_MOST_NODES = 20_000
"""Of the expression of a depth; deeper ones are longer."""
_MOST_DEPTH = 3
_MOST_NESTED = 100
_MOST_TIMES = 1000

_TOKENS = re.compile(
    r"""(?P<space>[ \t\f]+|(?://|\#)[^\n]*)
    |(?P<line>\r?\n)
    |(?P<name>[!?]*_*[a-zA-Z][_a-zA-Z0-9]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<number>[0-9]+)
    |(?P<directive>%[a-z]+)
    |(?P<sign>->|\.\.|[-:|()\[\]?*+~.,{}])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_SIGNS = frozenset("\\.+*?()|[]{}^$-")
_INT = "[0-9]+"
_EXPONENT = "[eE][+-]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = f"(?:{_INT}{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": _INT, "SIGNED_INT": f"[+-]?{_INT}", "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT, "SIGNED_FLOAT": f"[+-]?{_FLOAT}", "NUMBER": f"(?:{_FLOAT}|{_INT})",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}  # fmt: skip


class LarkError(ValueError):
    """A grammar is wrong."""


class UnheldGrammarError(ValueError):
    """A grammar has something that no expression holds here."""


class LarkPattern(NamedTuple):
    """The expression of a grammar.

    Args:
        pattern: The expression.
        depth: How often a rule may stand within itself; None: as often as the grammar says.
    """

    pattern: str
    depth: int | None


@dataclass(frozen=True)
class _Text:
    """What an expression matches."""

    pattern: str


@dataclass(frozen=True)
class _Name:
    """What a rule or a terminal matches."""

    name: str


@dataclass(frozen=True)
class _Sequel:
    """Parts, one after the other."""

    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Choice:
    """One of some parts."""

    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Repeat:
    """A part, some times; ``times`` is the sign of an expression."""

    part: _Part
    times: str


_Part: TypeAlias = "_Text | _Name | _Sequel | _Choice | _Repeat"


def pattern_of_lark(text: str) -> LarkPattern:
    """The regular expression of a grammar whose first rule is ``start``.

    Args:
        text: The grammar.

    Raises:
        LarkError: The grammar is wrong.
        UnheldGrammarError: It has templates, other imports than common terminals, flags, or is too large.
    """
    if len(text) > _LONGEST:
        raise UnheldGrammarError("it is too long")
    reader = _Reader(text)
    reader.read()
    # such recursion needs no depth: it is unlimited as a repetition
    rules = {name: _without_ends(name, part) for name, part in reader.rules.items()}
    unheld = UnheldGrammarError("its rules stand within themselves without an end")
    # the deepest that is not too large
    for depth in range(_MOST_DEPTH, -1, -1):
        try:
            writer = _Writer(rules, reader.ignored_parts, depth)
            pattern = writer.write(_Name("start"), False)
        except UnheldGrammarError as error:
            unheld = error
            continue
        if pattern is not None:
            return LarkPattern(writer.ignored + pattern, depth if writer.cut else None)
    raise unheld


def _without_ends(name: str, part: _Part) -> _Part:
    """A rule without references to itself at the begin, or at the end, of alternatives."""
    own = _Name(name)
    # that a rule may be itself says nothing
    choices = [e for e in (part.parts if isinstance(part, _Choice) else (part,)) if e != own]
    sequels = [each.parts if isinstance(each, _Sequel) else (each,) for each in choices]
    # `a: a x | y` is `y x*`, and `a: x a | y` is `x* y`
    for at in (0, -1):
        further = [each for each in sequels if each and each[at] == own]
        rest = [each for each in sequels if not each or each[at] != own]
        if not further:
            continue
        inner = tuple(_Sequel(each[1:] if at == 0 else each[:-1]) for each in further)
        first, more = _Choice(tuple(map(_Sequel, rest))), _Repeat(_Choice(inner), "*")
        return _Sequel((first, more) if at == 0 else (more, first))
    return choices.pop() if len(choices) == 1 else _Choice(tuple(choices))


class _Reader:
    """Reads a grammar from left to right."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, _Part] = {}
        self.ignored_parts: list[_Part] = []
        self._tokens: list[tuple[str, str]] = []
        at, nested = 0, 0
        while at < len(text):
            match = _TOKENS.match(text, at)
            if match is None:
                raise LarkError(f"{text[at : at + 20]!r} is no part of a grammar")
            kind, value, at = str(match.lastgroup), match.group(), match.end()
            # marks within quotes are part of their text token
            nested += (value in ("(", "[")) - (value in (")", "]"))
            # lines end nothing in brackets
            if kind != "space" and not (kind == "line" and nested > 0):
                self._tokens.append((kind, value))
        self._at, self._nested = 0, 0

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, value: str) -> bool:
        found = self._peek()[1] == value
        self._at += found
        return found

    def _skip_lines(self) -> None:
        while self._peek()[0] == "line":
            self._at += 1

    def _expect(self, value: str) -> None:
        if not self._take(value):
            raise LarkError(f"{value!r} is missing before {self._peek()[1]!r}")

    def read(self) -> None:
        """Reads all rules."""
        self._skip_lines()
        while self._peek()[0] != "end":
            kind, value = self._next()
            if kind == "directive":
                self._directive(value)
            elif kind == "name":
                self._rule(value)
            else:
                raise LarkError(f"{value!r} begins no rule")
            if self._peek()[0] not in ("line", "end"):
                raise LarkError(f"{self._peek()[1]!r} does not end a rule")
            self._skip_lines()

    def _directive(self, name: str) -> None:
        if name == "%ignore":
            self.ignored_parts.append(self._choice())
        elif name == "%import":
            module = self._next()[1]
            self._take(".")
            names = [self._next()[1]] if self._peek()[0] == "name" else self._names()
            # one name may be renamed; several keep theirs
            new = self._next()[1] if self._take("->") else names[0]
            for each in names:
                if module != "common" or each not in _COMMON:
                    raise UnheldGrammarError(f"it imports {module}.{each}")
                self.rules[new if len(names) == 1 else each] = _Text(_COMMON[each])
        else:
            raise UnheldGrammarError(f"it has {name}")

    def _names(self) -> list[str]:
        self._expect("(")
        names = [self._next()[1]]
        while self._take(","):
            names.append(self._next()[1])
        self._expect(")")
        return names

    def _rule(self, name: str) -> None:
        if self._peek()[1] == "{":
            raise UnheldGrammarError("it has templates")
        # a priority, which changes no text
        if self._take("."):
            self._take("-")
            self._next()
        self._expect(":")
        # Lark's signs for the shape of its tree; the text is the same
        name = name.lstrip("!?")
        if name in self.rules:
            raise LarkError(f"there are two rules named {name}")
        self.rules[name] = self._choice()

    def _choice(self) -> _Part:
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise UnheldGrammarError("it nests too deeply")
        parts = [self._sequel()]
        while True:
            ahead = 0
            # an alternative may begin on a later line
            while self._peek(ahead)[0] == "line":
                ahead += 1
            if self._peek(ahead) != ("sign", "|"):
                break
            self._at += ahead + 1
            self._skip_lines()
            parts.append(self._sequel())
        self._nested -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequel(self) -> _Part:
        parts: list[_Part] = []
        while self._peek()[0] in ("name", "text", "pattern") or self._peek()[1] in ("(", "["):
            parts.append(self._repetition())
        # an alias names the alternative in Lark's tree
        if self._take("->"):
            self._next()
        return parts[0] if len(parts) == 1 else _Sequel(tuple(parts))

    def _repetition(self) -> _Part:
        part, signs = self._atom(), 0
        while self._peek()[1] in ("?", "*", "+", "~"):
            sign, signs = self._next()[1], signs + 1
            if signs > _MOST_NESTED:
                raise UnheldGrammarError("it nests too deeply")
            if sign == "~":
                least = self._times()
                most = self._times() if self._take("..") else least
                if least > most:
                    raise LarkError(f"~ {least}..{most} has more at first")
                sign = f"{{{least},{most}}}"
            part = _Repeat(part, sign)
        return part

    def _times(self) -> int:
        kind, value = self._next()
        if kind != "number":
            raise LarkError(f"{value!r} is no number")
        # longer numbers are not read
        if len(value) > len(str(_MOST_TIMES)) or int(value) > _MOST_TIMES:
            raise UnheldGrammarError(f"it repeats more than {_MOST_TIMES} times")
        return int(value)

    def _atom(self) -> _Part:
        kind, value = self._next()
        if kind == "name":
            if self._peek()[1] == "{":
                raise UnheldGrammarError("it has templates")
            return _Name(value)
        if kind == "text":
            if not self._take(".."):
                return _Text(_literal(value))
            kind, last = self._next()
            if kind != "text":
                raise LarkError(f"{value}.. has no last character")
            low, high = _content(value), _content(last)
            if len(low) != 1 or len(high) != 1 or low > high:
                raise LarkError(f"{value} begins no range of characters")
            return _Text(f"[{_escape(low)}-{_escape(high)}]")
        if kind == "pattern":
            body, _, flags = value[1:].rpartition("/")
            if flags:
                raise UnheldGrammarError(f"an expression has flags ({flags})")
            # slashes are escaped only between slashes
            return _Text(f"(?:{body})".replace("\\/", "/"))
        part = self._choice()
        self._expect(")" if value == "(" else "]")
        # in Lark's syntax brackets are optional
        return part if value == "(" else _Repeat(part, "?")


def _content(text: str) -> str:
    """The characters of a text in quotes."""
    if not text.endswith('"'):
        raise UnheldGrammarError(f"{text} ignores the case of a range")

    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code:
            if int(code, 16) > 0x10FFFF:
                raise LarkError(f"{match[0]} is no character")
            return chr(int(code, 16))
        if match[4].isalnum() and match[4] not in _CONTROLS:
            raise LarkError(f"{match[0]} is no escape")
        return _CONTROLS.get(match[4], match[4])

    return _ESCAPE.sub(character, text[1:-1])


def _literal(text: str) -> str:
    """The expression of a text in quotes."""
    characters = _content(text.removesuffix("i"))
    if not text.endswith("i"):
        return "".join(map(_escape, characters))
    # upper() of some letters has two, which a set of characters cannot hold
    forms = ({c, c.lower(), c.upper()} for c in characters)
    return "".join(
        _escape(next(iter(own)))
        if len(own) == 1
        else f"[{''.join(sorted(_escape(c) for c in own if len(c) == 1))}]"
        for own in forms
    )


def _escape(character: str) -> str:
    # escaped, other signs may have a meaning, such as that of the begin of a word
    if character in _SIGNS:
        return f"\\{character}"
    code = ord(character)
    return f"\\x{code:02x}" if code < 32 or code == 127 else character


class _Writer:
    """Writes the expression of rules.

    Args:
        rules: The rules and terminals.
        ignored_parts: What may stand between terminals.
        depth: How often a rule may stand within itself.

    Raises:
        UnheldGrammarError: The expression of what is ignored is too large.
        LarkError: The grammar has no rule of a name.
    """

    def __init__(self, rules: dict[str, _Part], ignored_parts: Sequence[_Part], depth: int) -> None:
        self._rules, self._depth = rules, depth
        self._open: dict[str, int] = {}
        self._left, self._nested = _MOST_NODES, 0
        self.cut = False
        """Whether the grammar goes deeper."""
        ignored = _Repeat(_Choice(tuple(ignored_parts)), "?")
        self.ignored = (self.write(ignored, True) or "") if ignored_parts else ""
        """What may stand between terminals, once."""

    def write(self, part: _Part, is_terminal: bool) -> str | None:
        """The expression of a part; None if it goes too deep.

        Args:
            part: The part.
            is_terminal: Whether it is a part of a terminal, in which nothing is ignored.

        Raises:
            UnheldGrammarError: The expression is too large.
            LarkError: The grammar has no rule of a name.
        """
        # nested rules are written at each use, so the size may grow with a power of the depth
        self._left, self._nested = self._left - 1, self._nested + 1
        if self._left < 0 or self._nested > _MOST_NESTED:
            raise UnheldGrammarError("it is too large")
        found: str | None
        match part:
            case _Text(pattern):
                found = pattern if is_terminal else pattern + self.ignored
            case _Name(name):
                found = self._name(name, is_terminal)
            case _Sequel(parts):
                whole = self._write_all(parts, is_terminal)
                found = "".join(whole) if len(whole) == len(parts) else None
            case _Choice(parts):
                whole = self._write_all(parts, is_terminal)
                found = f"(?:{'|'.join(whole)})" if whole else None
            case _Repeat(inner, times):
                text = self.write(inner, is_terminal)
                if text is None:
                    # a part that goes too deep may still occur no time
                    found = "" if times in ("?", "*") or times.startswith("{0,") else None
                else:
                    found = f"(?:{text}){times}"
        self._nested -= 1
        if found is not None and len(found) > _MOST_CHARACTERS:
            raise UnheldGrammarError("it is too large")
        return found

    def _write_all(self, parts: Sequence[_Part], is_terminal: bool) -> list[str]:
        """The expressions of the parts that do not go too deep."""
        found: list[str] = []
        size = 0
        for each in parts:
            text = self.write(each, is_terminal)
            if text is not None:
                found.append(text)
                size += len(text)
            # before more of them are held
            if size > _MOST_CHARACTERS:
                raise UnheldGrammarError("it is too large")
        return found

    def _name(self, name: str, is_terminal: bool) -> str | None:
        if name not in self._rules:
            raise LarkError(f"there is no rule named {name}")
        # one use more than the depth of recursion
        if self._open.get(name, 0) > self._depth:
            self.cut = True
            return None
        self._open[name] = self._open.get(name, 0) + 1
        # in Lark's syntax capitals name terminals, in which nothing is ignored
        own = is_terminal or name.lstrip("_").isupper()
        found = self.write(self._rules[name], own)
        self._open[name] -= 1
        if found is None or is_terminal or not own:
            return found
        return f"(?:{found}){self.ignored}"
