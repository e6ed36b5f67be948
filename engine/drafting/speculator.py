"""What the scheduler knows of speculation: whom to ask for guesses, how many, and what became of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.drafting.base import Drafter
from engine.drafting.payoff import DraftCost, Payoff
from engine.request import Request

logger = logging.getLogger(__name__)


class Speculator:
    """Asks a drafter for as many guesses as pay. Belongs to one scheduler."""

    def __init__(self, drafter: Drafter | None = None, max_drafts: int = 4, *, adaptive: bool = True) -> None:
        """See `Speculation` for the arguments. Without `adaptive` every request always gets all draft tokens.

        Without a drafter nothing is guessed.
        """
        self._drafter = drafter
        self._max_drafts, self._adaptive = max_drafts, adaptive
        self._price = DraftCost()
        self._payoffs: dict[str, Payoff] = {}
        self._stepped_at: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is guessed at all."""
        return self._drafter is not None

    def wants(self, request: Request) -> bool:
        """Whether the request's next step may hold guesses: then it is planned when all its tokens are known."""
        if not self.is_on or request.search is not None:  # A beam search chooses no single token.
            return False
        payoff = self._payoffs.get(request.request_id)
        return payoff is None or request.num_tokens >= payoff.resumes_at

    def propose(self, requests: Sequence[Request], room: int) -> list[Sequence[int]]:
        """Guesses for decoding requests, maybe none, in a step with room for `room` tokens besides. Once per step.

        Guesses take half of that room at most, so that prompts get on, and never pass a request's end.
        """
        guesses: list[Sequence[int]] = [()] * len(requests)
        if not requests or not self.is_on or (self._adaptive and self._price.is_due(len(requests))):
            return guesses
        price = self._price.per_draft_token(len(requests)) if self._adaptive else 0.0
        most = min(self._max_drafts, room // 2 // len(requests))
        wanted = {
            index: count
            for index, request in enumerate(requests)
            if (count := self._num_wanted(request, min(most, request.longest - request.num_tokens - 1), price))
        }
        if not wanted:
            return guesses
        found = self._ask([requests[index] for index in wanted], list(wanted.values()))
        for index, guess in zip(wanted, found, strict=True):
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
        if self._drafter is not None:
            self._drafter.forget(request)

    def _ask(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """A drafter that breaks must not take the model's requests along: they go on without."""
        assert self._drafter is not None
        try:
            return self._drafter.propose(requests, most)
        except Exception:
            logger.exception("the drafter failed: from here on, nothing is guessed")
            self._drafter = None
            return [()] * len(requests)

    def _num_wanted(self, request: Request, most: int, price: float) -> int:
        payoff = self._payoffs.setdefault(request.request_id, Payoff())
        if most <= 0 or not self.wants(request):
            return 0
        count = payoff.num_worthwhile(price, most)
        if not count:
            payoff.pause(request.num_tokens)
        return count
