"""Lists of OpenAI's API, which clients read page by page."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal

from max._dataclass import dataclass
from max.serve.errors import ApiError, short_text

MOST = 100
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class PageQuery:
    """Which page of a list a client asks for, as :func:`page_of` takes it.

    Args:
        limit: The maximum number of entries.
        order: Whether the oldest or the latest ones come first.
        after: The identifier of the entry before the page; None: it is the first page.
    """

    limit: int
    order: Order
    after: str | None

    def page(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The page.

        Args:
            entries: All entries, the oldest first.

        Raises:
            ApiError: The limit is out of range, or there is no entry ``after``.
        """
        return page_of(entries, self.limit, self.order, self.after)


def page_query(default_order: Order) -> Callable[..., Coroutine[Any, Any, PageQuery]]:
    """A dependency of FastAPI that reads a :class:`PageQuery` from the fields ``limit``, ``order``, ``after``.

    Args:
        default_order: The order where the client names none.
    """

    # a coroutine, as FastAPI calls plain functions in threads
    async def read_query(
        limit: int = 20, order: Order = default_order, after: str | None = None
    ) -> PageQuery:
        return PageQuery(limit, order, after)

    return read_query


def page_of(
    entries: list[dict[str, Any]], limit: int, order: Order, after: str | None
) -> dict[str, Any]:
    """A page of a list.

    Args:
        entries: All entries, the oldest first, most of which have an ``id``.
        limit: The maximum number of entries of the page, 1 to 100.
        order: Whether the oldest or the latest ones come first.
        after: The identifier of the entry after which the page begins; None: it is the first page.

    Raises:
        ApiError: The limit is out of range, or there is no such entry.
    """
    if not 1 <= limit <= MOST:
        raise ApiError(f"limit is {limit}; it must be from 1 to {MOST}", param="limit")
    listed = entries if order == "asc" else entries[::-1]
    if after is not None:
        # identifiers of items are the clients' own, so several may be equal: the first one counts
        places = [at for at, each in enumerate(listed) if each.get("id") == after]
        if not places:
            raise ApiError(f"there is no item {short_text(after)}", param="after")
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": len(listed) > limit,
    }
