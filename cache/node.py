"""One node of the radix tree: a run of tokens and the pages it owns."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Namespace(NamedTuple):
    """Separates keys: KV is shared within a namespace and never across namespaces."""

    model: str
    adapter: str = ""
    salt: str = ""
    """Set for tenants who ask not to share prefixes with others."""
    group: int = 0
    """Set where other requests must find nothing: a lease then shares only with its forks."""


class Node:
    """Tokens [start, end) of every sequence that passes through it; `radix_tree` explains which pages it owns."""

    __slots__ = (
        "blocks",
        "children",
        "continuation",
        "copying",
        "end",
        "first_slot",
        "gates",
        "hits",
        "last_access",
        "namespace",
        "num_holders",
        "pages",
        "parent",
        "pins",
        "priority",
        "queued",
        "resume_point",
        "start",
        "tokens",
    )

    def __init__(
        self,
        namespace: Namespace,
        parent: Node | None,
        start: int,
        tokens: array[int],
        first_slot: int,
        pages: list[int],
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        """None for a root, and for a node that was evicted."""
        self.start = start
        """Position of its first token."""
        self.end = start + len(tokens)
        """Position after its last token; the tree keeps it so, as nothing is read more often."""
        self.tokens = tokens
        self.first_slot = first_slot
        """The slot of the page table that `pages[0]` fills."""
        self.pages = pages
        self.blocks: list[int] = []
        """Hashes of the blocks that end in it (see `block_record`); empty without a record."""
        self.children: dict[int, Node] = {}
        """Child nodes by their first token."""
        self.gates: dict[Namespace, Node] | None = None
        """Where other namespaces begin: empty nodes at its end, if it is the end of a shared prefix."""
        self.continuation: Node | None = None
        """The child that continues the page this node ends in, if it ends inside one."""
        self.num_holders = 0
        """Leases that hold this very node."""
        self.pins = 0
        """`num_holders` plus the number of locked children; the node is locked while this is above 0."""
        self.copying = 0
        """Leases that are going to copy, or are copying, the page this node ends in."""
        self.last_access = 0.0
        """Seconds on the caller's clock."""
        self.hits = 0
        """Number of admitted requests that reused it."""
        self.priority = 0
        """Priority of the most urgent request that wrote or reused it: the lowest number."""
        self.resume_point: int | None = None
        """The number of the resume point at its end, in models that need one (see `cache.resume`)."""
        self.queued = False
        """Whether the eviction queue has an entry for it (at most one)."""

    @property
    def is_locked(self) -> bool:
        """Whether a lease holds it or something below it."""
        return self.pins > 0

    @property
    def is_evictable(self) -> bool:
        """Whether it is an unlocked leaf of the tree (roots and gates hold no pages and do not count)."""
        return not self.pins and not self.children and self.parent is not None and bool(self.tokens)

    def __repr__(self) -> str:
        return f"Node([{self.start}, {self.end}), pages={len(self.pages)}, pins={self.pins})"
