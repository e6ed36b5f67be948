"""Layers with a window have pages of their own: given back behind it, found again, and never a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KVCacheManager, Namespace, OutOfPages, Window
from engine.base.errors import NeverFits
from engine.values.beam_search import BeamParams
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.histories import Action, histories, play, served
from tests.engine.support.script import Script
from tests.support.examples import examples

SYSTEM = list(range(1, 41))


def windowed(**options: Any) -> Script:
    return Script(**{"window": (8, 2), "num_pages": 256, "limits": {"max_step_tokens": 64}, **options})


def test_a_request_holds_only_pages_of_its_window() -> None:
    """200 tokens in pages of 4: 50 pages of layers without a window, and 2 for each of 3 or 4 slots."""
    script = windowed(prefix_cache=False)
    script.arrive(list(range(160)), max_tokens=40)
    script.run(until=lambda: len(script.tokens("r0")) == 39)
    assert script.scheduler.account().private - 50 in (6, 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_as_many_requests_run_together_as_their_windows_leave_room_for(overlap: bool) -> None:
    """96 pages hold one request of 160 tokens with 3 pages for each slot, and two with windows."""
    limits = {"max_step_tokens": 16, "max_running": 8}
    script = windowed(num_pages=100, prefix_cache=False, limits=limits, overlap=overlap)
    for first in (0, 200):
        script.arrive(list(range(first, first + 140)), max_tokens=12)
    script.run(until=lambda: all(len(script.tokens(name)) > 4 for name in script.requests))
    script.run()
    assert not script.scheduler.load(script.now).num_preemptions
    assert all(script.tokens(name) == script.undisturbed(name) for name in script.requests)


def test_a_prompt_that_comes_again_continues_from_its_last_page() -> None:
    script = windowed()
    assert served(script, [*SYSTEM, 50, 51]) == 0
    assert served(script, [*SYSTEM, 50, 51]) == 40
    assert served(script, [*SYSTEM, 50, 51, 52, 53, 54]) == 40


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_continues_from_the_last_page_of_the_answer(page_size: int, overlap: bool) -> None:
    script = windowed(page_size=page_size, overlap=overlap)
    name = script.arrive(SYSTEM, max_tokens=9)
    script.run()
    history = [*SYSTEM, *script.tokens(name)]
    computed = len(history) - 1
    assert served(script, [*history, 500, 501]) == computed - computed % page_size


def test_the_common_prefix_of_prompts_is_found_from_the_third_on() -> None:
    """The second shows where prompts part, and leaves a tail there."""
    script = windowed()
    found = [served(script, [*SYSTEM, 100 + i, *range(200, 220 + i)], max_tokens=1) for i in range(4)]
    assert found == [0, 0, 40, 40]


def test_a_burst_that_begins_alike_computes_the_common_part_once() -> None:
    script = windowed(num_pages=512, limits={"max_step_tokens": 300, "max_running": 16})
    names = [script.arrive([*SYSTEM, 200 + i, 300 + i], max_tokens=3) for i in range(10)]
    script.run()
    assert sum(plan.num_tokens for plan in script.runner.plans) <= 42 + 9 * 2 + 10 * 3
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_tails_share_the_pages_of_the_request_that_left_them() -> None:
    script = windowed()
    served(script, [*SYSTEM, 50, 51], max_tokens=4)
    account = script.scheduler.account()
    assert account.evictable == 12 + 2 * 3, "tails of 40 and of 44 tokens share a row"
    assert account.locked == account.private == 0


def test_tails_that_were_not_used_for_longest_make_room_first() -> None:
    """A request that fits beside what is there, except for old tails, takes no other prefix's pages."""
    script = windowed(num_pages=64, limits={"max_step_tokens": 16, "max_running": 1})
    for first in (0, 100, 200):
        served(script, list(range(first, first + 42)), max_tokens=2)
    assert served(script, list(range(200, 242)), max_tokens=2) == 40
    assert served(script, list(range(300, 342)), max_tokens=2) == 0
    assert served(script, list(range(200, 242)), max_tokens=2) == 40


