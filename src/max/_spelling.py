"""Suggestions for names that users misspell."""

from __future__ import annotations

from collections.abc import Iterable

from max._lazy import lazy_module

__all__ = ["did_you_mean", "similar_names"]

difflib = lazy_module("difflib")


def similar_names(
    name: str, candidates: Iterable[str], count: int = 1, cutoff: float = 0.5
) -> list[str]:
    """The known names that are similar to a name, the most similar first. Case does not matter.

    Args:
        name: The name from the user.
        candidates: The known names.
        count: The greatest number of results.
        cutoff: The least similarity of a result, from 0 to 1; see `difflib.get_close_matches`.
    """
    by_lower = {each.lower(): each for each in candidates}
    # the search takes quadratic time, and a name may be a whole request
    close = difflib.get_close_matches(name[:200].lower(), by_lower, count, cutoff)
    return [by_lower[each] for each in close]


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.5) -> str:
    """The end of an error message: ``; did you mean 'float32'?``, or nothing if no known name is similar.

    Args:
        name: The name from the user.
        candidates: The known names.
        cutoff: The least similarity, from 0 to 1.
    """
    similar = similar_names(name, candidates, 1, cutoff)
    return f"; did you mean {similar[0]!r}?" if similar else ""
