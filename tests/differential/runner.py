"""``python -m tests.differential.runner FAMILY IN OUT``: answers the programs of IN, a JSON line each.

Line ``n`` of OUT is the answer to line ``n`` of IN; OUT is flushed after each, so that the recorder knows
which program ended the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.differential.program import answer, load


def main(name: str, programs: str, answers: str) -> None:
    family = load(name)
    with Path(answers).open("w") as out:
        for line in Path(programs).read_text().splitlines():
            out.write(json.dumps(answer(family, json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
