"""Another engine, as the soak sees it: it borrows pages at any time, and reads its own tokens from them."""

from __future__ import annotations

import random

from engine.host_tier.peers import LentPages
from engine.values.request import PENDING
from tests.engine.support.script import Script

CHANCE = 0.1
"""Of a loan, and of a return, between two steps."""
MOST = 3
"""Loans at once: requests that need their pages wait for them."""


class Borrower:
    """Borrows what requests have computed, or had. Raises AssertionError when a page is not what it must be."""

    def __init__(self, script: Script, rng: random.Random) -> None:
        self._script, self._rng = script, rng
        self._loans: list[tuple[LentPages, list[int]]] = []
        self.num_pages = 0
        """Pages that were lent."""

    def borrow_and_return(self) -> None:
        """Perhaps borrow something, and perhaps return something. Call it between two steps."""
        requests = list(self._script.requests.values())
        if requests and len(self._loans) < MOST and self._rng.random() < CHANCE:
            request = self._rng.choice(requests)
            tokens = [token for token in request.tokens if token != PENDING]
            first = self._rng.choice([0, 0, 1, 5])
            self._loans.append((self._script.scheduler.lender.lend(request.namespace, tokens, first), tokens))
            self._check(*self._loans[-1])
            self.num_pages += len(self._loans[-1][0].device) + len(self._loans[-1][0].host)
        if self._loans and self._rng.random() < CHANCE:
            self._return(self._rng.randrange(len(self._loans)))

    def return_all(self) -> None:
        """Return everything."""
        while self._loans:
            self._return(0)

    def _return(self, number: int) -> None:
        lent, tokens = self._loans.pop(number)
        self._check(lent, tokens)
        self._script.scheduler.lender.give_back(lent.number)

    def _check(self, lent: LentPages, tokens: list[int]) -> None:
        """Check that each slot of what is lent has the token of its position, in the midst of a step or not."""
        runner, page_size = self._script.runner, self._script.page_size
        pages = [(runner.memory, page) for page in lent.device] + [(runner.host, page) for page in lent.host]
        for slot in range(len(pages) * page_size):
            memory, page = pages[slot // page_size]
            position = lent.first * page_size + slot
            assert position < len(tokens), lent
            assert memory.get((page, slot % page_size)) == (tokens[position], position, 0), (lent, position)
