"""Intended differences from the real system's answers, with reasons.

A rule covers the programs of its families that its patterns match; it must match at least one difference in
each of them, so that a rule without use fails. `docs/compatibility.md` lists the rules
(``python -m tests.differential.page`` writes them there).
"""

from __future__ import annotations

from tests.differential.differences_api import API
from tests.differential.differences_eager import EAGER
from tests.differential.differences_forms import FORMS
from tests.differential.differences_graph import GRAPHS, IMAGES, INDEX
from tests.differential.differences_ops import GRAPH, MOVES, OPS
from tests.differential.differences_v26 import V26
from tests.differential.rule import Difference

DIFFERENCES: tuple[Difference, ...] = (
    *GRAPH,
    *OPS,
    *MOVES,
    *GRAPHS,
    *IMAGES,
    *INDEX,
    *V26,
    *FORMS,
    *EAGER,
    *API,
)
