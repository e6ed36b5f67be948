"""Models with recurrent states: where they are kept, found and given up. The runner notices a wrong state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import NeverFits
from engine.values.beam_search import BeamParams
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.histories import Action, histories, play, served
from tests.engine.support.script import Script
from tests.support.examples import examples

SYSTEM = list(range(1, 41))


def hybrid(**options: Any) -> Script:
    return Script(**{"state_slots": 40, "num_pages": 256, **options})


def test_a_prompt_that_comes_again_continues_from_its_last_page() -> None:
    script = hybrid()
    assert served(script, [*SYSTEM, 50, 51]) == 0
    assert served(script, [*SYSTEM, 50, 51]) == 40
    assert served(script, [*SYSTEM, 50, 51, 52, 53, 54]) == 40


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_continues_from_the_end_of_the_answer(page_size: int, overlap: bool) -> None:
    script = hybrid(page_size=page_size, overlap=overlap)
    name = script.arrive(SYSTEM, max_tokens=9)
    script.run()
    history = [*SYSTEM, *script.tokens(name)]
    assert served(script, [*history, 500, 501]) == len(history) - 1


def test_the_common_prefix_of_prompts_is_found_from_the_third_on() -> None:
    """The second shows where prompts part, and leaves the state there."""
    script = hybrid()
    found = [served(script, [*SYSTEM, 100 + i, *range(200, 210 + i)], max_tokens=1) for i in range(4)]
    assert found == [0, 0, 40, 40]


def test_a_burst_that_begins_alike_computes_the_common_part_once() -> None:
    script = hybrid(num_pages=512, limits={"max_step_tokens": 300, "max_running": 16})
    names = [script.arrive([*SYSTEM, 200 + i, 300 + i], max_tokens=3) for i in range(10)]
    script.run()
    assert sum(plan.num_tokens for plan in script.runner.plans) <= 42 + 9 * 2 + 10 * 3
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_samples_of_one_prompt_compute_it_once() -> None:
    script = hybrid(limits={"max_step_tokens": 16})
    names = [script.arrive(SYSTEM, max_tokens=5, seed=seed) for seed in range(4)]
    script.run()
    assert sum(plan.num_tokens for plan in script.runner.plans) <= 40 + 3 * 4 + 4 * 5
    assert len({tuple(script.tokens(name)) for name in names}) == 4


def test_the_least_recently_used_snapshot_goes_first_and_takes_no_page_with_it() -> None:
    script = hybrid(state_slots=4, limits={"max_running": 1})
    prompts = [[100 * i + 7, *SYSTEM] for i in range(1, 4)]
    assert [served(script, prompt, max_tokens=1) for prompt in prompts] == [0, 0, 0]
    held = script.scheduler.account().evictable
    assert served(script, prompts[2], max_tokens=1) == 40
    assert served(script, prompts[0], max_tokens=1) == 0, "two slots were kept for each of the others"
    assert script.scheduler.account().evictable == held


def test_without_slots_for_snapshots_requests_run_and_nothing_is_found() -> None:
    script = hybrid(state_slots=2, limits={"max_running": 2})
    names = [script.arrive([*SYSTEM, i], max_tokens=6) for i in range(100, 105)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_a_preempted_request_resumes_where_it_was() -> None:
    script = hybrid(num_pages=29, limits={"max_step_tokens": 64, "max_running": 3})
    names = [script.arrive([i, *range(1, 25)], max_tokens=20) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    stats = script.cache.stats
    assert script.scheduler.load(script.now).num_preemptions and stats.recompute_hit_tokens


def test_a_stream_that_another_engine_began_is_computed_again() -> None:
    first, second = hybrid(), hybrid()
    name = first.arrive(SYSTEM, max_tokens=12)
    first.run(until=lambda: len(first.tokens(name)) == 5)
    tokens = first.tokens(name)
    resumed = second.arrive(SYSTEM, max_tokens=12, output_ids=tokens)
    second.run()
    assert [*tokens, *second.tokens(resumed)] == first.undisturbed(name)


def test_right_drafts_are_applied_to_the_state_in_the_next_step() -> None:
    script = hybrid(drafter=ScriptedDrafts(right=0.6))
    names = [script.arrive([i, *SYSTEM], max_tokens=40) for i in (500, 501, 502)]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    uses = [chunk.state for plan in script.runner.plans for chunk in plan.chunks]
    assert {use.num_missing for use in uses if use is not None} >= {0, 1, 2, 3}
    history = [500, *SYSTEM, *script.tokens(names[0])]
    assert served(script, [*history, 7]) > 41


def test_beam_search_is_refused_with_the_reason_and_an_alternative() -> None:
    script = hybrid()
    with pytest.raises(NeverFits, match=r"recurrent layers.*several answers"):
        script.arrive(SYSTEM, beams=BeamParams(width=2))


def test_a_prefix_that_all_share_is_found_with_its_state() -> None:
    script = hybrid(state_slots=6, limits={"max_running": 1})
    served(script, SYSTEM, max_tokens=1)
    namespace = script.requests["r0"].namespace
    assert script.scheduler.share(namespace, SYSTEM) == 40
    for number in range(6):
        assert served(script, [*SYSTEM, number + 100, 9], salt=str(number), max_tokens=2) == 40
    assert script.cache.snapshots is not None and script.cache.snapshots.account().locked == 1
    with pytest.raises(ValueError, match="the state after them is not held"):
        script.scheduler.share(namespace, SYSTEM[:20])


@settings(max_examples=examples(150))
@given(
    histories(longest_prompt=30),
    st.sampled_from([(12, 4), (48, 1), (30, 3), (4, 16)]),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0, None]),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([(0, 2), (12, 2), (40, 1), (60, 3)]),
    st.integers(1, 2),
)
def test_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[Action],
    shape: tuple[int, int],
    num_snapshots: int,
    overlap: bool,
    right: float | None,
    step_tokens: int,
    host: tuple[int, int],
    host_min_uses: int,
) -> None:
    """Whatever is preempted, swapped, ended, drafted and forgotten: states and pages are those of a request's
    tokens, and host pages add up.
    """
    num_pages, page_size = shape
    script = Script(
        num_pages=num_pages,
        page_size=page_size,
        state_slots=3 + num_snapshots,
        overlap=overlap,
        limits={"max_running": 3, "max_step_tokens": step_tokens},
        drafter=None if right is None else ScriptedDrafts(right=right),
        host_pages=host[0],
        state_pages=host[1],
        host_min_uses=host_min_uses,
    )
    play(script, actions)
    assert script.host.account().free == script.host_pages
    assert script.cache.snapshots is not None
    assert script.cache.snapshots.account().free == script.state_slots
