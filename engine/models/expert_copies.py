"""Copies of the experts in demand, on ranks other than their own, so that ranks share an expert's tokens.

    rank 0   experts 0 1 2 3 | copy of 6          tokens of expert 6: every other one on rank 0, the rest on rank 1
    rank 1   experts 4 5 6 7 | no copy            all other tokens: on their expert's own rank

A token's place in its step decides which rank computes it: that needs no message, and one rank does. Rank 0
chooses copies by the tokens since its last choice. They change between two steps, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.models.expert_load import ExpertLoad
from engine.models.experts import Experts
from engine.parallel.collective import Collective

NOTHING = -1
"""In a slot for a copy: none yet."""
WAYS = 24
"""The tokens of an expert go to the ranks that hold it in turns of so many, which two, three, four, six or eight
divide."""
_WORTH = 0.95
"""Copies of a layer change if its busiest rank would have had less than this share of its load."""

Placement = Sequence[Sequence[int]]
"""The copies in one layer: for each rank, the expert in each slot for copies."""
Changes = Mapping[int, Placement]
"""New copies in some layers, by the layer's number among those with experts."""


class ExpertCopies:
    """One rank's copies in all layers."""

    def __init__(self, layers: Sequence[Experts], num_copies: int, ranks: Collective) -> None:
        """Adds `num_copies` slots to each layer. There are no copies yet."""
        self._layers, self._ranks = layers, ranks
        self._num_experts, size = layers[0].num_experts, ranks.shard.size
        self.placed: list[Placement] = [[[NOTHING] * num_copies] * size for _ in layers]
        """The copies in each layer."""
        for layer in layers:
            layer.add_slots(num_copies)
            layer.slots = self._slots(self.placed[0]).to(layer.router.device)

    def place(self, changes: Changes) -> None:
        """Change the copies in some layers. All ranks call this together, between two steps."""
        for number, placement in changes.items():
            layer = self._layers[number]
            for expert in sorted(_new(self.placed[number], placement)):
                self._copy(layer, expert, placement[self._ranks.shard.rank])
            self.placed[number] = placement
            assert layer.slots is not None
            layer.slots.copy_(self._slots(placement))

    def _copy(self, layer: Experts, expert: int, slots: Sequence[int]) -> None:
        """Send an expert's weights from its own rank into the slots for it on others."""
        own = self._num_experts // self._ranks.shard.size
        owner, at = divmod(expert, own)
        is_owner, is_wanted = owner == self._ranks.shard.rank, expert in slots
        place = at if is_owner else own + slots.index(expert) if is_wanted else None
        for weights in layer.stacked_weights:
            one = torch.empty_like(weights[:1]) if place is None else weights[place : place + 1]
            self._ranks.from_rank(one.view(torch.uint8), owner)  # gloo knows no float8

    def _slots(self, placement: Placement) -> torch.Tensor:
        """Return int64 [num_experts, WAYS]: the slot on this rank for each turn of an expert's tokens; one after
        the last if another rank has the turn.
        """
        rank = self._ranks.shard.rank
        own, copies = self._num_experts // len(placement), placement[rank]
        held = [*range(rank * own, (rank + 1) * own), *copies]
        slots = torch.full((self._num_experts, WAYS), len(held))
        for expert, those in enumerate(holders_of(placement, self._num_experts)):
            if rank in those:
                slots[expert, those.index(rank) :: len(those)] = held.index(expert)
        return slots


class CopyChooser:
    """Rank 0's choice of all ranks' copies. A layer's are chosen once in `interval` steps; the layers take turns,
    so that one step does not wait for the weights of all.
    """

    def __init__(self, copies: ExpertCopies, load: ExpertLoad, interval: int) -> None:
        self._placed, self._load, self._interval = list(copies.placed), load, interval
        self._seen = load.read()
        self._tokens: list[list[int]] = []
        """For each layer, the tokens of each expert in the last interval."""
        self._step = 0

    def next_changes(self) -> Changes:
        """Return the copies that change before the next step. Called once for each step."""
        turn = self._step % self._interval
        self._step += 1
        if turn == 0:
            before, self._seen = self._seen, self._load.read()
            self._tokens = (self._seen - before).tolist()
        found: dict[int, Placement] = {}
        for number in range(turn, len(self._tokens), self._interval):
            tokens = self._tokens[number]
            if (placement := better(tokens, self._placed[number])) is not None:
                found[number] = self._placed[number] = placement
                self._load.share(number, holders_of(placement, len(tokens)))
        return found


def better(tokens: Sequence[int], now: Placement) -> Placement | None:
    """Return the copies that a layer should have instead of those `now`; None if they would hardly help."""
    wanted = chosen(tokens, len(now), len(now[0]))
    if busiest(tokens, wanted) < _WORTH * busiest(tokens, now):
        return [_kept_in_place(*each) for each in zip(now, wanted, strict=True)]
    return None


def chosen(tokens: Sequence[int], num_ranks: int, num_copies: int) -> list[list[int]]:
    """Return the copies that fit the tokens of a layer's experts: the busiest rank gives a share of its most used
    expert to the least busy rank with a free slot, as long as that helps.
    """
    ranks, own = range(num_ranks), len(tokens) // num_ranks
    holders = [[expert // own] for expert in range(len(tokens))]
    loads = _loads(tokens, holders, num_ranks)
    found: list[list[int]] = [[] for _ in ranks]

    def give_from(rank: int) -> bool:
        held = [expert for expert, those in enumerate(holders) if rank in those]
        for expert in sorted(held, key=lambda one: -tokens[one] / len(holders[one])):
            those = holders[expert]
            free = [one for one in ranks if len(found[one]) < num_copies and one not in those]
            part = tokens[expert] / (len(those) + 1)
            if free and loads[to := min(free, key=loads.__getitem__)] + part < loads[rank]:
                for one in those:
                    loads[one] -= tokens[expert] / len(those) - part
                loads[to] += part
                those.append(to)
                found[to].append(expert)
                return True
        return False

    while give_from(max(ranks, key=loads.__getitem__)):
        pass
    return [experts + [NOTHING] * (num_copies - len(experts)) for experts in found]


def busiest(tokens: Sequence[int], placement: Placement) -> float:
    """Return the tokens of the busiest rank with these copies."""
    return max(_loads(tokens, holders_of(placement, len(tokens)), len(placement)))


def holders_of(placement: Placement, num_experts: int) -> list[list[int]]:
    """Return the ranks that hold each expert, its own rank first."""
    own = num_experts // len(placement)
    holders = [[expert // own] for expert in range(num_experts)]
    for rank, copies in enumerate(placement):
        for expert in copies:
            if expert != NOTHING:
                holders[expert].append(rank)
    return holders


def _loads(tokens: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[float]:
    """Return the tokens of each rank, if those that hold an expert share its tokens equally."""
    loads = [0.0] * num_ranks
    for count, those in zip(tokens, holders, strict=True):
        for rank in those:
            loads[rank] += count / len(those)
    return loads


def _new(before: Placement, after: Placement) -> set[int]:
    """Return the experts of which a rank gets a copy."""
    return {
        expert
        for own, wanted in zip(before, after, strict=True)
        for held, expert in zip(own, wanted, strict=True)
        if expert not in (held, NOTHING)
    }


def _kept_in_place(now: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return a rank's wanted copies, those that it has in the slots where they are."""
    coming = iter([expert for expert in wanted if expert not in now])
    return [expert if expert in wanted and expert != NOTHING else next(coming, NOTHING) for expert in now]
