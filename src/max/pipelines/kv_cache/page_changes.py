"""What a cache has gained and lost since the last report, for a router that is to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Changes:
    """The changes of the contents of a cache.

    Args:
        new_pages: The hashes of pages that it has now and had not.
        lost_pages: Those of pages that it had and has not.
        is_anew: Whether it was emptied before these changes.
    """

    new_pages: tuple[bytes, ...] = ()
    lost_pages: tuple[bytes, ...] = ()
    is_anew: bool = False

    def __bool__(self) -> bool:
        return bool(self.new_pages or self.lost_pages or self.is_anew)


class PageChanges:
    """Notes the full pages whose contents a pool gains and loses, until they are popped; one entry for each content."""

    def __init__(self) -> None:
        self._has: dict[bytes, bool] = {}
        self._is_anew = False

    def note(self, page_hash: bytes, has: bool) -> None:
        """Notes that a content was gained or lost.

        Args:
            page_hash: Its hash.
            has: Whether it was gained.
        """
        self._has[page_hash] = has

    def forget(self) -> None:
        """Notes that all contents were lost."""
        self._has.clear()
        self._is_anew = True

    def pop(self) -> Changes:
        """The changes since the last call."""
        entries, is_anew = self._has.items(), self._is_anew
        changes = Changes(
            tuple(page_hash for page_hash, has in entries if has),
            # an empty cache has nothing to lose
            tuple(page_hash for page_hash, has in entries if not has and not is_anew),
            is_anew,
        )
        self._has, self._is_anew = {}, False
        return changes
