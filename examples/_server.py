"""A server for the examples that need one: `max serve` as a process, on a port that is free."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serve(model: str, *options: str) -> Iterator[str]:
    """Runs a server while the block runs, and gives its address.

    Args:
        model: The folder of the model.
        options: Further options of ``max serve``.
    """
    code = "from max.entrypoints.cli import main; main()"
    arguments = ["serve", "--model", model, "--port", "0", "--metrics-port", "0", *options]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(r"Server ready on (http://\S+)", line):
            break
    else:
        raise RuntimeError("".join(lines))
    try:
        yield match[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
