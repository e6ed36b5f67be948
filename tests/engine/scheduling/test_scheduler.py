"""Scenarios of the scheduler through the loop, each ending with no page held."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import NeverFits, QueueFull
from tests.engine.support.script import Script
from tests.support.examples import examples


def test_one_request_gets_its_tokens_and_leaves_nothing_behind() -> None:
    script = Script()
    a = script.arrive(range(1, 11), max_tokens=5)
    script.run()
    assert script.tokens(a) == script.undisturbed(a)
    assert script.reason(a) == "length"
    assert script.nothing_held()


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_the_next_turn_finds_the_whole_conversation(page_size: int) -> None:
    """The first turn is reused except for its last token, whose KV was never computed."""
    script = Script(num_pages=256, page_size=page_size)
    a = script.arrive(range(1, 20), max_tokens=9)
    script.run()
    history = [*range(1, 20), *script.tokens(a)]
    b = script.arrive([*history, 500, 501], max_tokens=4)
    script.run()
    assert script.tokens(b) == script.undisturbed(b)
    assert script.events[b][-1].num_cached == len(history) - 1
    assert script.nothing_held()


def test_the_same_prompt_twice_computes_one_token() -> None:
    script = Script()
    script.arrive(range(1, 40))
    script.run()
    b = script.arrive(range(1, 40))
    script.run()
    assert script.events[b][-1].num_cached == 38
    assert script.tokens(b) == script.undisturbed(b)


def test_a_burst_that_begins_alike_computes_the_common_part_once() -> None:
    script = Script(num_pages=512, limits={"max_step_tokens": 300, "max_running": 64})
    system = list(range(1, 101))
    names = [script.arrive([*system, 200 + i, 300 + i], max_tokens=3) for i in range(10)]
    script.run()
    computed = sum(plan.num_tokens for plan in script.runner.plans)
    assert computed < 100 + 10 * (2 + 3) + 10
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_waiting_for_another_requests_page_is_distinguished_from_waiting_for_room() -> None:
    script = Script(num_pages=512, limits={"max_step_tokens": 120, "max_running": 2})
    system = list(range(1, 101))
    for i in range(4):
        script.arrive([*system, 200 + i])
    script.step()
    load = script.scheduler.load(script.now)
    assert (load.num_running, load.num_waiting, load.num_deferred) == (1, 3, 3)
    script.run(until=lambda: script.scheduler.load(script.now).num_running == 2)
    load = script.scheduler.load(script.now)
    assert (load.num_waiting, load.num_deferred) == (2, 0), "two run, the most there may be"
    script.run()
    assert script.scheduler.load(script.now).num_deferred == 0


def test_namespaces_share_nothing() -> None:
    script = Script()
    script.arrive(range(1, 20), salt="one")
    script.run()
    b = script.arrive(range(1, 20), salt="two")
    script.run()
    assert script.events[b][-1].num_cached == 0


def test_decodes_continue_while_a_long_prompt_is_computed() -> None:
    script = Script(num_pages=600, limits={"max_step_tokens": 64, "max_running": 8})
    a = script.arrive(range(1, 9), max_tokens=40)
    script.step()
    script.arrive(range(1, 1000), max_tokens=2)
    for _ in range(10):
        before = len(script.tokens(a))
        script.step()
        assert len(script.tokens(a)) == before + 1
    script.run()
    assert script.nothing_held()


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """Prompts of 2,000, 50 and 100 tokens at once, 256 tokens a step: the short ones answer in the first step."""
    script = Script(num_pages=600, page_size=16, limits={"max_step_tokens": 256, "max_running": 8})
    long = script.arrive([1] * 2000, max_tokens=2)
    short = [script.arrive([i] * n, max_tokens=2) for i, n in ((2, 50), (3, 100))]
    script.step()
    assert all(script.tokens(name) for name in short)
    assert script.requests[long].num_computed >= 64
    script.run()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    script = Script(num_pages=2000, page_size=16, limits={"max_step_tokens": 64, "max_running": 8})
    long = script.arrive([1] * 640, max_tokens=1)
    for i in range(160):  # a sixteenth of each step is its own
        if script.reason(long) is not None:
            break
        for j in range(2):
            script.arrive([2 + 2 * i + j] * 50, max_tokens=1)
        script.step()
    assert script.reason(long) == "length"


def test_a_preempted_request_continues_with_the_same_tokens() -> None:
    """Memory holds one and a half of two requests: the newer is preempted and resumes with the same tokens."""
    script = Script(num_pages=24, page_size=4)
    a = script.arrive(range(1, 33), max_tokens=30)
    b = script.arrive(range(100, 132), max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    assert not script.is_running(b)
    script.run()
    assert script.requests[a].num_preemptions == 0
    assert script.tokens(a) == script.undisturbed(a)
    assert script.tokens(b) == script.undisturbed(b)
    assert script.nothing_held()


def test_recompute_after_preemption_is_not_a_hit() -> None:
    script = Script(num_pages=24, page_size=4)
    script.arrive(range(1, 33), max_tokens=30)
    b = script.arrive(range(100, 132), max_tokens=30)
    script.run()
    stats = script.cache.stats
    assert script.requests[b].num_preemptions > 0
    assert stats.hit_tokens == 0
    assert stats.query_tokens == 64
    assert stats.recompute_query_tokens > 0


def test_low_priority_is_preempted_first() -> None:
    script = Script(num_pages=24, page_size=4)
    low = script.arrive(range(1, 33), max_tokens=30, priority=1)
    high = script.arrive(range(100, 132), max_tokens=30, priority=-1)
    script.run()
    assert script.requests[high].num_preemptions == 0
    assert script.requests[low].num_preemptions > 0
    assert script.tokens(low) == script.undisturbed(low)


def test_an_overcommitted_engine_finishes_everything() -> None:
    """Twenty requests that would need ten times the pages: all finish, all as if alone."""
    script = Script(num_pages=16, page_size=4)
    names = [script.arrive([i + 1] * 20, max_tokens=12) for i in range(20)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    assert script.nothing_held()


def test_a_request_that_can_never_fit_is_refused_at_its_arrival() -> None:
    script = Script(num_pages=4, page_size=4)
    with pytest.raises(NeverFits, match="at most 16"):
        script.arrive(range(1, 12), max_tokens=8)
    with pytest.raises(NeverFits, match="empty"):
        script.arrive([], max_tokens=1)
    assert not script.loop.has_work
    exact = script.arrive(range(1, 12), max_tokens=5)
    script.run()
    assert len(script.tokens(exact)) == 5


def test_a_pool_filled_by_one_request_serves_it_again_from_the_cache() -> None:
    """The partial match's source page and its copy do not both fit: the partial match is given up."""
    script = Script(num_pages=4, page_size=4)
    for _ in range(3):
        name = script.arrive(range(1, 12), max_tokens=5)
        script.run()
        assert script.tokens(name) == script.undisturbed(name)
    assert script.nothing_held()


