"""What can go wrong in an import, and how a function of an op asks for what it must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "HostNode",
    "ImportFailure",
    "MissingContents",
    "ModelFileError",
    "Problem",
    "Unsupported",
    "UnsupportedOpsError",
    "error_line",
]


def error_line(error: BaseException) -> str:
    """The kind of an error, and the first line of its message: those of torch may have hundreds.

    Args:
        error: The error.
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


class ModelFileError(ValueError):
    """A file is not a valid model, or exceeds a limit."""


class Unsupported(Exception):
    """A function of an op raises it for attributes or operands that it does not take."""


class MissingContents(Exception):
    """A function of an op needs the elements, or the sizes, of a value that only a run knows.

    Args:
        name: The name of the value in the source graph.
        what: What is needed, for messages.
        why: Why, for messages.
    """

    def __init__(self, name: str, what: str, why: str = "") -> None:
        because = f": {why}" if why else ""
        super().__init__(f"needs {what} of {name!r}, which only a run knows{because}")
        self.name = name


class HostNode(Exception):
    """A node that cannot be staged, and that the host can execute between two graphs.

    Args:
        why: The reason, for messages of importers that need one graph.
    """


class Problem(NamedTuple):
    """A node that cannot be imported.

    Attributes:
        needs_run: Whether it could be executed in parts, as what it needs is known when the model runs.
    """

    node: str
    """The node, for messages."""
    op: str
    reason: str
    needs_run: bool = False


_SHOWN = 20


class ImportFailure(ValueError):
    """A model cannot be imported."""


class UnsupportedOpsError(ImportFailure, NotImplementedError):
    """Nodes of a model that cannot be imported: all of them, not the first one only.

    Args:
        model: The name of the model.
        problems: The nodes.
        hint: What else would work.
    """

    def __init__(self, model: str, problems: Sequence[Problem], hint: str = "") -> None:
        self.problems = list(problems)
        lines = [f"  {p.node}: {p.reason}" for p in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  and {len(self.problems) - _SHOWN} more")
        ops = ", ".join(sorted({p.op for p in self.problems})[:_SHOWN])
        count = f"{len(self.problems)} node{'s' * (len(self.problems) != 1)}"
        super().__init__(
            f"{model}: {count} cannot be imported ({ops}):\n"
            + "\n".join([*lines, *[hint] * bool(hint)])
        )
