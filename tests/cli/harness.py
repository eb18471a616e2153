"""Calls of the command line in the process of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from max._config import flags
from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines import PIPELINE_REGISTRY


@dataclass(frozen=True)
class Said:
    """What a command has written, and its exit code."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs commands with a models folder of the test.

    Args:
        models: The models folder.
        capture: Captures stdout and stderr.
    """

    def __init__(self, models: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.models, self._capture = models, capture

    def __call__(self, *words: object) -> Said:
        PIPELINE_REGISTRY.reset()
        with flags.override(MAX_MODELS_DIR=self.models):
            code = report(cli, [str(word) for word in words])
        PIPELINE_REGISTRY.reset()
        out, err = self._capture.readouterr()
        assert "Traceback" not in err
        return Said(code, out, err)

    def done(self, *words: object) -> str:
        """The output of a command that succeeds."""
        said = self(*words)
        assert said.code == 0, said.err
        return said.out

    def refused(self, *words: object) -> list[str]:
        """The two lines of a command that the user must correct."""
        said = self(*words)
        assert said.code == 2, said
        return [line.strip() for line in said.err.strip().splitlines()[-2:]]