def test_a_full_queue_refuses_a_request_and_the_others_continue() -> None:
    script = Script(limits={"max_waiting": 3, "max_running": 2})
    names = [script.arrive([i + 1] * 5) for i in range(3)]
    with pytest.raises(QueueFull, match="3 requests"):
        script.arrive([9] * 5)
    script.run()
    assert all(script.reason(name) == "length" for name in names)


def test_a_queue_full_of_tokens_refuses_but_takes_any_request_when_empty() -> None:
    script = Script(limits={"max_waiting_tokens": 20, "max_running": 1})
    first = script.arrive([1] * 30)
    with pytest.raises(QueueFull, match="30 prompt tokens"):
        script.arrive([2] * 5)
    script.step()
    script.arrive([2] * 15)
    with pytest.raises(QueueFull, match="the limit is 20"):
        script.arrive([3] * 6)
    script.run()
    assert script.reason(first) == "length"


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment_frees_everything_within_one_step(steps: int) -> None:
    script = Script(num_pages=100, limits={"max_step_tokens": 16, "max_running": 4})
    a = script.arrive(range(1, 50), max_tokens=5)
    b = script.arrive(range(1, 60), max_tokens=50)
    for _ in range(steps):
        script.step()
    script.abort(b)
    script.abort(b)
    script.abort("unknown")
    script.step()
    assert script.reason(b) == "abort"
    assert not script.is_running(b)
    script.run()
    assert script.tokens(a) == script.undisturbed(a)
    assert script.nothing_held()


