"""The real system's answers: ``facts/<version>/<family>.jsonl``, one ``[program, answer]`` per line.

The folder of the newer version holds only the answers that differ from the older one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.differential.program import CRASH, FOLDER, HANG, agree, answer, load

OLDER, NEWER = "25.7", "26.7"
#: A name that one version does not have is no judgement of what the other answered.
GONE = ("!AttributeError", "!NameError", "!ImportError", "!ModuleNotFoundError")


def read(version: str, family: str) -> dict[str, str]:
    path = FOLDER / "facts" / version / f"{family}.jsonl"
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines())


def write(version: str, family: str, facts: dict[str, str]) -> None:
    path = FOLDER / "facts" / version / f"{family}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps([p, a]) + "\n" for p, a in facts.items()))


def answers_there(family: str) -> dict[str, list[str]]:
    """For each program the answers that serve: the older version's and, if it differs, the newer's."""
    found = {p: [a] for p, a in read(OLDER, family).items()}
    for program, newer in read(NEWER, family).items():
        if program in found and not newer.startswith(GONE):
            # a name that the older version did not have
            older = found[program]
            if older[0].startswith(GONE) and not newer.startswith("!"):
                older = []
            found[program] = [*older, newer]
    return found


def differences(family: str) -> Iterator[tuple[str, list[str], str]]:
    """The programs whose answer here serves neither version: program, answers there, answer here."""
    members = load(family)
    for program, there in answers_there(family).items():
        here = answer(members, program)
        if not any(agree(t, here) for t in there if t not in (CRASH, HANG)):
            yield program, there, here
