"""Copies of experts: which are chosen, when they change, and that one rank computes each token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model_parts.experts_config import ExpertsConfig
from engine.models.expert_copies import NOTHING, WAYS, CopyChooser, ExpertCopies, better, busiest, chosen
from engine.models.expert_load import ExpertLoad
from engine.models.experts import Experts
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard

EXPERTS, HIDDEN = 8, 6


def copies_of(rank: int, size: int, num_copies: int, num_layers: int = 1) -> tuple[ExpertCopies, list[Experts]]:
    """A rank's copies, without others to exchange weights with."""
    whole = ExpertsConfig(EXPERTS, 2, 4, True, frozenset(range(num_layers)), range(EXPERTS))
    shard = Shard(rank, size, splits_experts=True)
    layers = [Experts(shard.experts(whole), HIDDEN) for _ in range(num_layers)]
    return ExpertCopies(layers, num_copies, Collective(shard)), layers


def test_the_busiest_rank_gives_its_most_used_expert_to_the_least_busy_one() -> None:
    """Ranks have 2, 98, 100 and 20 tokens. Rank 0 takes half of expert 4, then rank 3 half of expert 2. At last,
    rank 1 has the fewest of those with a free slot, and takes a third of expert 4.
    """
    assert chosen([1, 1, 90, 8, 50, 50, 0, 20], 4, 1) == [[4], [4], [NOTHING], [2]]


def test_an_even_load_needs_no_copies() -> None:
    assert chosen([5] * EXPERTS, 4, 2) == [[NOTHING, NOTHING]] * 4
    assert chosen([0] * EXPERTS, 2, 1) == [[NOTHING]] * 2


def test_an_expert_may_have_copies_on_all_ranks() -> None:
    """Copies are as good as one may hope: each rank has a quarter of all tokens."""
    found = chosen([96, 0, 0, 0, 0, 0, 0, 0], 4, 1)
    assert found == [[NOTHING], [0], [0], [0]]
    assert busiest([96, 0, 0, 0, 0, 0, 0, 0], found) == 24


@given(
    tokens=st.lists(st.integers(0, 1000), min_size=EXPERTS, max_size=EXPERTS),
    size=st.sampled_from([2, 4, 8]),
    num_copies=st.integers(1, 3),
)
def test_copies_are_of_other_ranks_experts_and_never_load_a_rank_more(
    tokens: list[int], size: int, num_copies: int
) -> None:
    found = chosen(tokens, size, num_copies)
    for rank, experts in enumerate(found):
        assert len(experts) == num_copies
        held = [expert for expert in experts if expert != NOTHING]
        assert len(set(held)) == len(held)
        assert all(expert // (EXPERTS // size) != rank for expert in held)
    assert busiest(tokens, found) <= busiest(tokens, [[NOTHING]] * size) + 1e-9


@given(tokens=st.lists(st.integers(0, 99), min_size=EXPERTS, max_size=EXPERTS), size=st.sampled_from([2, 4, 8]))
def test_one_rank_computes_each_turn_of_each_expert(tokens: list[int], size: int) -> None:
    placement = chosen(tokens, size, 2)
    computed = torch.zeros(EXPERTS, WAYS, dtype=torch.int64)
    for rank in range(size):
        copies, (layer,) = copies_of(rank, size, 2)
        copies.place({0: placement})
        assert layer.slots is not None
        held = [*range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size), *placement[rank], NOTHING]
        found = torch.tensor(held)[layer.slots]
        assert ((found == torch.arange(EXPERTS)[:, None]) | (found == NOTHING)).all()
        computed += found != NOTHING
    assert (computed == 1).all()


def test_copies_change_only_where_that_is_worth_it_and_stay_in_their_slots() -> None:
    none, uneven = [[NOTHING] * 2] * 4, [90, 80, 10, 10, 10, 10, 10, 10]
    assert better([10] * EXPERTS, none) is None
    assert better([0] * EXPERTS, none) is None
    first = better(uneven, none)
    assert first is not None
    assert better(uneven, first) is None
    assert better([93, 79, 10, 11, 10, 10, 10, 12], first) is None
    after = better([90, 80, 10, 10, 10, 70, 10, 10], first)
    assert after is not None
    stayed = 0
    for now, then in zip(first, after, strict=True):
        for expert in {*now} & {*then} - {NOTHING}:
            assert now.index(expert) == then.index(expert)
            stayed += 1
    assert stayed and after != first


def count(load: ExpertLoad, num_layers: int, chosen: list[list[int]]) -> None:
    """Count a step in which all layers choose the same experts."""
    for number in range(num_layers):
        load.of_layer(number)(torch.tensor(chosen))
    load.add(torch.arange(len(chosen)))


def test_layers_take_turns_and_are_chosen_by_the_tokens_of_the_last_interval() -> None:
    copies, _ = copies_of(0, 2, 1, num_layers=3)
    load = ExpertLoad(3, EXPERTS, 2, torch.device("cpu"))
    count(load, 3, [[4, 5]] * 100)
    chooser = CopyChooser(copies, load, 2)
    assert [chooser.next_changes() for _ in range(2)] == [{}, {}], "these tokens were before"
    count(load, 3, [[0, 1], [0, 4]])
    now, next_step = chooser.next_changes(), chooser.next_changes()
    assert now == {0: [[NOTHING], [0]], 2: [[NOTHING], [0]]}
    assert next_step == {1: [[NOTHING], [0]]}
    count(load, 3, [[0, 1], [0, 4]])
    assert [chooser.next_changes() for _ in range(2)] == [{}, {}], "the copies fit"


def test_the_imbalance_is_that_of_the_ranks_that_compute() -> None:
    load = ExpertLoad(1, EXPERTS, 2, torch.device("cpu"))
    chooser = CopyChooser(copies_of(0, 2, 1)[0], load, 1)
    chosen = [[0, 4], [0, 1]] * 1200
    count(load, 1, chosen)
    assert load.imbalance() == 1.5
    assert chooser.next_changes() == {0: [[NOTHING], [0]]}
    count(load, 1, chosen)
    assert load.imbalance() == 1.0
