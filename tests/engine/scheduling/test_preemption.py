"""Too little memory: which request is preempted, where its KV comes back from, and that all get their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import NeverFits
from engine.host_tier.host_pool import HostAccount
from engine.host_tier.swap import MODES
from engine.values.plan import StepPlan
from tests.engine.support.script import Script
from tests.support.examples import examples

A, B = range(1, 33), range(100, 132)
"""Prompts of two requests that do not both fit to their ends in 24 pages of 4 tokens."""


def pressed(**options: Any) -> tuple[Script, str, str]:
    """Two requests at the moment when the younger has been preempted."""
    script = Script(**{"num_pages": 24, "page_size": 4, "host_pages": 24, **options})
    a, b = script.arrive(A, max_tokens=30), script.arrive(B, max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    assert not script.is_running(b)
    return script, a, b


def finish(script: Script) -> None:
    """Run to the end: every request got its tokens, and no page is held."""
    script.run()
    for name in script.requests:
        assert script.tokens(name) == script.undisturbed(name)
    assert script.nothing_held()


def num_computed(script: Script) -> int:
    return sum(plan.num_tokens for plan in script.runner.plans)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_ten_times_the_memory_finishes_in_every_mode(mode: str, page_size: int, overlap: bool) -> None:
    """Twenty requests of 39 tokens each in 64 tokens of memory, some of them beginning alike."""
    script = Script(64 // page_size, page_size, overlap=overlap, host_pages=640 // page_size, preemption=mode)
    for i in range(20):
        script.arrive([*[i % 4 + 1] * 8, i, *range(200, 210)], max_tokens=20)
    finish(script)
    load = script.scheduler.load(script.now)
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0) == (mode != "recompute")
    assert script.cache.stats.recompute_query_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_that_the_tree_lost_come_back_from_the_host(prefix_cache: bool, overlap: bool) -> None:
    """Nothing is computed twice, not even the 7 tokens of the last page, which is not full."""
    script, _, b = pressed(prefix_cache=prefix_cache, overlap=overlap)
    finish(script)
    assert num_computed(script) == 2 * (32 + 30 - 1)
    timings = script.events[b][-1].timings
    assert timings is not None and (timings.num_preemptions > 0, timings.num_recomputed) == (True, 0)
    stats = script.cache.stats
    assert stats.recompute_host_tokens > 0
    assert (stats.query_tokens, stats.hit_tokens) == (64, 0), "a preemption is no query and no hit"


def test_pages_that_come_back_begin_where_the_tree_ends() -> None:
    script, _, b = pressed()
    kept = script.cache.peek(script.requests[b].namespace, script.requests[b].tokens)
    script.run(until=lambda: script.is_running(b))
    (plan,) = [plan for plan in script.runner.plans if plan.swap_in]
    (chunk,) = [chunk for chunk in plan.chunks if chunk.request.request_id == b]
    found = len(chunk.pages) - len(plan.swap_in) - (chunk.start % 4 == 0)
    assert 0 < found <= kept // 4, "these pages are the tree's"
    assert chunk.num_tokens == 1, "it goes on where it was"
    finish(script)


def test_pages_that_come_back_can_be_shared_again() -> None:
    script, _, b = pressed()
    script.run(until=lambda: script.is_running(b))
    script.step()
    assert script.cache.peek(script.requests[b].namespace, [*B, 0]) == 32
    finish(script)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_resumes_inside_a_page_of_which_the_tree_has_a_part(overlap: bool) -> None:
    """A more important request takes all its pages and begins with its first 6 tokens: page 1 is the host's."""
    script, _, b = pressed(overlap=overlap)
    more = 24 * 4 - script.scheduler.account().locked * 4 - 16
    c = script.arrive([*B[:6], *range(300, 300 + more)], max_tokens=1, priority=-100)
    script.run(until=lambda: script.reason(c) is not None)
    assert script.cache.peek(script.requests[b].namespace, script.requests[b].tokens) == 6
    script.run(until=lambda: script.is_running(b))
    assert script.requests[b].num_recomputed == 0
    finish(script)


def test_pages_that_the_tree_still_has_are_not_copied_back() -> None:
    script, a, b = pressed()
    script.abort(a)
    script.step()
    assert script.is_running(b)
    finish_b = script.undisturbed(b)
    script.run()
    assert script.tokens(b) == finish_b
    assert sum(len(plan.swap_in) for plan in script.runner.plans) <= 1, "at most the page that a took"
    assert script.nothing_held()


