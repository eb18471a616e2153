"""Where our answer is meant to differ from the real system's, and why.

A rule covers the programs of its families that its patterns match; it must match at least one difference in
each of them, so that a rule without use fails. `docs/compatibility.md` lists the rules
(``python -m tests.differential.page`` writes them there).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One intended difference."""

    #: What differs, as the page says it.
    what: str
    reason: str
    families: tuple[str, ...]
    #: Regular expressions, searched in the program, the recorded answer and ours.
    program: str = ""
    there: str = ""
    here: str = ""

    def covers(self, family: str, program: str, there: list[str], here: str) -> bool:
        return (
            family in self.families
            and re.search(self.program, program) is not None
            and any(re.search(self.there, t) for t in there)
            and re.search(self.here, here) is not None
        )


_TYPES = ("graph_types",)
_ERROR = "^!"

GRAPH: tuple[Difference, ...] = (
    Difference(
        "`Dim(True)` is a TypeError",
        "a truth value is no size; 26.7 makes sizes such as 31657 of it",
        _TYPES,
        program=r"\bTrue\b",
        here="^!TypeError",
    ),
    Difference(
        "`3 // Dim(…)` works",
        "endless recursion there",
        _TYPES,
        program="//",
        there="!RecursionError",
    ),
    Difference(
        "`Dim(3) < text` is an error of the name",
        "a guard: a text that is no name of a dimension is refused wherever it stands",
        _TYPES,
        program=r"Dim\(.*\) < '",
        there="!TypeError",
        here="!ValueError",
    ),
    Difference(
        "a static `Dim` is an index and a `range` bound",
        "more than there: an error there",
        _TYPES,
        program=r"range\(Dim|50\]\[Dim",
        there=_ERROR,
    ),
    Difference(
        "a `Shape` plus any iterable is a `Shape`, and a `Shape` equals a tuple of its dims",
        "more than there: a list of mixed elements, an error or False there",
        _TYPES,
        program=r"^[^:]*: Shape\(.*\) (\+|==) ",
    ),
    Difference(
        "types take a `DType` and a device only",
        "a guard: the fault shows where it stands; there the type is made, and fails when it is used",
        _TYPES,
        program=r"Type\((dtype=)?('float32'|None|np\.float32|3),|Type\(\[2\], 'float32'",
        here="^!TypeError",
    ),
    Difference(
        "the device of a type may be left out: the CPU",
        "more than there: the reference's examples leave it out",
        _TYPES,
        program=r"TensorType\(\w+, [^)]*(\)|, None\)|\]\)\]?, None\)|'a'\]\), None\))",
        there=_ERROR,
    ),
    Difference(
        "each argument of a type is checked, in the order of the signature",
        "the device is looked at first there: an AttributeError",
        _TYPES,
        program=r"TensorType\(.*, 'cpu'\)$",
        there="!AttributeError",
        here="^!TypeError",
    ),
    Difference(
        "the dims of inputs are names and sizes; an expression of a name that no input has is an error",
        "a guard: nothing gives the name a value",
        _TYPES,
        program=r"Graph\('h', input_types=.*Dim\('a'\) \* 2|TensorValue\(Dim\('a'\)\)",
        here="^!ValueError",
    ),
    Difference(
        "a `TensorValue` has a hash and iterates over its first axis",
        "more than there: a TypeError there",
        _TYPES,
        program=r"iter\(x\)|hash\(x\)",
        there="!TypeError",
    ),
    Difference(
        "`TensorValue(…)` takes numbers and arrays",
        "more than there: a TypeError there",
        _TYPES,
        program=r"TensorValue\((3|2\.5|np\.ones.*|\[1, 2\])\)",
        there="!TypeError",
    ),
)

DIFFERENCES: tuple[Difference, ...] = (*GRAPH,)
