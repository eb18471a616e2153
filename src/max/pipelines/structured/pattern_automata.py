"""Automata of patterns: the texts that fit no pattern, or fit one with look-ahead, as patterns without these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.pipelines.structured.pattern_syntax import (
    ANY,
    BEGIN,
    END,
    LAST,
    Ahead,
    Characters,
    Choice,
    Part,
    PatternError,
    Ranges,
    Repeat,
    Sequel,
    merge_ranges,
    read_pattern,
)
from max.pipelines.structured.validation import is_regex, kept_results

_MOST_NODES = 2000
_MOST_STATES = 160
_MOST_LEFT = 32
"""The maximum number of states that are written as a pattern."""
_LONGEST = 6000
_MOST_WORK = 30_000
"""The maximum number of nodes that are looked at, 30 ms of work."""
MOST_AUTOMATA = 100
"""The maximum number of automata for one schema."""


@kept_results(512, longest=1024)
def unlike_pattern(pattern: str) -> str | None:
    """A pattern of the texts that do not fit another; None if there is none of a fair length.

    Args:
        pattern: The other.
    """
    return _pattern_text(lambda: _product([read_pattern(pattern)], lambda fits: not fits[0]))


@kept_results(512, longest=1024)
def without_ahead(pattern: str) -> str | None:
    """A pattern that begins with look-ahead, such as ``^(?!a)b``, without it; None if there is none of a fair length.

    Args:
        pattern: The pattern.
    """

    def automaton() -> _Automaton:
        part = read_pattern(pattern)
        parts = part.parts if isinstance(part, Sequel) else (part,)
        begin = Characters(((BEGIN, BEGIN),))
        if parts[:1] != (begin,):
            raise PatternError("it does not begin with ^")
        count = 1
        while count < len(parts) and isinstance(parts[count], Ahead):
            count += 1
        aheads = [each for each in parts[1:count] if isinstance(each, Ahead)]
        patterns = [
            Sequel((begin, *parts[count:])),
            *(Sequel((begin, each.part)) for each in aheads),
        ]
        wanted = (True, *(each.fits for each in aheads))
        return _product(patterns, lambda fits: fits == wanted)

    return _pattern_text(automaton)


def other_texts(texts: Sequence[str]) -> str | None:
    """A pattern of all texts but a few.

    Args:
        texts: The others.
    """
    parts = [Sequel(tuple(Characters(((ord(c), ord(c)),)) for c in text)) for text in texts]
    begin, end = Characters(((BEGIN, BEGIN),)), Characters(((END, END),))
    whole = Sequel((begin, Choice(tuple(parts)), end))
    return _pattern_text(lambda: _product([whole], lambda fits: not fits[0]))


class TooMuchWorkError(Exception):
    """What was asked for takes more work than is allowed."""


class PatternSearch:
    """Looks for patterns in texts, in time that grows with the texts: `re` tries the ways to repeat parts one after
    another.

    Args:
        most_work: The work for all texts together, in nodes of automata; 1000 take about a millisecond.
    """

    def __init__(self, most_work: int) -> None:
        self._left = most_work
        self._machines: dict[str, _Nodes | None] = {}
        self._known: dict[tuple[str, frozenset[int], int], frozenset[int]] = {}

    def finds(self, pattern: str, text: str) -> bool | None:
        """Whether a part of a text fits a pattern; None: the pattern has another syntax than is read here.

        Args:
            pattern: The pattern.
            text: The text.

        Raises:
            TooMuchWorkError: The work for all texts is over its limit.
        """
        if pattern not in self._machines:
            self._machines[pattern] = machine = _machine_of(pattern)
            self._left -= 0 if machine is None else len(machine.steps)
        machine = self._machines[pattern]
        if machine is None:
            return None
        # a character whose step is known takes a look-up
        self._left -= len(text) // 8
        nodes = machine.empty_closure({machine.first})
        for code in (BEGIN, *map(ord, text), END):
            if self._left <= 0:
                raise TooMuchWorkError(pattern)
            key = pattern, nodes, code
            # few sets of nodes come again and again
            following = self._known.get(key)
            if following is None:
                self._left -= len(nodes) + 1
                following = self._known[key] = machine.step(nodes, code)
            nodes = following
        return machine.last in nodes


@kept_results(512, longest=1024)
def _part_of(pattern: str) -> Part | None:
    """A pattern without look-ahead; None: it has another syntax than is read here."""
    try:
        part = read_pattern(pattern)
        if _has_ahead(part):
            plain = without_ahead(pattern)
            return None if plain is None else read_pattern(plain)
    except (PatternError, RecursionError):
        return None
    return part


def _has_ahead(part: Part) -> bool:
    match part:
        case Ahead():
            return True
        case Sequel(parts) | Choice(parts):
            return any(map(_has_ahead, parts))
        case Repeat(inner):
            return _has_ahead(inner)
        case _:
            return False


def _machine_of(pattern: str) -> _Nodes | None:
    part = _part_of(pattern)
    try:
        return None if part is None else _Nodes(part)
    except (PatternError, RecursionError):
        return None


def _pattern_text(make: Callable[[], _Automaton]) -> str | None:
    try:
        pattern = make().smallest().pattern()
    except (PatternError, RecursionError):
        return None
    return pattern if is_regex(pattern) else None


class _Nodes:
    """A nondeterministic automaton that finds a part anywhere in a text between the signs of its begin and end."""

    def __init__(self, part: Part) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []
        self._work = 0
        self.first, self.last = self._node(), self._node()
        every: Ranges = ((0, END),)
        # anything may stand before the part, and after it
        self.steps[self.first].append((every, self.first))
        self.steps[self.last].append((every, self.last))
        start, end = self._of(part)
        self.free[self.first].append(start)
        self.free[end].append(self.last)

    def _node(self) -> int:
        self.steps.append([])
        self.free.append([])
        if len(self.steps) > _MOST_NODES:
            raise PatternError("the pattern is too large")
        return len(self.steps) - 1

    def _of(self, part: Part) -> tuple[int, int]:
        """The nodes before and after a part."""
        match part:
            case Characters(ranges):
                start, end = self._node(), self._node()
                self.steps[start].append((ranges, end))
                return start, end
            case Sequel(parts):
                start = end = self._node()
                for each in parts:
                    first, last = self._of(each)
                    self.free[end].append(first)
                    end = last
                return start, end
            case Choice(parts):
                start, end = self._node(), self._node()
                for each in parts:
                    first, last = self._of(each)
                    self.free[start].append(first)
                    self.free[last].append(end)
                return start, end
            case Repeat(inner, least, most):
                start = end = self._node()
                out = self._node()
                # written out: automata do not count
                for count in range(least if most is None else most):
                    if count >= least:
                        self.free[end].append(out)
                    first, last = self._of(inner)
                    self.free[end].append(first)
                    end = last
                if most is None:
                    first, last = self._of(inner)
                    again = self._node()
                    self.free[end].append(again)
                    self.free[again].append(first)
                    self.free[last].append(again)
                    end = again
                self.free[end].append(out)
                return start, out
            case Ahead():
                raise PatternError("look-ahead within the pattern")

    def empty_closure(self, nodes: set[int]) -> frozenset[int]:
        """Some nodes, and those that need no character from there."""
        left = list(nodes)
        while left:
            for each in self.free[left.pop()]:
                if each not in nodes:
                    nodes.add(each)
                    left.append(each)
        return frozenset(nodes)

    def after(self, nodes: frozenset[int], code: int) -> frozenset[int]:
        """The nodes after a character."""
        self._work += len(nodes) + 1
        if self._work > _MOST_WORK:
            raise PatternError("the pattern takes too long")
        return self.step(nodes, code)

    def step(self, nodes: frozenset[int], code: int) -> frozenset[int]:
        """The nodes after a character, however much work there was."""
        return self.empty_closure(
            {
                target
                for node in nodes
                for ranges, target in self.steps[node]
                if any(low <= code <= high for low, high in ranges)
            }
        )


def _product(parts: Sequence[Part], accepts: Callable[[tuple[bool, ...]], bool]) -> _Automaton:
    """The automaton of texts, by which of some patterns they fit."""
    machines = [_Nodes(part) for part in parts]
    borders = {0, LAST + 1}
    for machine in machines:
        for steps in machine.steps:
            for ranges, _ in steps:
                borders |= {low for low, _ in ranges} | {high + 1 for _, high in ranges}
    edges = sorted(each for each in borders if each <= LAST + 1)
    # characters that no step tells apart: one of each class stands for all
    classes = [(low, high - 1) for low, high in zip(edges, edges[1:], strict=False)]

    def after(state: tuple[frozenset[int], ...], code: int) -> tuple[frozenset[int], ...]:
        pairs = zip(machines, state, strict=True)
        return tuple(machine.after(nodes, code) for machine, nodes in pairs)

    state = after(tuple(machine.empty_closure({machine.first}) for machine in machines), BEGIN)
    numbers, rows, accepting = {state: 0}, list[list[int]](), list[bool]()
    queue = [state]
    for state in queue:
        ended = after(state, END)
        found = tuple(m.last in nodes for m, nodes in zip(machines, ended, strict=True))
        accepting.append(accepts(found))
        row: list[int] = []
        for low, _ in classes:
            following = after(state, low)
            if following not in numbers:
                numbers[following] = len(numbers)
                queue.append(following)
            row.append(numbers[following])
        rows.append(row)
        if len(numbers) > _MOST_STATES:
            raise PatternError("the pattern has too many states")
    return _Automaton(classes, rows, accepting)


class _Automaton:
    """A deterministic automaton, which begins in state 0.

    Args:
        classes: Ranges of characters that it does not tell apart.
        rows: For each state, that after a character of each class.
        accepting: Whether a text may end in each state.
    """

    def __init__(
        self, classes: list[tuple[int, int]], rows: list[list[int]], accepting: list[bool]
    ) -> None:
        self._classes, self._rows, self._accepting = classes, rows, accepting

    def smallest(self) -> _Automaton:
        """The automaton of the same texts with the fewest states."""
        kinds = [int(each) for each in self._accepting]
        while True:
            signs = [(kinds[n], *(kinds[each] for each in row)) for n, row in enumerate(self._rows)]
            numbers: dict[tuple[int, ...], int] = {}
            made = [numbers.setdefault(sign, len(numbers)) for sign in signs]
            # Moore's algorithm: kinds are split until none has states that lead to different kinds
            if len(numbers) == len(set(kinds)):
                break
            kinds = made
        # the first of each kind, in the order of their numbers: state 0 stays so
        first = {kind: n for n, kind in reversed(list(enumerate(made)))}
        order = [first[kind] for kind in range(len(numbers))]
        rows = [[made[each] for each in self._rows[n]] for n in order]
        return _Automaton(self._classes, rows, [self._accepting[n] for n in order])

    def pattern(self) -> str:
        """The pattern of all its texts.

        Raises:
            PatternError: It is too long, or there are no texts.
        """
        size = len(self._rows)
        if size > _MOST_LEFT:
            raise PatternError("the pattern has too many states")
        # one more state for the end
        paths: dict[tuple[int, int], str] = {}
        for source, row in enumerate(self._rows):
            for target in set(row):
                ranges = [c for c, each in zip(self._classes, row, strict=True) if each == target]
                paths[source, target] = _class_text(merge_ranges(ranges))
            if self._accepting[source]:
                paths[source, size] = ""
        # states are left out one by one, and paths through them become expressions (Kleene)
        left = set(range(1, size))
        while left:
            # the state that makes the fewest new paths is left out next
            state = min(left, key=lambda each: (_degree(paths, each), each))
            left.discard(state)
            _leave_out(paths, state)
            if sum(map(len, paths.values())) > _LONGEST:
                raise PatternError("the pattern is too long")
        again = paths.get((0, 0))
        if (0, size) not in paths:
            raise PatternError("no text fits")
        repeated = "" if again is None else f"({again})*"
        return f"^({repeated}({paths[0, size]}))$"


def _degree(paths: dict[tuple[int, int], str], state: int) -> int:
    into = sum(target == state != source for source, target in paths)
    return into * sum(source == state != target for source, target in paths)


def _leave_out(paths: dict[tuple[int, int], str], state: int) -> None:
    """Replaces the paths through a state."""
    again = paths.pop((state, state), None)
    middle = "" if again is None else f"({again})*"
    into = [(source, text) for (source, target), text in paths.items() if target == state]
    out = [(target, text) for (source, target), text in paths.items() if source == state]
    for source, _ in into:
        del paths[source, state]
    for target, _ in out:
        del paths[state, target]
    for source, before in into:
        for target, after in out:
            text = _in_group(before) + middle + _in_group(after)
            known = paths.get((source, target))
            paths[source, target] = text if known is None else f"{known}|{text}"


def _in_group(text: str) -> str:
    return f"({text})" if "|" in text else text


def _class_text(ranges: Ranges) -> str:
    """A set of characters as part of a pattern."""
    if ranges == ANY:
        return r"[\s\S]"
    return (
        "["
        + "".join(
            _char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges
        )
        + "]"
    )


def _char(code: int) -> str:
    # Rust and Python both take \x of two digits, Rust alone \x of more in braces
    sign = chr(code)
    return (
        sign
        if sign.isascii() and sign.isalnum()
        else f"\\x{code:02X}"
        if code < 256
        else f"\\x{{{code:X}}}"
    )
