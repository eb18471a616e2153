"""Where ops come from, through compilation: passes see the number of the staged op, errors its file and line.

The places of a program are not part of its key on disk, so that a moved line compiles nothing anew. The compiler
therefore works with the op's number in the staged module; whoever loads the program has the module, and the places.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import FileLineColLoc, IntAttr, ModuleOp, StringAttr
from xdsl.ir import Operation

from max.mlir import walk

__all__ = ["number_sites", "site_of", "sites_of"]

_SITE = StringAttr("")
_RAISING = frozenset({"mo.gather", "mo.gather_nd", "mo.div", "mo.mod"})
"""Ops in regions whose kernels raise for some values of their operands."""


def number_sites(module: ModuleOp) -> None:
    """Makes the location of each op its number in the module; passes hand locations on."""
    column = IntAttr(0)
    for number, op in enumerate(walk(module)):
        op.location = FileLineColLoc(_SITE, IntAttr(number), column)


def site_of(op: Operation) -> int:
    """The number of the staged op that an op comes from; -1 where that is not known.

    A region has the number of its first op that can raise, else that of the last op that it holds.
    """
    location = op.location
    if isinstance(location, FileLineColLoc) and location.filename is _SITE:
        return location.line.data
    sites = [(site_of(inner), inner.name in _RAISING) for inner in op.walk() if inner is not op]
    known = [(site, raises) for site, raises in sites if site >= 0]
    return next((site for site, raises in known if raises), known[-1][0] if known else -1)


def sites_of(module: ModuleOp) -> Sequence[str]:
    """For each op of a staged module its file and line; empty where it has none (a saved graph)."""
    return [
        f"{location.filename.data}:{location.line.data}"
        if isinstance(location := op.location, FileLineColLoc)
        else ""
        for op in walk(module)
    ]
