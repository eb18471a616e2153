"""Names of properties that have a schema: as a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from max.pipelines.structured.pattern_automata import unlike_pattern, without_ahead
from max.pipelines.structured.schemas.check import fitting
from max.pipelines.structured.schemas.merging import ASSERTIONS, listed_values, well_formed
from max.pipelines.structured.schemas.references import References
from max.pipelines.structured.validation import is_regex, kept_results

__all__ = ["FORMATS", "listed_texts", "name_pattern", "pattern_for_grammar"]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that grammars hold; others say nothing."""
_MOST_CHOICES = 500


@kept_results(4096, longest=1024)
def pattern_for_grammar(pattern: str) -> str | None:
    """A pattern in the syntax of the grammar's regular expressions; None if it has none.

    Args:
        pattern: The pattern, of ECMAScript or Python.
    """
    # the spellings of Python, and of JavaScript
    text = re.sub(r"\\Z$", "$", pattern)
    text = re.sub(r"^\\A", "^", text)
    text = re.sub(r"\\u([0-9a-fA-F]{4})", r"\\x{\1}", text)
    text = re.sub(r"\\u\{([0-9a-fA-F]+)\}", r"\\x{\1}", text)
    if is_regex(text):
        return text
    return without_ahead(pattern) if "(?" in pattern else None


def listed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that fit a schema; None if it does not list its values.

    Args:
        schema: The schema.
    """
    values = listed_values(schema)
    if not isinstance(values, list):
        return None
    return fitting([each for each in values if isinstance(each, str)], schema)


def name_pattern(names: Any, references: References, depth: int = 0) -> str | None:
    """A pattern of the texts that fit a schema; empty if all do, None if there is none.

    Args:
        names: The schema.
        references: The references in it.
        depth: The number of schemas around it.
    """
    if names is True:
        return ""
    if not isinstance(names, Mapping) or depth > 8:
        return None
    names, wrong = well_formed(references.resolve(names))
    if wrong:
        return None
    asserted = set(names) & ASSERTIONS - {"type"}
    if names.get("format") not in FORMATS:
        asserted -= {"format"}
    if names.get("type", "string") != "string":
        return None
    choices = listed_texts(names)
    if asserted == set():
        return ""
    if asserted <= {"enum", "const"} and choices is not None and len(choices) <= _MOST_CHOICES:
        texts = [re.escape(each) for each in choices]
        return f"^({'|'.join(texts)})$" if texts else None
    if asserted == {"pattern"}:
        return pattern_for_grammar(names["pattern"])
    if asserted <= {"minLength", "maxLength"}:
        least = int(names.get("minLength", 0))
        most = int(names["maxLength"]) if "maxLength" in names else ""
        return f"^[\\s\\S]{{{least},{most}}}$"
    if asserted == {"not"}:
        other = name_pattern(names["not"], references, depth + 1)
        return unlike_pattern(other) if other else None
    if asserted == {"anyOf"} or asserted == {"oneOf"}:
        parts = [
            name_pattern(e, references, depth + 1) for e in names.get("anyOf", names.get("oneOf"))
        ]
        # a pattern does not say that only one of two fits
        if None in parts or (asserted == {"oneOf"} and len(parts) > 1):
            return None
        return "" if "" in parts else "|".join(f"({part})" for part in parts)
    return None