def test_pages_that_others_also_hold_are_not_copied_out() -> None:
    """24 of 32 + 11 tokens are shared with the older request: six pages of eleven stay where they are."""
    script = Script(num_pages=18, page_size=4, host_pages=24)
    common = list(range(1, 25))
    script.arrive([*common, *range(50, 58)], max_tokens=30)
    script.step()
    b = script.arrive([*common, *range(60, 68)], max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    (plan,) = [plan for plan in script.runner.plans if plan.swap_out]
    assert len(plan.swap_out) == -(-script.requests[b].num_computed // 4) - 6
    finish(script)


def test_a_full_host_pool_leaves_it_to_be_computed_again() -> None:
    script, _, b = pressed(host_pages=5)
    assert script.scheduler.load(script.now).num_swapped == 0
    finish(script)
    assert script.requests[b].num_recomputed > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_while_it_waits_gives_the_host_pages_back(overlap: bool) -> None:
    script, a, b = pressed(overlap=overlap)
    assert script.host.account().held > 0
    script.abort(b)
    script.step()
    assert script.host.account() == HostAccount(24, 0)
    script.run()
    assert script.tokens(a) == script.undisturbed(a)
    assert script.reason(b) == "abort" and script.nothing_held()


@pytest.mark.parametrize("goes_away", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_a_failed_step_should_have_copied_are_computed_again(overlap: bool, goes_away: bool) -> None:
    """The younger survives: it was no part of that step, and its copies are not trusted. Not even if the older
    goes away while that step is in flight, so that there is room for the younger in the next one."""
    script = Script(num_pages=24, page_size=4, host_pages=24, overlap=overlap)
    schedule = script.scheduler.schedule

    def failing(now: float) -> StepPlan:
        plan = schedule(now)
        if plan.swap_out:
            script.runner.fail_next = True
            if goes_away:
                script.abort(a)
        return plan

    script.scheduler.schedule = failing  # type: ignore[method-assign]
    a, b = script.arrive(A, max_tokens=30), script.arrive(B, max_tokens=30)
    script.run(until=lambda: script.reason(a) is not None)
    assert script.reason(a) in ("error", "abort")
    script.run()
    assert script.tokens(b) == script.undisturbed(b)
    assert script.nothing_held()


def test_a_request_preempted_while_it_waits_for_its_turn_keeps_its_place() -> None:
    """No newcomer, however small, is admitted before it."""
    script, _, b = pressed()
    c = script.arrive([7, 8, 9], max_tokens=2)
    script.run(until=lambda: bool(script.tokens(c)))
    assert script.is_running(b) or script.reason(b) is not None
    finish(script)


def test_a_preempted_request_comes_back_only_with_room_to_grow() -> None:
    """Twelve requests, of which one and a quarter fit to their ends: let in for a token or so, some would lose
    what they hold five times."""
    script = Script(num_pages=200, page_size=1, preemption="recompute")
    for i in range(12):
        script.arrive([i + 1] * 10, max_tokens=150)
    finish(script)
    assert max(request.num_preemptions for request in script.requests.values()) <= 3


@pytest.mark.parametrize("num_prompt", [14, 18])
def test_the_only_request_gets_the_pages_that_its_path_holds_twice(num_prompt: int) -> None:
    """All 20 tokens of memory for one request; its first 12 lie in 3 pages, but the tree needs a fourth for them.

    It must neither wait for ever (18: its prompt does not fit beside that page) nor be preempted (14).
    """
    script = Script(num_pages=5, page_size=4)
    for tokens in ([0] * 10, [0] * 10 + [1, 1], [0] * 10 + [2, 2]):
        script.arrive(tokens, max_tokens=1)
        script.run()
    c = script.arrive([0] * 10 + [2, 2] + [3] * (num_prompt - 12), max_tokens=20 - num_prompt)
    finish(script)
    assert script.requests[c].num_preemptions == 0
    assert script.requests[c].num_cached == 12


def test_a_prompt_gets_its_reserved_pages_before_younger_requests_grow() -> None:
    """The older prompt takes many steps and is part of each; the younger request beside it is preempted."""
    script = Script(num_pages=28, page_size=4, limits={"max_step_tokens": 8, "max_running": 4})
    old = script.arrive(range(1, 97), max_tokens=4)
    young = script.arrive([200] * 4, max_tokens=60)
    script.run(until=lambda: bool(script.tokens(old)))
    assert all(old in [chunk.request.request_id for chunk in plan.chunks] for plan in script.runner.plans)
    finish(script)
    assert script.requests[old].num_preemptions == 0
    assert script.requests[young].num_preemptions > 0


Operation = tuple[str, int, int, int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "step", "step", "step", "abort", "fail"]),
        st.integers(0, 2),
        st.integers(1, 400),
        st.integers(1, 400),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    operations,
    st.sampled_from([(1, 40), (3, 12), (4, 9), (16, 4)]),
    st.sampled_from(sorted(MODES)),
    st.sampled_from([0, 0.3, 2]),
    st.booleans(),
    st.booleans(),
)
def test_any_pressure_is_survived(
    script_of: list[Operation],
    memory: tuple[int, int],
    mode: str,
    host_share: float,
    overlap: bool,
    prefix_cache: bool,
) -> None:
    """Requests of up to all the memory each, in any mode: all get their tokens, and the last one stays."""
    page_size, num_pages = memory
    script = Script(
        num_pages,
        page_size,
        {"max_step_tokens": 16, "max_running": 4},
        prefix_cache,
        overlap,
        int(num_pages * host_share),
        mode,
    )
    for action, family, length, more in script_of:
        if action == "arrive":
            capacity = num_pages * page_size
            prompt = [family + 1] * (length % capacity + 1) + [50 + more % 3] * (more % 5)
            try:
                script.arrive(prompt, max_tokens=max(1, (capacity - len(prompt)) // (1 + more % 3)), seed=family)
            except NeverFits:
                continue
        elif action == "abort" and script.requests:
            script.abort(f"r{length % len(script.requests)}")
        elif action == "fail":
            script.runner.fail_next = family == 0
        else:
            script.step()
    script.runner.fail_next = False
    script.run()
    for plan in script.runner.plans:
        assert not plan.preempted or plan.chunks, "some request goes on"
    for name, request in script.requests.items():
        if script.events[name]:
            assert script.tokens(name) == script.undisturbed(name)[: len(script.tokens(name))]
            assert script.reason(name) in ("length", "abort", "error")
            assert request.num_preemptions <= request.longest.bit_length() + 1
    assert script.nothing_held()
