"""Turns among names; tests/deployments/admission/test_fair_queue.py tests what holds for tenants in a queue."""

from __future__ import annotations

from engine.tenants.round_robin import DeficitRoundRobin


def test_a_name_that_cannot_proceed_now_keeps_its_turn() -> None:
    turns = DeficitRoundRobin(100)
    for name in ("a", "b", "c"):
        turns.join(name)
    first = turns.turn()
    assert first == "c"
    assert turns.turn(among={"a", "b"}) == "b"
    turns.charge("b", 40)
    assert turns.turn(among={"a", "b"}) == "b", "its turn goes on"
    turns.charge("b", 60)
    assert turns.turn(among={"a", "b"}) == "a"
    assert turns.turn() == "c"
    assert turns.credit("c") == 100


def test_none_of_the_names_asked_for_takes_part() -> None:
    turns = DeficitRoundRobin(100)
    assert turns.turn() is None
    turns.join("a")
    assert turns.turn(among={"b"}) is None


def test_only_those_named_take_part_and_debts_outlast_a_change_of_all() -> None:
    turns = DeficitRoundRobin(100)
    turns.take_part(["a", "b"])
    turns.charge("a", 250)
    turns.take_part(["c"])
    assert (turns.turn(), turns.turn(among={"a"}), turns.num_known) == ("c", None, 3)
    turns.take_part(["a", "c"])
    turns.charge("c", 100)
    assert turns.turn() == "c", "a name that owes a turn waits"
    turns.take_part([])
    assert (turns.turn(), turns.num_known) == (None, 0)


def test_the_only_name_pays_its_debt_immediately_and_others_begin_level() -> None:
    turns = DeficitRoundRobin(100)
    turns.join("a")
    turns.charge("a", 5000)
    assert turns.turn() == "a"
    assert 0 < turns.credit("a") <= 100
    turns.join("b")
    taken = {"a": 0, "b": 0}
    for _ in range(100):
        name = turns.turn()
        assert name is not None
        taken[name] += 10
        turns.charge(name, 10)
    assert abs(taken["a"] - taken["b"]) <= 100
