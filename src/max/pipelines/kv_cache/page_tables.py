"""The page tables of a request, and the hashes of pages. No tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.pipelines.kv_cache.known_pages import Miss

Tokens = npt.NDArray[np.integer[Any]]
Contents: TypeAlias = Sequence[tuple[int, bytes]]
"""What tokens of a sequence stand for besides their ids, such as images: the position of the first token of each, and
bytes that identify it, in the order of the positions."""


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than a request needs.

    Args:
        num_needed: The number of pages that it needs.
        free: The number of free pages.
        total: The number of all pages.
    """

    def __init__(self, num_needed: int, free: int, total: int) -> None:
        super().__init__(
            f"KV cache: {num_needed} more pages are needed, {free} of {total} are free"
        )
        self.needed, self.free, self.total = num_needed, free, total


@dataclass
class GroupTable:
    """The page table of a request in one group."""

    pages: list[int] = field(default_factory=list)
    returned_pages: int = 0
    """The number of leading pages that lie before the window: released, or never allocated."""


@dataclass
class Tail:
    """The tokens in a page that is not full.

    Args:
        parent: The hash of the page before it, or the salt.
        tokens: The tokens.
        contents: What they stand for, by place in the page.
    """

    parent: bytes
    tokens: Tokens
    contents: tuple[tuple[int, bytes], ...]


@dataclass
class PageTable:
    """The page tables of a request in all groups."""

    groups: list[GroupTable]
    hashes: list[bytes] = field(default_factory=list)
    """A hash per full page; it covers all tokens up to the end of the page."""
    reused_tokens: int = 0
    """Reused tokens that are not yet in the manager's count."""
    text: tuple[Tokens, bytes, Contents] | None = None
    """All tokens that are in the cache, the salt and the contents; None: they are not known."""
    is_forgotten: bool = False
    """Whether the cache was emptied since the table was opened."""
    number: int = 0
    """The number of tables that were opened before."""
    prefix: int = 0
    """The number of tokens that it started with."""
    miss: Miss | None = None
    """Why no more tokens were reused."""

    def __len__(self) -> int:
        return len(self.groups[0].pages)

    def tail(self, page_size: int) -> Tail | None:
        """The tokens after the last full page that are in the cache; None: there are none.

        Args:
            page_size: Tokens per page.
        """
        if self.text is None:
            return None
        (tokens, parent, contents), full = self.text, len(self.hashes)
        if full:
            parent = self.hashes[-1]
        rest = tokens[full * page_size :]
        return Tail(parent, rest, contents_within(contents, full, page_size)) if rest.size else None


def contents_within(
    contents: Contents, index: int, page_size: int
) -> tuple[tuple[int, bytes], ...]:
    """The contents of a page, by place in it.

    Args:
        contents: What the tokens of a sequence stand for.
        index: The page.
        page_size: Tokens per page.
    """
    begin = index * page_size
    return tuple(
        (position - begin, content)
        for position, content in contents
        if begin <= position < begin + page_size
    )


def page_hash_of(
    parent: bytes, tokens: Tokens, index: int, page_size: int, contents: Contents = ()
) -> bytes:
    """The hash of a full page's tokens and of what they stand for.

    Args:
        parent: The hash of the page before it, or the salt: the key of the hash, which so covers all pages before.
        tokens: The tokens of the sequence.
        index: The page.
        page_size: Tokens per page.
        contents: What the tokens stand for.
    """
    begin, end = index * page_size, (index + 1) * page_size
    data = np.ascontiguousarray(tokens[begin:end], dtype=np.int64).tobytes()
    for position, content in contents:
        # the tokens have a fixed size, so what follows them is unambiguous
        if begin <= position < end:
            data += position.to_bytes(8, "little") + len(content).to_bytes(8, "little") + content
    # the parent's hash as the key chains the pages: equal hashes mean equal texts from the start
    return hashlib.blake2b(data, digest_size=16, key=parent).digest()


def tail_hash_of(tail: Tail) -> bytes:
    """The hash of a page that is not full; it is equal to that of no full page.

    Args:
        tail: What the page has.
    """
    data = np.ascontiguousarray(tail.tokens, dtype=np.int64).tobytes()
    data += repr(tail.contents).encode() if tail.contents else b""
    return hashlib.blake2b(data, digest_size=16, key=tail.parent, person=b"tail").digest()
