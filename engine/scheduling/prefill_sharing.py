"""How a step's prefill is shared among the prompts that wait for it.

Between queues, turns: `room` goes round in quanta (engine/scheduling/round_robin.py). Within a queue:

    the first in order      a sixteenth: it always gets on
    all of them             what is left, of the highest priority first and then of the shortest remainder:
                            a 100k-token prompt does not hold up a 50-token one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from engine.request import Request, Status
from engine.scheduling.plan import Chunk
from engine.scheduling.prefill_budget import Room
from engine.scheduling.round_robin import RoundRobin
from engine.scheduling.waiting_queue import WaitingQueue, precedence

# Waiting prompts of a queue beyond this many are not looked at for the step's remaining room.
_WINDOW = 64
# The guaranteed part of the first in order. So small, ten prompts of 1k tokens take at most two steps more beside
# one of 100k than without it, even when a step has but 256 tokens.
_FIRST_SHARE = 1 / 16

Admit = Callable[[Request], bool]
"""Starts a waiting request, unless it should wait a step for another one's pages, which its status tells. False:
there is no room for it."""


class PrefillSharing:
    """Knows whose turn it is, from step to step."""

    def __init__(self, quantum: int) -> None:
        """`quantum`: tokens of a queue's turn."""
        self._turns = RoundRobin(quantum)

    def share(
        self, running: Sequence[Request], waiting: WaitingQueue, room: Room, admit: Admit
    ) -> dict[Request, int]:
        """Tokens for each prompt that gets some, in order of their places; those that wait are admitted before."""
        queues: dict[str, list[Request]] = {queue: [] for queue in waiting.queues}
        for request in running:
            queues.setdefault(request.queue_position.queue, []).append(request)
        self._turns.take_part(queues)
        step = _Shares(room, admit)
        open_queues: dict[str, _Queue | None] = dict.fromkeys(queues)
        while not room.is_full and (name := self._turns.turn(among=open_queues)) is not None:
            queue = open_queues[name]
            if queue is None:
                queue = open_queues[name] = _Queue([*queues[name], *waiting.first(name, _WINDOW)])
            is_alone = len(open_queues) == 1
            most = room.tokens if is_alone else min(room.tokens, math.ceil(self._turns.credit(name)))
            used = queue.take(step, most)
            self._turns.charge(name, used)
            if is_alone:  # nobody else wants the turns by which it pays for all it took
                self._turns.turn(among=open_queues)
            if used < most:
                del open_queues[name]  # nobody in it can use more
            if not step.has_memory:  # nor can anybody in queues where all wait for admission
                open_queues = {name: queue for name, queue in open_queues.items() if queue or queues[name]}
        return {request: step.given[request] for request in sorted(step.given, key=precedence)}

    def charge(self, chunks: Iterable[Chunk]) -> None:
        """These are computed besides what is shared: decodes."""
        if self._turns.num_known > 1:
            for chunk in chunks:
                self._turns.charge(chunk.request.queue_position.queue, chunk.num_tokens)

    def give_back(self, request: Request, num_tokens: int) -> None:
        """A share was not computed after all."""
        self._turns.charge(request.queue_position.queue, -num_tokens)


class _Shares:
    """What a step gives to prompts, while it is worked out."""

    def __init__(self, room: Room, admit: Admit) -> None:
        self.room = room
        self.given: dict[Request, int] = {}
        self.has_memory = True
        """Whether nobody was refused any."""
        self._admit = admit

    def give(self, prompt: Request, most: int, share: float = 1.0) -> int:
        """Let a prompt have up to `most` tokens, and up to this share of the room; how many it got."""
        if prompt.status is Status.WAITING and self.has_memory:
            # Nobody overtakes another one into the memory that it waits for.
            self.has_memory = self._admit(prompt)
        if prompt.status is not Status.RUNNING:
            return 0
        given = self.given.get(prompt, 0)
        start = prompt.num_planned + given
        num_tokens = self.room.most(start, min(most, prompt.num_to_compute - given), share)
        if num_tokens:
            self.room.take(start, num_tokens)
            self.given[prompt] = given + num_tokens
        return num_tokens


class _Queue:
    """The prompts of one queue in a step."""

    def __init__(self, prompts: list[Request]) -> None:
        self._first = min(prompts, key=precedence)
        self._prompts = sorted(
            prompts,
            key=lambda prompt: (
                -prompt.queue_position.preemption_level,
                prompt.num_to_compute,
                prompt.queue_position,
            ),
        )

    def take(self, step: _Shares, most: int) -> int:
        """Give up to `most` tokens to its prompts; how many they took."""
        used = step.give(self._first, math.ceil(most * _FIRST_SHARE), _FIRST_SHARE)
        for prompt in self._prompts:
            if used >= most or step.room.is_full:
                break
            used += step.give(prompt, most - used)
        return used
