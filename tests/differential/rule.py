"""The class of `differences.py`'s rules."""

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
