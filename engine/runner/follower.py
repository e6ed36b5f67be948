"""The state of one request in a model or layer that drafts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache import Lease
from engine.graphs.chain_graphs import ChainStart
from engine.values.plan import Chunk, num_accepted
from engine.values.request import PENDING, Request


@dataclass(slots=True)
class Follower:
    """The draft model's state of one request."""

    request: Request
    lease: Lease
    num_computed: int
    """Number of leading tokens whose KV it has: the request's, then its own draft tokens."""
    num_known: int
    """Number of the request's tokens when it last drafted."""
    draft: list[int] = field(default_factory=list)
    """Draft tokens that follow the known ones."""
    most: int = 0
    """Number of draft tokens wanted now."""
    num_given: int = 0
    """Number of known tokens to compute now."""
    is_filling: bool = False
    """Whether these are a prompt's."""
    first: int = 0
    """Number of leading tokens of the request that are left out: the first slot of its pages is that of the next
    one."""
    is_shared: bool = True
    """Whether other requests may use its KV."""

    def roll_back(self, *, reuses_drafts: bool) -> None:
        """Keep the KV of the accepted part of the last draft, unless drafts are not reused. The rest, and always
        the last token, is computed again.
        """
        tokens = self.request.tokens
        accepted = num_accepted(self.draft, tokens[self.num_known :]) if reuses_drafts else 0
        self.num_computed = min(self.num_computed, self.num_known + accepted, len(tokens) - 1)
        self.num_known, self.draft = len(tokens), []

    def want(self, most: int, room: int) -> None:
        """Ask for up to `most` draft tokens. At most `room` tokens of a prompt are computed first."""
        self.most = most
        missing = self.num_known - self.num_computed
        self.is_filling = missing > most + 1  # This is more than a step can leave uncomputed.
        self.num_given = min(missing, room) if self.is_filling else missing
        if most <= 0:
            self.num_given = 0

    def missing_chunk(self) -> Chunk:
        """Return the next `num_given` known tokens as a chunk."""
        start = self.num_computed
        self.num_computed = end = start + self.num_given
        ids = self.request.tokens[start:end]
        return Chunk(self.request, start - self.first, len(ids), ids, self.lease.pages, end == self.num_known)

    def next_chunk(self) -> Chunk:
        """Return the last draft token as a chunk."""
        self.num_computed += 1
        place = self.num_computed - 1 - self.first
        return Chunk(self.request, place, 1, self.draft[-1:], self.lease.pages, True)

    def reusable(self, most: int | None = None) -> Sequence[int]:
        """Return the tokens, at most so many, whose KV others may use."""
        if not self.is_shared:
            return ()
        computed = self.request.tokens[self.first : self.num_computed]
        return computed[:most]

    def chain_start(self) -> ChainStart:
        """Return the place of its last computed token, after which its next draft token comes."""
        return ChainStart(self.request, self.num_computed - 1 - self.first, self.first, self.lease.pages)

    def chunk_behind(self, count: int) -> Chunk:
        """Return as a chunk the `count` tokens that the step in flight samples, after those known now."""
        ids = [PENDING] * count
        return Chunk(self.request, self.num_known - self.first, count, ids, self.lease.pages, True)

    def start_behind(self, count: int) -> ChainStart:
        """Return the place after which its next draft comes: the first of these tokens, or a later one."""
        place = self.num_known - self.first
        return ChainStart(self.request, place, self.first, self.lease.pages, most_later=count - 1)

    def mark_computed(self) -> None:
        """Note that the KV of all tokens was computed behind the step that gave the last ones."""
        self.num_computed = self.num_known = len(self.request.tokens)
        self.draft = []

    def take(self, tokens: Sequence[int]) -> None:
        """Append draft tokens, of which all but the last have been computed, as long as more are wanted. The draft
        ends after a token that ends the request, or without a valid choice.
        """
        for index, token in enumerate(tokens):
            if index:
                if not self.wants_more:
                    return
                self.num_computed += 1
            if token >= 0:
                self.draft.append(token)
            if token < 0 or token in self.request.stop_ids:
                self.most = len(self.draft)

    @property
    def num_wanted(self) -> int:
        """Number of draft tokens that are still wanted."""
        return self.most - len(self.draft)

    @property
    def wants_more(self) -> bool:
        """Whether it has caught up and more draft tokens are wanted."""
        return 0 < len(self.draft) < self.most
