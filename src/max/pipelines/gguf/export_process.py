"""Quantizes a model in a process of its own: ``python -m max.pipelines.gguf.export_process FOLDER FILE.gguf TYPE``.

It prints a JSON object a line: ``{"done": 3, "of": 290}`` after each tensor, and ``{"error": "…"}`` if it fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from max._load_steps import STEPS
from max.engine import InferenceSession
from max.pipelines.core.exceptions import UserError
from max.pipelines.gguf.export import export_gguf

_NICENESS = 10
"""Running requests come first."""


def _tell(**values: object) -> None:
    # a reader that has left ends the process
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Writes the file.

    Args:
        arguments: The model's folder, the file, and its type, one of `EXPORT_TYPES`.

    Returns:
        The exit status.
    """
    folder, path, file_type = arguments
    if hasattr(os, "nice"):
        os.nice(_NICENESS)

    def show(step: str, num_done: int, total: int) -> None:
        if total:
            _tell(done=num_done, of=total)

    try:
        with STEPS.handed_to(show):
            export_gguf(Path(folder), Path(path), file_type, InferenceSession())
    except (UserError, OSError) as error:
        _tell(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
