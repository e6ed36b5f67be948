"""The layout of a step's pages and states, which differs from engine to engine, and the rows of the last step."""

from __future__ import annotations


class Places:
    """The layout of pages and of states, and the row of the last prepared step that belongs to each request."""

    def __init__(self, page_size: int, null_page: int, null_slot: int | None = None, num_groups: int = 1) -> None:
        """`num_groups`: groups of layers with page tables of their own."""
        self.page_size = page_size
        self.null_page = null_page
        self.null_slot = null_slot
        self.num_groups = num_groups
        self.rows: dict[str, int] = {}
