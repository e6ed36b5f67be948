"""Match and lease: what the cache found for a request, and what a running request holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cache.node import Namespace, Node
from cache.resume.lease_state import LeaseState
from cache.resume.windows import LeaseWindow


class CachedPrefix(NamedTuple):
    """How much of a prompt's beginning is cached."""

    num_reusable: int
    """Leading tokens after which a request can resume."""
    num_held: int
    """Leading tokens whose KV is held; more than `num_reusable` if there is no resume point at their end."""


class PageCopy(NamedTuple):
    """An order to copy the first `num_tokens` slots of page `source` to page `target`, in all layers."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A held prefix, valid until the tree changes: lock it before doing anything else with the cache.

    tokens:  [ whole pages, shared when locked | partial: to be copied | not held ]
               0 ..................... aligned   aligned ....... length
    """

    namespace: Namespace
    length: int
    """Tokens whose KV is held, at most one less than were asked for."""
    partial: int = 0
    """Number of these at the end that fill only a part of their page."""
    node: Node | None = None
    """The node that ends at `length - partial`; None when that is 0."""
    source: Node | None = None
    """The node that ends at `length`, inside the page to copy; None when `partial` is 0."""
    num_held: int = 0
    """Leading tokens whose KV is held, including those after `length` at whose end there is no resume point."""
    is_bare: bool = False
    """Whether the resume point at its end comes from elsewhere."""

    @property
    def aligned(self) -> int:
        """Tokens in whole pages."""
        return self.length - self.partial


@dataclass(slots=True, eq=False)
class Lease:
    """One running request's hold on pages, from `lock` to `finish`. Only the cache changes it.

    pages:   [ the tree's: locked | private ]
               0 ...... num_shared   ...... len(pages)

    The tree owns the tokens up to `node.end`. When that is inside a page, only this lease continues to write
    there; other requests that find the page's tokens copy them.
    """

    pages: list[int]
    """Page table: page i holds tokens [i * page_size, (i + 1) * page_size)."""
    num_shared: int
    """Leading pages of the table that the tree owns."""
    num_cached: int
    """Tokens found when it was locked, less those given up by `drop_partial`."""
    priority: int
    node: Node | None
    """The locked node; None once the lease is finished."""
    source: Node | None = None
    """A node that is locked as well, until the page it ends in has been copied."""
    partial: int = 0
    """Tokens to be copied; 0 once `extend` has returned the copy."""
    capacity: int = 0
    """Tokens that `extend` has made room for in all layers: a request that needs no more need not call it."""
    state: LeaseState | LeaseWindow | None = None
    """Its recurrent state, or its `window`; None in a model without any, and where there was no slot for it."""
    window: LeaseWindow | None = None
    """Its pages of layers with a window; None where these have none of their own."""
    is_admitted: bool = False
    """Whether it ever got pages; only then does its match count as a use of the path."""

    @property
    def num_pages(self) -> int:
        """Pages that it holds, shared ones included."""
        return len(self.pages) + (0 if self.window is None else self.window.num_pages)