def test_a_preempted_request_resumes_from_its_last_page() -> None:
    script = windowed(num_pages=60, limits={"max_step_tokens": 16, "max_running": 3})
    names = [script.arrive([i, *range(1, 9)], max_tokens=50) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    stats = script.cache.stats
    assert script.scheduler.load(script.now).num_preemptions and stats.recompute_hit_tokens


def test_a_stream_that_another_engine_began_is_computed_again() -> None:
    first, second = windowed(), windowed()
    name = first.arrive(SYSTEM, max_tokens=12)
    first.run(until=lambda: len(first.tokens(name)) == 5)
    tokens = first.tokens(name)
    resumed = second.arrive(SYSTEM, max_tokens=12, output_ids=tokens)
    second.run()
    assert [*tokens, *second.tokens(resumed)] == first.undisturbed(name)


def test_drafts_are_written_and_taken_back_in_all_groups() -> None:
    script = windowed(drafter=ScriptedDrafts(right=0.6))
    names = [script.arrive([i, *SYSTEM], max_tokens=40) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_the_longest_request_that_is_taken_fits() -> None:
    """Its prompt may be computed in the largest chunks, or it may grow token by token."""
    script = windowed(num_pages=90, limits={"max_step_tokens": 32})
    longest = script.scheduler.max_model_len
    assert longest == 4 * (90 - 2 * 12)
    assert served(script, [7] * (longest - 3), max_tokens=3) == 0
    assert served(script, [8], max_tokens=longest - 1) == 0
    with pytest.raises(NeverFits):
        script.arrive([9] * longest, max_tokens=1)


def test_rows_of_a_tail_that_no_node_carries_yet_make_no_room() -> None:
    """The tail of 8 tokens is kept in a chunk that is not computed, and the next one needs its rows no more."""
    cache = KVCacheManager(12, 4, window=Window(4, 1, 8))
    lease = cache.lock(cache.match(Namespace("m"), range(16), 0.0))
    cache.extend(lease, 16, 0.0, (0, 12))
    assert lease.window is not None
    lease.window.plan(0, 12, [8], has_drafts=False)
    cache.extend(lease, 16, 0.0, (12, 16))
    assert lease.window.first == 2 and cache.available == 12 - 4 - 3
    with pytest.raises(OutOfPages):
        cache.extend(lease, 16 + 4 * (cache.available + 1), 0.0, (12, 16))
    assert cache.account().total == 12
    cache.insert(lease, range(12), 1.0)
    cache.keep_states(lease, range(12), 12)
    assert cache.available == 12 - 4 - 2, "now it can be given up"
    cache.finish(lease, range(16), 2.0)
    assert cache.available == 12


def test_beam_search_is_refused_with_the_reason_and_an_alternative() -> None:
    with pytest.raises(NeverFits, match=r"window.*several answers.*windowed_kv"):
        windowed().arrive(SYSTEM, beams=BeamParams(width=2))


def test_a_prefix_that_all_share_is_found_with_its_tail() -> None:
    script = windowed(num_pages=80, limits={"max_running": 1, "max_step_tokens": 16})
    served(script, SYSTEM, max_tokens=1)
    namespace = script.requests["r0"].namespace
    assert script.scheduler.share(namespace, SYSTEM) == 40
    assert script.cache.num_shared_pages == 10 + 2 * 2
    for number in range(6):
        assert served(script, [*SYSTEM, number + 100, 9], salt=str(number), max_tokens=2) == 40
    script.scheduler.reset_cache()
    assert script.scheduler.account().locked == script.cache.num_shared_pages
    with pytest.raises(ValueError, match="the state after them is not held"):
        script.scheduler.share(namespace, SYSTEM[:20])


@settings(max_examples=examples(150))
@given(
    histories(longest_prompt=40),
    st.sampled_from([(60, 4), (200, 1), (90, 3), (24, 16)]),
    st.sampled_from([(1, 1), (5, 3), (9, 1), (16, 2), (23, 1)]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0, None]),
    st.sampled_from([3, 16, 64]),
    st.booleans(),
    st.sampled_from([0, 12, 60]),
    st.integers(1, 2),
)
def test_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[Action],
    shape: tuple[int, int],
    window: tuple[int, int],
    overlap: bool,
    right: float | None,
    step_tokens: int,
    prefix_cache: bool,
    host_pages: int,
    host_min_uses: int,
) -> None:
    """Whatever is preempted, swapped, ended, drafted and forgotten: all pages are those of a request's tokens, and
    host pages add up.
    """
    num_pages, page_size = shape
    script = Script(
        num_pages=num_pages,
        page_size=page_size,
        window=window,
        overlap=overlap,
        prefix_cache=prefix_cache,
        limits={"max_running": 3, "max_step_tokens": step_tokens},
        drafter=None if right is None else ScriptedDrafts(right=right),
        host_pages=host_pages,
        host_min_uses=host_min_uses,
    )
    play(script, actions)
    assert script.host.account().free == host_pages
    assert script.scheduler.account().free == num_pages
