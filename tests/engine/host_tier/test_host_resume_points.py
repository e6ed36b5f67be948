"""What prefixes need at their ends beside pages, in host memory: recurrent states, and pages of windows.

The runner notices what is copied wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCacheManager, Namespace, Window
from engine.host_tier.host_pool import HostPool
from engine.host_tier.host_resume_points import HostStates
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.histories import Action, histories, play, served
from tests.engine.support.script import Script
from tests.support.examples import examples

SYSTEM = list(range(1, 41))
ONE_AT_A_TIME = {"max_running": 1, "max_step_tokens": 64}


def hybrid(**options: Any) -> Script:
    made = {"state_slots": 12, "num_pages": 64, "host_pages": 60, "limits": ONE_AT_A_TIME, "overlap": True}
    return Script(**{**made, **options})


def windowed(**options: Any) -> Script:
    made = {"window": (8, 2), "num_pages": 80, "host_pages": 80, "limits": ONE_AT_A_TIME, "overlap": True}
    return Script(**{**made, **options})


def forget_device(script: Script, first: int = 500, count: int = 6) -> None:
    """Have the device give all that it holds to others."""
    for number in range(first, first + 100 * count, 100):
        served(script, list(range(number, number + 90)), max_tokens=2)


def copied_in(script: Script) -> tuple[int, int]:
    """Count the pages and the states that were copied from the host."""
    plans = script.runner.plans
    return sum(len(plan.swap_in) for plan in plans), sum(len(plan.states_in) for plan in plans)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("make", [hybrid, windowed])
def test_preempted_requests_resume_from_host_memory(make: Any, page_size: int) -> None:
    """Three requests in memory for less than two, each of which is computed once and no token more."""
    pages = {hybrid: 128, windowed: 256}[make] // page_size
    limits = {"max_step_tokens": 16, "max_running": 3}
    script = make(
        num_pages=pages, page_size=page_size, host_pages=400, state_slots=4 * (make is hybrid), limits=limits
    )
    names = [script.arrive([i, *range(1, 25)], max_tokens=60) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    load = script.scheduler.load(script.now)
    assert load.num_swapped == load.num_preemptions > 0
    assert sum(script.requests[name].num_recomputed for name in names) == 0
    assert script.nothing_held()


def test_swapped_states_lack_drafts_that_were_right_and_these_are_computed_again() -> None:
    limits = {"max_step_tokens": 64, "max_running": 3}
    script = hybrid(num_pages=30, state_slots=4, host_pages=400, limits=limits, drafter=ScriptedDrafts(right=0.6))
    names = [script.arrive([i, *range(1, 25)], max_tokens=60) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    load = script.scheduler.load(script.now)
    assert load.num_swapped and copied_in(script)[1]
    assert 0 < sum(script.requests[name].num_recomputed for name in names) <= 5 * load.num_preemptions


def test_a_state_that_made_room_for_others_comes_back_to_the_pages_that_stayed() -> None:
    script = hybrid(state_slots=3, num_pages=256)
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    forget_device(script)
    assert script.cache.peek(script.requests["r0"].namespace, [*SYSTEM, 50, 51, 52]) == 0
    assert served(script, [*SYSTEM, 50, 51, 52], max_tokens=1) == 40
    assert copied_in(script) == (0, 1)
    assert served(script, [*SYSTEM, 50, 51, 53], max_tokens=1) == 40
    assert copied_in(script) == (0, 1), "it is on the device again"


@pytest.mark.parametrize("make", [hybrid, windowed])
def test_a_prefix_comes_back_with_its_pages_and_its_end(make: Any) -> None:
    script = make()
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    forget_device(script)
    found = script.cache.find(script.requests["r0"].namespace, [*SYSTEM, 50, 51, 52])
    assert found == (0, 0)
    assert served(script, [*SYSTEM, 50, 51, 52], max_tokens=1) == 40
    rows, states = {hybrid: (0, 1), windowed: (2 * 2, 0)}[make]
    assert copied_in(script) == (10 + rows, states)
    assert served(script, [*SYSTEM, 50, 51, 53], max_tokens=1) == 40
    assert copied_in(script) == (10 + rows, states), "it is on the device again"


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_the_next_turn_continues_from_the_end_of_an_answer_in_host_memory(page_size: int) -> None:
    """The state lies inside a page, of which host memory keeps the begun part with it."""
    script = hybrid(page_size=page_size, num_pages=256 // page_size, host_pages=600, host_min_uses=1)
    name = script.arrive(SYSTEM, max_tokens=10)
    script.run()
    history = [*SYSTEM, *script.tokens(name)]
    forget_device(script)
    assert script.cache.find(script.requests[name].namespace, history) == (0, 0)
    assert served(script, [*history, 500, 501]) == len(history) - 1


@pytest.mark.parametrize("make", [hybrid, windowed])
def test_a_prefix_that_was_used_once_is_not_copied_unless_all_are(make: Any) -> None:
    for min_uses, expected in ((2, 0), (1, 40)):
        script = make(host_min_uses=min_uses)
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
        forget_device(script, count=3)
        assert served(script, [*SYSTEM, 50, 51], max_tokens=1) == expected


@pytest.mark.parametrize("make", [hybrid, windowed])
def test_a_step_that_fails_leaves_nothing_in_host_memory(make: Any) -> None:
    script = make()
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    script.runner.fail_if = lambda plan: bool(plan.swap_out or plan.states_out)
    while not script.runner.failed:
        script.arrive(list(range(100 * len(script.requests), 100 * len(script.requests) + 90)), max_tokens=2)
        script.run()
    script.runner.fail_if = lambda plan: False
    account = script.host.account()
    assert account.held == account.arriving == 0
    forget_device(script)
    served(script, [*SYSTEM, 50, 51, 52], max_tokens=1)
    assert script.nothing_held()


def test_the_least_recently_used_state_goes_before_the_pages_that_lead_to_it() -> None:
    """Host memory for two prefixes of ten pages and a state of two, when a third comes."""
    script = hybrid(host_pages=24)
    prompts = [[1000 * i, *SYSTEM, 50] for i in (1, 2, 3)]
    for prompt in prompts:
        for _ in range(2):
            served(script, prompt, max_tokens=1)
    forget_device(script)
    assert script.host.num_evicted == 12
    assert [served(script, prompt, max_tokens=1) for prompt in reversed(prompts)] == [40, 40, 0]


def test_a_state_that_a_lease_drives_out_does_not_take_the_place_of_the_lease_s_own() -> None:
    """Host memory for one state of two pages. The first prompt's is there, the second's about to go."""
    script = hybrid(num_pages=256, state_slots=2, host_pages=3)
    for first in (1000, 2000):
        for _ in range(2):
            served(script, [first, *SYSTEM, 50], max_tokens=1)
    assert script.host.account().cached == 2
    assert served(script, [1000, *SYSTEM, 50], max_tokens=1) == 40
    assert copied_in(script) == (0, 1)


@pytest.mark.parametrize("options", [{"num_state_slots": 3}, {"window": Window(4, 1, 8)}])
def test_pages_that_an_ended_lease_waited_for_are_not_kept(options: dict[str, Any]) -> None:
    cache = KVCacheManager(32, 4, **options)
    first = cache.lock(cache.match(Namespace("m"), SYSTEM, 0.0))
    cache.extend(first, 40, 0.0)
    cache.insert(first, SYSTEM, 0.0)
    lease = cache.lock(cache.match_bare(Namespace("m"), SYSTEM, 36, 1.0))
    assert lease.num_cached == 36 and lease.state is not None
    lease.state.await_at(36)
    cache.finish(lease, SYSTEM[:36], 1.0)
    cache.finish(first, [], 2.0)
    assert cache.find(Namespace("m"), SYSTEM) == (0, 39)
    assert sum(cache.state_account()[1:]) == 0


def test_states_count_as_the_host_pages_that_they_take() -> None:
    script = hybrid(state_pages=7)
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    forget_device(script)
    account = script.host.account()
    assert (account.cached, account.total) == (10 + 7, 60)
    assert script.host.traffic.pages_out == 17
    assert script.scheduler.reset_cache() and script.host.account().free == 60


def test_where_host_memory_holds_less_than_a_state_nothing_is_wrong() -> None:
    script = hybrid(host_pages=3, state_pages=5)
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    forget_device(script)
    assert served(script, [*SYSTEM, 50, 51], max_tokens=1) == 0
    assert copied_in(script) == (0, 0)


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 40), (5.0, 0)])
def test_a_prefix_is_copied_back_where_that_is_sooner_than_computing_it(seconds: float, expected: int) -> None:
    """Forty tokens of one a second; ten pages and two of the state."""
    script = hybrid()
    for _ in range(2):
        served(script, [*SYSTEM, 50, 51], max_tokens=1)
    forget_device(script)
    pool: HostPool = script.host.pool
    pool.page_seconds = seconds
    request = script.requests["r0"]
    found = script.cache.find(request.namespace, request.tokens)
    assert script.host.reach(request, found, 1.0) == expected
    script.host.forget("r0")


def test_stale_notes_of_states_are_forgotten() -> None:
    script = hybrid(host_pages=14, host_min_uses=1)
    for number in range(60):
        served(script, [number, *range(100, 141)], max_tokens=1)
    ends = script.host._ends
    assert isinstance(ends, HostStates) and sum(map(len, ends._begun.values())) <= 2 * 14 + 1


@settings(max_examples=examples(100), deadline=None)
@given(
    histories(longest_prompt=30, fewest=30),
    st.sampled_from([(11, 4), (42, 1), (15, 3)]),
    st.sampled_from([(0, 0), (0, 6), (1, 1), (5, 1), (9, 2)]),
    st.sampled_from([(20, 2), (60, 1), (90, 3)]),
    st.booleans(),
    st.sampled_from([None, None, 0.6]),
    st.sampled_from([3, 16, 64]),
    st.integers(1, 2),
)
def test_under_pressure_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[Action],
    shape: tuple[int, int],
    kind: tuple[int, int],
    host: tuple[int, int],
    overlap: bool,
    right: float | None,
    step_tokens: int,
    host_min_uses: int,
) -> None:
    """Device memory for one or two of three requests, and few slots; `kind`: a window and its groups, or without a
    window the slots for snapshots.
    """
    (num_pages, page_size), (window, number) = shape, kind
    script = Script(
        num_pages=num_pages if not window else num_pages + 3 * number * (-(-(window + step_tokens) // page_size)),
        page_size=page_size,
        state_slots=0 if window else 3 + number,
        window=(window, number) if window else None,
        overlap=overlap,
        limits={"max_running": 3, "max_step_tokens": step_tokens},
        drafter=None if right is None else ScriptedDrafts(right=right),
        host_pages=host[0],
        state_pages=host[1],
        host_min_uses=host_min_uses,
    )
    play(script, actions)
    assert script.host.account().free == script.host_pages
    snapshots = script.cache.snapshots
    assert snapshots is None or snapshots.account().free == script.state_slots
