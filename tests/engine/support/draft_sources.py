"""A drafter for scripted scenarios."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.values.request import PENDING, Request
from tests.engine.support.hash_model import VOCABULARY, next_token


class ScriptedDrafts:
    """Knows the scripted model and is wrong now and then. `right`: how often a draft token is what comes."""

    has_begun = False

    def __init__(self, right: float = 1.0, most: int = 99) -> None:
        self.right, self._most = right, most
        self._random = random.Random(5)
        self.held: set[str] = set()
        self.mistakes: list[str] = []

    def __repr__(self) -> str:
        return f"ScriptedDrafts({self.right})"

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        return [self._draft(request, most) for request, most in zip(requests, max_tokens, strict=True)]

    def forget(self, request: Request) -> None:
        self.held.discard(request.request_id)

    def _draft(self, request: Request, most: int) -> list[int]:
        if most < 1 or PENDING in request.tokens or request.num_tokens + most >= request.longest:
            self.mistakes.append(f"{request.request_id} is asked for {most} tokens after {request.tokens}")
        if request.num_planned > request.num_computed:
            self.mistakes.append(f"{request.request_id} is asked for while a step computes its tokens")
        self.held.add(request.request_id)
        context = list(request.tokens)
        for _ in range(min(most, self._most, self._random.randint(0, 6))):
            is_right = self._random.random() < self.right
            context.append(next_token(context, request.seed) if is_right else self._random.randrange(VOCABULARY))
        return context[request.num_tokens :]
