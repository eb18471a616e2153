"""Trees of drafted tokens: continuations of a text that may share their beginnings, which one step verifies together.

A tree is a list of tokens and of parents: the index of the token before each one, -1 for the last token of the text. A
parent comes before its children. A chain is a tree in which each token follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.interfaces import TextGenerationContext

__all__ = [
    "LAST_TOKEN",
    "TREE_ROWS",
    "ancestor_bits",
    "branch_of",
    "chain_of",
    "check_tree",
    "checked_parents",
    "depths_of",
    "draft_length",
    "grown_tree",
    "part_of_tree",
    "path_outcomes",
    "right_path",
    "sibling_ranks",
    "tree_parents",
]

LAST_TOKEN = -1
"""The parent of tokens that follow the text."""
TREE_ROWS = 64
"""The maximum number of new tokens of a step of a request with a tree: a row has a bit for each (docs/dialect.md)."""


def chain_of(count: int) -> tuple[int, ...]:
    """The parents of a chain.

    Args:
        count: The number of its tokens.
    """
    return tuple(range(LAST_TOKEN, count - 1))


def check_tree(tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Checks that parents make a tree of tokens.

    Args:
        tokens: The tokens.
        parents: The index of the token before each.

    Raises:
        ValueError: They do not, or two tokens after the same one are equal.
    """
    if len(parents) != len(tokens):
        raise ValueError(f"{len(parents)} parents of {len(tokens)} drafted tokens")
    seen = set[tuple[int, int]]()
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not LAST_TOKEN <= parent < index:
            raise ValueError(
                f"the parent of drafted token {index} is {parent}; expected {LAST_TOKEN} to {index - 1}"
            )
        if (parent, token) in seen:
            raise ValueError(f"drafted token {index} is the second {token} after token {parent}")
        seen.add((parent, token))


def checked_parents(
    tokens: Sequence[int], parents: Sequence[int], certain: int, owner: str
) -> tuple[int, ...]:
    """The parents of a checked tree of tokens; empty for a chain, which needs none.

    Args:
        tokens: The tokens.
        parents: The index of the token before each.
        certain: The number of certain tokens of the same step.
        owner: Whose tokens they are, for the error.

    Raises:
        ValueError: They make no tree, or one with more than `TREE_ROWS` rows.
    """
    check_tree(tokens, parents)
    own = tuple(parents)
    if own == chain_of(len(own)):
        return ()
    if certain + len(own) > TREE_ROWS:
        raise ValueError(
            f"{owner}: {certain + len(own)} new tokens with a tree; expected at most {TREE_ROWS}"
        )
    return own


def depths_of(parents: Sequence[int]) -> list[int]:
    """The number of drafted tokens up to each token of a tree, itself included.

    Args:
        parents: The parents.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == LAST_TOKEN else depths[parent] + 1)
    return depths


def ancestor_bits(certain: int, parents: Sequence[int]) -> list[int]:
    """The rows of a step that each row sees, a bit for each: certain tokens, then a tree of drafted ones.

    Args:
        certain: The number of certain tokens, at least 1.
        parents: The parents of drafted tokens.
    """
    # each certain token sees those before it
    bits = [(2 << row) - 1 for row in range(certain)]
    for index, parent in enumerate(parents):
        bits.append(bits[certain + parent] | 1 << (certain + index))
    return bits


def grown_tree(chains: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens and parents of a tree of chains, in their order: equal beginnings are shared.

    Args:
        chains: Continuations of a text.
    """
    tokens: list[int] = []
    parents: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for chain in chains:
        parent = LAST_TOKEN
        for token in chain:
            key = parent, token
            if key not in places:
                places[key] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = places[key]
    return tokens, parents


def sibling_ranks(parents: Sequence[int]) -> list[int]:
    """The number of earlier children of its parent, for each token of a tree.

    Args:
        parents: The parents.
    """
    children: dict[int, int] = {}
    ranks: list[int] = []
    for parent in parents:
        ranks.append(children.get(parent, 0))
        children[parent] = ranks[-1] + 1
    return ranks


def part_of_tree(
    tokens: Sequence[int], parents: Sequence[int], kept_indices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens and parents of a part of a tree.

    Args:
        tokens: The tokens.
        parents: Their parents.
        kept_indices: The tokens to keep, in order, each with its parent.
    """
    # old index to new one: kept tokens have kept parents
    places = {LAST_TOKEN: LAST_TOKEN} | {index: place for place, index in enumerate(kept_indices)}
    return [tokens[index] for index in kept_indices], [places[parents[i]] for i in kept_indices]


def path_outcomes(
    parents: Sequence[int], path: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """How often first children were verified and right, and how often others were, after a wrong first one.

    Args:
        parents: The parents of a tree.
        path: The indices of the right tokens, from `right_path`.

    Returns:
        The numbers of tokens that were verified, and of the right ones, for first children and for others.
    """
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        children.setdefault(parent, []).append(index)
    first, others = [0, 0], [0, 0]
    for place, row in enumerate((LAST_TOKEN, *path)):
        siblings = children.get(row, [])
        # a leaf: nothing more was drafted there
        if not siblings:
            break
        rank = siblings.index(path[place]) if place < len(path) else len(siblings)
        first[0] += 1
        first[1] += rank == 0
        # those after the right one were not needed
        others[0] += min(rank, len(siblings) - 1)
        others[1] += 0 < rank < len(siblings)
    return (first[0], first[1]), (others[0], others[1])


def right_path(
    tokens: Sequence[int], parents: Sequence[int], chosen_tokens: Sequence[int]
) -> list[int]:
    """The indices of the right tokens of a tree: each is the one that the model chooses after those before it.

    Args:
        tokens: The drafted tokens.
        parents: Their parents.
        chosen_tokens: What the model chooses after the last token of the text, then after each drafted one.
    """
    path, last = list[int](), LAST_TOKEN
    # parents come before their children, and siblings are distinct
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and token == chosen_tokens[last + 1]:
            path.append(index)
            last = index
    return path


def branch_of(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """The tokens of a tree from the root through a path to a leaf: after the path the first child of each token.

    Args:
        parents: The parents of the tokens.
        path: The indices of the first tokens, from `right_path`.
    """
    branch = list(path)
    for index, parent in enumerate(parents):
        # a parent comes before its children, and the likeliest child first
        if parent == (branch[-1] if branch else LAST_TOKEN):
            branch.append(index)
    return branch


def draft_length(context: TextGenerationContext) -> int:
    """The number of drafted tokens that the next step of a request verifies; contexts of other classes have none."""
    return len(getattr(context, "_draft_tokens", ()))


def tree_parents(context: TextGenerationContext) -> tuple[int, ...]:
    """The parents of drafted tokens that are no chain; empty: they are one, or there are none."""
    return getattr(context, "_draft_parents", ())
