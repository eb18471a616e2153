"""Prints the options of MAX's commands as JSON, read from what ``max COMMAND --help`` prints.

``python -m tests.differential.flags PATH/TO/MAX/bin/max > tests/differential/facts/26.7/flags.json``
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

COMMANDS = ("serve", "generate", "encode", "warm-cache", "benchmark", "list")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def options_of(help_text: str) -> list[str]:
    """The options that a help text lists, without those that its descriptions mention."""
    found: set[str] = set()
    lines = help_text.splitlines()
    for number, line in enumerate(lines):
        # click: two spaces, names, two spaces or the end; argparse alike; cyclopts: NAME, --name, --no-name: text
        match = re.match(r" {2}(-{1,2}[a-z].*?)(?: {2,}|$)", line)
        if match is None and re.match(r" {2}[A-Z][A-Z0-9-]+, -", line):
            joined = " ".join([line, *lines[number + 1 : number + 4]])
            match = re.match(r" {2}(.*?): ", joined)
        if match is not None:
            found |= set(_OPTION.findall(match[1]))
    return sorted(found - {"--help"})


def main(command: str) -> None:
    environment = {**os.environ, "COLUMNS": "500", "HF_HUB_OFFLINE": "1"}
    options: dict[str, list[str]] = {}
    for name in COMMANDS:
        shown = subprocess.run(
            [command, name, "--help"], capture_output=True, text=True, check=True, env=environment
        )
        options[name] = options_of(shown.stdout)
    print(json.dumps(options, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
