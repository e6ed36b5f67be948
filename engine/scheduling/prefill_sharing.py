"""Shares a step's prefill among the prompts that wait for it.

Queues take turns: `room` goes round in quanta (engine/tenants/round_robin.py). Within a queue:

    the first in order      a sixteenth, so that it always makes progress
    all prompts             the rest, the most urgent first, then those of the tenant with fewest requests in the
                            batch, then the shortest remainder, so that a prompt of 100k tokens does not delay one
                            of 50

Deferrable prompts get tokens in steps in which no other prompt can use any.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.scheduling.kv_allocator import AdmissionOutcome, KVAllocator
from engine.scheduling.prefill_budget import Room
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.waiting_queue import precedence
from engine.tenants.round_robin import DeficitRoundRobin
from engine.values.plan import Chunk
from engine.values.request import Request, Status

# Waiting prompts of a queue beyond this many are not considered for the step's remaining room.
_WINDOW = 64
# The guaranteed share of the first in order. It is so small that a prompt of 100k tokens delays ten prompts of 1k
# tokens by at most two steps, even if a step has only 256 tokens.
_FIRST_SHARE = 1 / 16


class PrefillSharing:
    """Shares prefill among prompts, and remembers from step to step which queue has its turn."""

    def __init__(self, quantum: int, *, whole_prompts: bool = False) -> None:
        """`quantum`: tokens of a queue's turn. `whole_prompts`: whether a prompt gets all its tokens or none."""
        self._whole_prompts = whole_prompts
        self._turns = DeficitRoundRobin(quantum)

    def share(self, step: StepBuilder, allocator: KVAllocator, room: Room, now: float) -> dict[Request, int]:
        """Return the tokens for each prompt that gets some, in order of precedence.

        The prompts are those of `step` that run; waiting requests are admitted while `room` and memory last.
        """
        waiting = allocator.waiting
        queues: dict[str, list[Request]] = {name: [] for name in waiting.queues}
        for prompt in step.prompts:
            if prompt.status is Status.RUNNING:  # otherwise it was preempted
                queues.setdefault(prompt.queue_position.queue, []).append(prompt)
        self._turns.take_part(queues)
        if not queues:
            return {}
        shares = _StepShares(step, allocator, room, now, whole_prompts=self._whole_prompts)
        deferrable = {name for name in queues if _is_deferrable(queues[name] or waiting.first(name, 1))}
        self._take_turns(shares, allocator, {name: queues[name] for name in queues if name not in deferrable})
        if not shares.given:
            self._take_turns(shares, allocator, {name: queues[name] for name in queues if name in deferrable})
        return {request: shares.given[request] for request in sorted(shares.given, key=precedence)}

    def _take_turns(
        self, shares: _StepShares, allocator: KVAllocator, queues: Mapping[str, Sequence[Request]]
    ) -> None:
        """Give the room to queues in turn. The caller passes their running prompts."""
        room, waiting = shares.room, allocator.waiting
        open_queues: dict[str, _Queue | None] = dict.fromkeys(queues)
        while not room.is_full and (name := self._turns.turn(among=open_queues)) is not None:
            queue = open_queues[name]
            if queue is None:
                prompts = [*queues[name], *waiting.first(name, _WINDOW)]
                queue = open_queues[name] = _Queue(
                    prompts, Counter(request.tenant for request in allocator.running)
                )
            is_only_queue = len(open_queues) == 1
            most = room.tokens if is_only_queue else min(room.tokens, math.ceil(self._turns.credit(name)))
            used = queue.take(shares, most)
            self._turns.charge(name, used)
            if is_only_queue:  # No other queue would use the turns in which it pays its debt.
                self._turns.turn(among=open_queues)
            if used < most:
                del open_queues[name]  # none of its prompts can use more
            if not shares.has_memory:  # queues whose prompts all wait for admission cannot, either
                open_queues = {name: queue for name, queue in open_queues.items() if queue or queues[name]}

    def charge(self, chunks: Iterable[Chunk]) -> None:
        """Charge the queues for chunks that are not shared here: decodes."""
        if self._turns.num_known > 1:
            for chunk in chunks:
                self._turns.charge(chunk.request.queue_position.queue, chunk.num_tokens)

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Refund a share that was not computed."""
        self._turns.charge(request.queue_position.queue, -num_tokens)


def _is_deferrable(prompts: Sequence[Request]) -> bool:
    return bool(prompts) and prompts[0].is_deferrable


class _StepShares:
    """The shares of one step while they are computed."""

    def __init__(
        self, step: StepBuilder, allocator: KVAllocator, room: Room, now: float, *, whole_prompts: bool = False
    ) -> None:
        self.room = room
        self._whole_prompts = whole_prompts
        self.given: dict[Request, int] = {}
        self.has_memory = True
        """Whether no request was denied admission so far."""
        self._step, self._allocator, self._now = step, allocator, now

    def give(self, prompt: Request, most: int, share: float = 1.0) -> int:
        """Give a prompt up to `most` tokens and up to this share of the room; returns how many it got. If prompts
        are computed whole, it gets all its tokens if they fit or if it is the step's first.
        """
        given = self.given.get(prompt, 0)
        left = prompt.num_to_compute - given
        if self._whole_prompts and self.room.taken and not 0 < left <= self.room.tokens:
            return 0
        if prompt.status is not Status.RUNNING and not self._starts(prompt):
            return 0
        start = prompt.num_planned + given
        left = len(prompt.tokens) - start
        num_tokens = left if self._whole_prompts else self.room.most(start, min(most, left), share)
        if num_tokens:
            self.room.take(start, num_tokens)
            self.given[prompt] = given + num_tokens
        return num_tokens

    def _starts(self, prompt: Request) -> bool:
        """Try to admit a waiting prompt, unless an earlier one did not fit: none overtakes it."""
        if not self.has_memory:
            return False
        outcome = self._allocator.admit(self._step, prompt, self._now)
        self.has_memory = outcome is not AdmissionOutcome.NO_MEMORY
        return outcome is AdmissionOutcome.STARTED


class _Queue:
    """The prompts of one queue in a step."""

    def __init__(self, prompts: list[Request], num_running: Mapping[str, int]) -> None:
        """`num_running`: requests of each tenant that run."""
        self._first = min(prompts, key=precedence)
        self._prompts = sorted(
            prompts,
            key=lambda prompt: (
                -prompt.queue_position.preemption_level,
                num_running[prompt.tenant],
                prompt.num_to_compute,
                prompt.queue_position,
            ),
        )

    def take(self, shares: _StepShares, most: int) -> int:
        """Give up to `most` tokens to its prompts; returns how many they took."""
        used = shares.give(self._first, math.ceil(most * _FIRST_SHARE), _FIRST_SHARE)
        for prompt in self._prompts:
            if used >= most or shares.room.is_full:
                break
            used += shares.give(prompt, most - used)
        return used
