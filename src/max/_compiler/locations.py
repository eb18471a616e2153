"""Source locations through compilation: passes carry the number of the staged op, errors print its file and line.

Locations are not part of a program's key on disk, so that a moved line recompiles nothing. The compiler therefore
keeps the op's number in the staged module; the session that loads the program looks the location up in the module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from max import mlir

__all__ = ["SourceLocations", "number_ops", "staged_op_of"]

_SCOPE = re.compile(r":\d+ \[(.*)\]$")
_NUMBERED = "<staged op>"
"""The file name of locations that hold a number; compared by identity."""


def number_ops(module: mlir.ModuleOp) -> None:
    """Replaces the location of each op by its number in the module. Passes copy locations to the ops they create."""
    for number, op in enumerate(mlir.walk(module)):
        op.location = mlir.line_location(_NUMBERED, number)


def staged_op_of(op: mlir.Operation) -> int:
    """The number of the staged op that an op comes from; -1 if unknown.

    A region takes the number of its first op that can raise, else that of its last op.
    """
    location = op.location
    # by identity: a file of the user may have the same name
    if isinstance(location, mlir.FileLineColLoc) and location.filename is _NUMBERED:
        return location.data[1]
    numbers = [
        (staged_op_of(inner), isinstance(inner, mlir.MoOp) and inner.spec.may_raise)
        for inner in op.walk()
        if inner is not op
    ]
    numbered = [(number, raises) for number, raises in numbers if number >= 0]
    last = numbered[-1][0] if numbered else -1
    return next((number for number, raises in numbered if raises), last)


class SourceLocations:
    """The locations of a staged module's ops. They are formatted when an error needs them, not at each load.

    Args:
        locations: By op number: a text of `describe`, an attribute, or None.
    """

    def __init__(self, locations: Sequence[mlir.Attribute | str | None] = ()) -> None:
        self._locations = locations

    @classmethod
    def of(cls, module: mlir.ModuleOp) -> SourceLocations:
        """The locations of a module's ops."""
        return cls([op.location for op in mlir.walk(module)])

    def texts(self) -> list[str]:
        """The text of each op by its number."""
        return [self.describe(number) for number in range(len(self._locations))]

    def describe(self, op_number: int) -> str:
        """``file:line`` of an op, with the scope of a profile ``file:line [scope]``.

        Empty if the op has no location (a saved graph) or the number is unknown.
        """
        location = self._locations[op_number] if 0 <= op_number < len(self._locations) else None
        if location is None:  # without the import of the dialect, which a warm start does not need
            return ""
        if isinstance(location, str):
            return location
        if not isinstance(location, mlir.FileLineColLoc):
            return ""
        scope = f" [{location.scope}]" if location.scope else ""
        return f"{location.filename}:{location.line}{scope}"

    def scope(self, op_number: int) -> str:
        """The scope of a profile that an op is in; empty if it is in none."""
        match = _SCOPE.search(self.describe(op_number))
        return match[1] if match else ""
