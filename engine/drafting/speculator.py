"""The scheduler's interface to speculation: decides how many draft tokens each request gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.drafting.base import Drafter
from engine.drafting.payoff import DraftCost, Payoff
from engine.values.request import Request

logger = logging.getLogger(__name__)


class Speculator:
    """Asks a drafter for as many draft tokens as pay. Belongs to one scheduler."""

    def __init__(self, drafter: Drafter | None = None, max_drafts: int = 4, *, adaptive: bool = True) -> None:
        """See `Speculation` for the arguments. Without `adaptive` every request always gets all draft tokens.

        Without a drafter there are no draft tokens.
        """
        self.drafter = drafter
        """None as well once it has failed."""
        self._max_drafts, self._adaptive = max_drafts, adaptive
        self._cost = DraftCost()
        self._payoffs: dict[str, Payoff] = {}
        self._stepped_at: float | None = None
        self._is_due = False  # whether a step without drafts is due that has none to wait for
        self._has_waited = False  # whether the next step without drafts that is applied has waited for some

    @property
    def is_on(self) -> bool:
        """Whether there is a drafter."""
        return self.drafter is not None

    def wants(self, request: Request) -> bool:
        """Whether the request's next step may hold draft tokens: it is then planned once all tokens are known."""
        if not self.is_on or request.search is not None:  # A beam search chooses no single token.
            return False
        payoff = self._payoffs.get(request.request_id)
        return payoff is None or request.num_tokens >= payoff.resumes_at

    def propose(self, requests: Sequence[Request], room: int) -> list[Sequence[int]]:
        """Return draft tokens, maybe none, for each decoding request. Call exactly once per step.

        `room` is the number of tokens that still fit in the step. Drafts take at most half of it, so that
        prefill makes progress, and never pass a request's end.
        """
        drafts: list[Sequence[int]] = [()] * len(requests)
        if not requests or self.drafter is None:
            return drafts
        has_begun = self.drafter.has_begun
        self._has_waited |= has_begun
        if self._adaptive and self._is_plain_due(len(requests), has_begun):
            return drafts
        cost = self._cost.per_draft_token(len(requests)) if self._adaptive else 0.0
        most = min(self._max_drafts, room // 2 // len(requests))
        wanted = {
            index: count
            for index, request in enumerate(requests)
            if (count := self._num_wanted(request, min(most, request.longest - request.num_tokens - 1), cost))
        }
        if not wanted:
            return drafts
        found = self._ask([requests[index] for index in wanted], list(wanted.values()))
        for index, draft in zip(wanted, found, strict=True):
            drafts[index] = draft
            if not draft and self._adaptive:
                self._payoffs[requests[index].request_id].silent(requests[index].num_tokens)
        return drafts

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn that the first `num_accepted` of a request's `num_drafts` draft tokens were accepted."""
        if num_drafts:
            self._payoffs[request.request_id].verified(num_drafts, num_accepted)

    def stepped(self, num_requests: int, num_drafts: int, num_prefill: int, now: float) -> None:
        """Learn that a step was applied at `now`. The time between two steps has all costs of drafts, including
        lost overlap.

        Only steps without prefill are compared. An idle engine starts with a prefill step, so pauses are not
        measured. Nor are steps without drafts that had to wait for drafts.
        """
        has_waited, self._has_waited = self._has_waited and not num_drafts, False
        if self._stepped_at is not None and num_requests and not num_prefill and not has_waited:
            self._cost.observe(num_requests, num_drafts, now - self._stepped_at)
        self._stepped_at = now

    def forget(self, request: Request) -> None:
        """Release the state of a request that gave its pages back."""
        self._payoffs.pop(request.request_id, None)
        if self.drafter is not None:
            self.drafter.forget(request)

    def _is_plain_due(self, num_requests: int, has_begun: bool) -> bool:
        """Whether the next step should have no drafts, for comparison. If the drafter has begun with some, which
        this step does not use, the one after it should have none either.
        """
        is_due = self._cost.is_due(num_requests) or self._is_due
        self._is_due = is_due and has_begun
        return is_due

    def _ask(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """Ask the drafter. If it fails, requests continue without drafts instead of failing."""
        assert self.drafter is not None
        try:
            return self.drafter.propose(requests, most)
        except Exception:
            logger.exception("the drafter failed: speculative decoding is off from now on")
            self.drafter = None
            return [()] * len(requests)

    def _num_wanted(self, request: Request, most: int, cost: float) -> int:
        payoff = self._payoffs.setdefault(request.request_id, Payoff())
        is_in_flight = request.num_planned > request.num_computed  # a prompt, before its last token
        if most <= 0 or is_in_flight or not self.wants(request):
            return 0
        count = payoff.num_worthwhile(cost, most)
        if not count:
            payoff.pause(request.num_tokens)
        return count
