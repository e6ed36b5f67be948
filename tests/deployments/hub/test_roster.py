"""The hub's roster: how many ingresses take requests, as they come, leave, fall silent, and as hubs change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.hub.roster import ABSENT_S, MAX_INGRESSES, Roster


def grown_up() -> Roster:
    """A roster of a hub that has run for long enough to have heard of everybody."""
    return Roster(born=-ABSENT_S)


def test_a_process_that_reports_its_presence_counts_until_it_leaves() -> None:
    roster = grown_up()
    assert [roster.here(name, 0.0) for name in ("a", "b", "a", "c")] == [1, 2, 2, 3]
    roster.leave("b")
    roster.leave("never came")
    assert roster.here("a", 1.0) == 2


def test_a_silent_process_counts_until_it_has_been_silent_for_long() -> None:
    roster = grown_up()
    roster.here("dies", 0.0)
    assert roster.here("a", ABSENT_S) == 2
    assert roster.here("a", ABSENT_S + 0.01) == 1
    assert roster.here("dies", ABSENT_S + 0.02) == 2  # it was only busy


def test_a_new_hub_gives_no_number_until_every_process_could_have_reported() -> None:
    roster = Roster(born=100.0)
    assert roster.here("a", 100.5) is None
    assert roster.here("b", 100.0 + ABSENT_S - 0.01) is None
    assert roster.here("a", 100.0 + ABSENT_S) == 2


def test_names_without_end_take_bounded_memory() -> None:
    roster = grown_up()
    numbers = [roster.here(f"i{number}", 0.0) for number in range(MAX_INGRESSES + 10)]
    assert numbers[-1] == MAX_INGRESSES


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans(), st.floats(0, ABSENT_S)), max_size=60))
def test_the_number_is_that_of_the_processes_that_reported_lately(events: list[tuple[str, bool, float]]) -> None:
    roster, now, last = grown_up(), 0.0, dict[str, float]()
    for name, leaves, pause in events:
        now += pause
        if leaves:
            roster.leave(name)
            last.pop(name, None)
            continue
        last[name] = now
        assert roster.here(name, now) == sum(now - at <= ABSENT_S for at in last.values())
