"""The rules of a grammar as they are written, and what they do not hold of the schemas of tools."""

from __future__ import annotations

from collections.abc import Sequence

from max._dataclass import dataclass


@dataclass(frozen=True)
class UnheldKeyword:
    """What the grammar of the calls of a tool does not hold of its schema.

    Args:
        tool: The name of the tool.
        keyword: The keyword, or what is left out in words.
        argument: The argument that has it; ``*``: those that the schema does not list; empty: the whole schema.
    """

    tool: str
    keyword: str
    argument: str = ""

    @property
    def place(self) -> str:
        """The keyword and where it stands in the schema of the tool."""
        return f"properties.{self.argument}: {self.keyword}" if self.argument else self.keyword


class RuleList:
    """Collects the rules of the calls of tools."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        """The rules so far."""
        self.unheld: list[UnheldKeyword] = []
        """What they do not hold, each once."""
        self.tool = ""
        """The name of the tool whose rules are written."""

    def add(self, body: str) -> str:
        """Adds a rule and returns its name.

        Args:
            body: The rule.
        """
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def add_terminal(self, body: str) -> str:
        """Adds a terminal and returns its name.

        Args:
            body: The terminal.
        """
        name = f"PART_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def note(self, keywords: Sequence[str], argument: str = "") -> None:
        """Notes keywords that the rules of the tool do not hold.

        Args:
            keywords: The keywords.
            argument: The argument that has them, as of :class:`UnheldKeyword`.
        """
        for keyword in keywords:
            found = UnheldKeyword(self.tool, keyword, argument)
            if found not in self.unheld:
                self.unheld.append(found)


def repetition(body: str, least: int, most: int | None) -> str:
    """The rule of something that is there several times.

    Args:
        body: Its rule.
        least: The minimum number of times.
        most: The maximum; None: there is none.
    """
    if most == 0:
        return ""  # the syntax has no such number
    return f"({body}){{{least},{'' if most is None else most}}}"
