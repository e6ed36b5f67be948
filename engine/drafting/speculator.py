"""What the scheduler knows of speculation: whom to ask for guesses, how many, and what became of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.drafting.base import Drafter
from engine.drafting.payoff import Payoff, Price
from engine.request import Request

logger = logging.getLogger(__name__)


class Speculator:
    """Asks a drafter for as many guesses as pay. Belongs to one scheduler."""

    def __init__(self, drafter: Drafter, max_drafts: int = 4, *, adaptive: bool = True) -> None:
        """As in `Speculation`. Without `adaptive` every request gets all the guesses there are, always."""
        self._drafter = drafter
        self._max_drafts, self._adaptive = max_drafts, adaptive
        self._price = Price()
        self._payoffs: dict[str, Payoff] = {}
        self._stepped_at: float | None = None
        self._has_failed = False

    def wants(self, request: Request) -> bool:
        """Whether the request's next step may hold guesses: then it is planned when all its tokens are known."""
        payoff = self._payoffs.get(request.request_id)
        return not self._has_failed and (payoff is None or request.num_tokens >= payoff.resumes_at)

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Sequence[int]]:
        """Guesses for decoding requests, none or up to `room` (one number each) tokens for each. Once per step."""
        guesses: list[Sequence[int]] = [()] * len(requests)
        if not requests or (self._adaptive and self._price.is_due(len(requests))):
            return guesses
        price = self._price.of_draft(len(requests)) if self._adaptive else 0.0
        asked = {
            index: count
            for index, (request, most) in enumerate(zip(requests, room, strict=True))
            if (count := self._num_wanted(request, min(most, self._max_drafts), price))
        }
        if not asked:
            return guesses
        found = self._ask([requests[index] for index in asked], list(asked.values()))
        for index, guess in zip(asked, found, strict=True):
            guesses[index] = guess
            if not guess and self._adaptive:
                self._payoffs[requests[index].request_id].silent(requests[index].num_tokens)
        return guesses

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The first `num_accepted` of a request's `num_drafts` guesses were right."""
        if num_drafts:
            self._payoffs[request.request_id].verified(num_drafts, num_accepted)

    def stepped(self, num_requests: int, num_drafts: int, num_prefill: int, now: float) -> None:
        """A step was applied at `now`: between two such moments lies all that guessing costs, lost overlap too.

        Only steps of decodes alone are compared. An engine that was idle begins with a prefill step, so pauses
        are not measured.
        """
        if self._stepped_at is not None and num_requests and not num_prefill:
            self._price.observe(num_requests, num_drafts, now - self._stepped_at)
        self._stepped_at = now

    def forget(self, request: Request) -> None:
        """The request gave its pages back."""
        self._payoffs.pop(request.request_id, None)
        self._drafter.forget(request)

    def _ask(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """A drafter that breaks must not take the model's requests along: they go on without."""
        try:
            return self._drafter.propose(requests, most)
        except Exception:
            logger.exception("the drafter failed: from here on, nothing is guessed")
            self._has_failed = True
            return [()] * len(requests)

    def _num_wanted(self, request: Request, most: int, price: float) -> int:
        payoff = self._payoffs.setdefault(request.request_id, Payoff())
        if most <= 0 or not self.wants(request):
            return 0
        count = payoff.num_worthwhile(price, most)
        if not count:
            payoff.pause(request.num_tokens)
        return count
