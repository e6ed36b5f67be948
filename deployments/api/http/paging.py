"""Returns lists in pages, as OpenAI's API does: `limit`, and `after`, the last name of the page before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from deployments.api.base.errors import ApiError, invalid, quoted

T = TypeVar("T")


def page_size(request: Request, default: int, most: int) -> int:
    """Return the query's `limit`. Raises `ApiError` 400."""
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise invalid(f"limit must be an integer in [1, {most}], got {quoted(given)}.", "limit")
    return int(given)


def is_newest_first(request: Request, default: str = "desc") -> bool:
    """Return the query's `order`. Raises `ApiError` 400."""
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, got {quoted(order)}.", "order")
    return order == "desc"


def page_of(
    request: Request, found: Sequence[T], limit: int, name_of: Callable[[T], str], shown: Callable[[T], Any]
) -> dict[str, Any]:
    """Return a page of a list. Raises `ApiError` 404 when `after` is not in it."""
    after, start = request.query_params.get("after"), 0
    if after is not None:
        at = next((at for at, item in enumerate(found) if name_of(item) == after), None)
        if at is None:
            raise ApiError(404, f"after is {quoted(after)}, which is not in the list.", param="after")
        start = at + 1
    page = found[start : start + limit]
    return {
        "object": "list",
        "data": [shown(item) for item in page],
        "first_id": name_of(page[0]) if page else None,
        "last_id": name_of(page[-1]) if page else None,
        "has_more": len(found) > start + limit,
    }
