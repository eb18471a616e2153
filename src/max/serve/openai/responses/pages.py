"""Lists of OpenAI's API, which clients read page by page."""

from __future__ import annotations

from typing import Any, Literal

from max.serve.errors import ApiError, short_text

MOST = 100
Order = Literal["asc", "desc"]


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