def test_eos_ends_and_min_tokens_and_ignore_eos_hold_it_off() -> None:
    script = Script()
    stops, ignores, later = (
        script.arrive(range(1, 9), max_tokens=6),
        script.arrive(range(1, 9), max_tokens=6, ignore_eos=True),
        script.arrive(range(1, 9), max_tokens=6, min_tokens=4),
    )
    for name in (stops, ignores, later):
        script.runner.eos_after[name] = 2
    script.run()
    assert (script.reason(stops), len(script.tokens(stops))) == ("stop", 3)
    assert (script.reason(ignores), len(script.tokens(ignores))) == ("length", 6)
    assert (script.reason(later), len(script.tokens(later))) == ("length", 6)


def test_a_request_resumed_from_another_engine_continues_exactly() -> None:
    whole = Script()
    a = whole.arrive(range(1, 20), max_tokens=12)
    whole.run()
    tokens = whole.tokens(a)
    for cut in (1, 5, 11):
        script = Script()
        b = script.arrive(range(1, 20), max_tokens=12, output_ids=tokens[:cut])
        script.run()
        assert script.tokens(b) == tokens[cut:]
        assert script.cache.stats.query_tokens == 0  # a migration's recompute is not a query


def test_a_failed_step_ends_its_requests_and_poisons_nothing(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(limits={"max_running": 1})
    a = script.arrive(range(1, 20))
    b = script.arrive(range(1, 20))
    script.step()
    script.runner.fail_next = True
    script.step()
    assert script.reason(a) == "error"
    assert f"a step of 1 requests failed: {a}" in caplog.messages
    script.run()
    assert script.tokens(b) == script.undisturbed(b)
    assert script.nothing_held()


def test_without_prefix_cache_nothing_is_found_and_nothing_leaks() -> None:
    script = Script(prefix_cache=False)
    for _ in range(2):
        name = script.arrive(range(1, 30))
        script.run()
    assert script.events[name][-1].num_cached == 0
    assert script.scheduler.account().free == script.num_pages


Operation = tuple[str, int, int, int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "step", "step", "step", "abort"]),
        st.integers(0, 3),
        st.integers(1, 30),
        st.integers(1, 15),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(operations, st.sampled_from([1, 2, 5, 16]), st.integers(8, 40), st.integers(4, 64))
def test_any_workload_gives_each_request_its_own_tokens(
    script_of: list[Operation], page_size: int, num_pages: int, max_step_tokens: int
) -> None:
    """Arrivals, aborts and steps in any order, prompts that share prefixes, few pages: all tokens are right."""
    limits: dict[str, Any] = {"max_step_tokens": max_step_tokens, "max_running": 4}
    script = Script(num_pages, page_size, limits)
    for action, family, length, more in script_of:
        if action == "arrive":
            prompt = [*([family + 1] * length), *range(50, 50 + more)]
            try:
                script.arrive(prompt, max_tokens=more, priority=family % 2, seed=family)
            except NeverFits:
                continue
        elif action == "abort" and script.requests:
            script.abort(f"r{length % len(script.requests)}")
        else:
            script.step()
    script.run()
    for name in script.requests:
        if script.events[name]:
            expected = script.undisturbed(name)
            assert script.reason(name) in ("length", "abort")
            assert script.tokens(name) == expected[: len(script.tokens(name))]
            assert script.reason(name) == "abort" or len(script.tokens(name)) == len(expected)
    assert script.nothing_held()
