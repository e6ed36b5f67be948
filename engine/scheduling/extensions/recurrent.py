"""Chooses the positions at which the recurrent state of a prompt is kept, so that later requests can resume there.

    prompt   [ as another prompt in the tree | ............ | up to a page ]
                                  branching ─┘        end ──┘

A state is of use only at the position where it was taken, and not every position can have one. So it is kept where
this pays: at the end of the prefix that a prompt shares with an earlier one, and at the last page border before
the prompt's end, for clients that send it again. The cache keeps the state of a request that ends or is preempted.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from cache import StateStep
from engine.values.request import Request


def begin(request: Request, num_seen: int, page_size: int, *, keeps_start: bool = False) -> None:
    """Note where to keep the state of a request that starts. The cache has KV of its first `num_seen` tokens: an
    earlier request continued differently there. `keeps_start`: also keep its first state, from host memory.
    """
    start, last = request.num_planned, request.num_tokens - 1
    places = {num_seen - num_seen % page_size, last - last % page_size}
    request.state_borders = sorted(place for place in places if place > start)
    if keeps_start:
        request.state_borders.insert(0, start)


def plan_state(request: Request, start: int, end: int, *, has_drafts: bool) -> StateStep | None:
    """Return the states that a chunk of tokens `start` to `end` reads and writes; None in models without any."""
    assert request.lease is not None
    state, borders = request.lease.state, request.state_borders
    if state is None:
        return None
    now = [border for border in borders if start <= border < end]
    if borders:
        request.state_borders = [border for border in borders if border >= end]
    return state.plan(start, end, now, has_drafts=has_drafts)


def is_awaited(request: Request, num_cached: int, running: Sequence[Request], page_size: int) -> bool:
    """Whether a running prompt will soon leave a state from which `request` can resume, at least a page after the
    `num_cached` tokens that it finds now.

    Prompts that begin alike thus compute the common part once: if the running prompt has not yet reached the
    position where `request` differs from it, its state is kept there.
    """
    tokens = request.reusable
    for other in running:
        if other.namespace != request.namespace or not other.is_prefilling or other.lease is None:
            continue
        common = _common(tokens, other.tokens, min(len(tokens), other.num_tokens) - 1)
        common -= common % page_size
        if common < num_cached + page_size:
            continue
        if common >= other.num_planned:
            if common not in other.state_borders:
                bisect.insort(other.state_borders, common)
            return True
        if other.lease.state is not None and other.lease.state.keeps_between(num_cached, common):
            return True
    return False


def _common(ours: Sequence[int], theirs: Sequence[int], most: int) -> int:
    """Return how many leading tokens, at most `most`, are the same. Compares slices: O(most)."""
    low, high = 0, most + 1  # the same before `low`, but not all before `high`
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low
