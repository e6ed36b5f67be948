"""Which request loses its pages, and what happens to it until it has them back."""

from __future__ import annotations

import pytest

from engine.values.request import Status
from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.script import Script

A, B = range(1, 33), range(100, 132)
"""Prompts of two requests that do not both fit to their ends in 24 pages of 4 tokens."""
MODES = [("recompute", 0), ("swap", 24)]


def pressed(engine: Make, **options: object) -> tuple[Script, str, str]:
    """Two requests at the moment when the younger has been preempted."""
    script = engine(**{"num_pages": 24, **options})
    a, b = script.arrive(A, max_tokens=30), script.arrive(B, max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    assert script.requests[b].status is Status.WAITING
    return script, a, b


@pytest.mark.parametrize(("preemption", "host_pages"), MODES)
def test_a_preempted_prompt_is_found_by_others_and_is_no_hit_for_itself(
    engine: Make, preemption: str, host_pages: int
) -> None:
    """nano-vllm's pull requests 207, 211, 217 and 233 are about this moment."""
    script, _, b = pressed(engine, preemption=preemption, host_pages=host_pages)
    kept = script.cache.peek(script.requests[b].namespace, [*B, 0])
    assert kept > 0
    c = script.arrive(B[:kept], max_tokens=2, priority=-1)
    script.run()
    stats = script.cache.stats
    assert stats.query_tokens == 64 + kept
    assert stats.hit_tokens == script.events[c][-1].num_cached
    assert script.events[b][-1].num_cached == 0
    assert stats.recompute_query_tokens > 0


def test_a_host_pool_that_holds_one_of_two_leaves_the_other_to_be_computed(engine: Make) -> None:
    script = engine(num_pages=36, host_pages=12)
    names = [script.arrive([i + 1] * 40, max_tokens=40) for i in range(3)]
    script.run(until=lambda: sum(script.requests[name].num_preemptions for name in names) == 2)
    load = script.scheduler.load(script.now)
    assert (load.num_swapped, load.num_preemptions) == (1, 2)
    script.run()


def test_an_abort_on_the_way_back_from_the_host(engine: Make) -> None:
    """The step that copies its pages in is in flight, or was the last one."""
    script, _, b = pressed(engine, host_pages=24)
    script.run(until=lambda: any(plan.swap_in for plan in script.runner.plans))
    script.abort(b)
    script.step()
    assert script.reason(b) == "abort"
    assert script.host.account().held == 0


def test_a_request_aborted_while_swapped_out_leaves_its_prompt_to_the_next(engine: Make) -> None:
    script, _, b = pressed(engine, host_pages=24)
    kept = script.cache.peek(script.requests[b].namespace, [*B, 0])
    script.abort(b)
    c = script.arrive(B, max_tokens=30)
    script.run()
    assert script.host.account().held == 0
    assert 0 < script.events[c][-1].num_cached <= kept


@pytest.mark.parametrize(("preemption", "host_pages"), MODES)
def test_scores_are_reported_once_however_often_the_prompt_is_begun(
    engine: Make, preemption: str, host_pages: int
) -> None:
    script = engine(
        num_pages=30,
        preemption=preemption,
        host_pages=host_pages,
        limits={"max_step_tokens": 8, "max_running": 3},
    )
    a = script.arrive(range(1, 81), max_tokens=5, prompt_logprobs=2)
    for start in (200, 300):
        script.run(until=lambda: script.is_running(a) and script.requests[a].num_computed >= start // 10)  # noqa: B023
        high = script.arrive(range(start, start + 60), max_tokens=2, priority=-1)
        script.run(until=lambda: script.reason(high) is not None)  # noqa: B023
    script.run()
    assert script.requests[a].num_preemptions == 2
    assert script.scores(a) == hash_model.scores(range(1, 81), 1, 2)


def test_a_prompt_preempted_half_way_resumes_half_way(engine: Make) -> None:
    script = engine(num_pages=40, limits={"max_step_tokens": 8, "max_running": 1})
    a = script.arrive(range(1, 61), max_tokens=2)
    script.run(until=lambda: script.requests[a].num_computed >= 32)
    script.arrive([200] * 9, max_tokens=2, priority=-1)
    script.run()
    assert script.requests[a].num_preemptions == 1
    assert script.num_computed(a) == 61, "nothing twice: the tree kept its chunks"
    assert script.requests[a].num_recomputed == 0


def test_a_request_preempted_right_after_its_page_was_copied(engine: Make) -> None:
    script = engine(num_pages=12, limits={"max_running": 1})
    script.arrive(range(1, 12), max_tokens=1)
    script.run()
    low = script.arrive([*range(1, 11), 50], max_tokens=8)
    script.step()
    assert script.runner.plans[-1].copies
    script.arrive(range(200, 230), max_tokens=2, priority=-1)
    script.run()
    assert script.requests[low].num_preemptions == 1
    assert script.events[low][-1].num_cached == 10


def test_every_preemption_is_reported_with_the_next_token(engine: Make) -> None:
    script = engine(num_pages=40, limits={"max_running": 1})
    low = script.arrive(range(1, 20), max_tokens=30)
    for round_ in range(1, 4):
        script.run(until=lambda: script.is_running(low) and len(script.tokens(low)) >= 4 * round_)  # noqa: B023
        script.arrive([100 + round_] * 5, max_tokens=2, priority=-1)
        script.run(until=lambda: script.requests[low].num_preemptions == round_)  # noqa: B023
    script.run()
    reported = [event.timings.num_preemptions for event in script.events[low] if event.timings is not None]
    assert reported == [0, 1, 2, 3, 3]


def test_a_full_queue_takes_a_preempted_request(engine: Make) -> None:
    script = engine(num_pages=24, limits={"max_waiting": 1})
    a = script.arrive(A, max_tokens=30)
    script.step()
    b = script.arrive(B, max_tokens=30)
    script.step()
    c = script.arrive(range(200, 260), max_tokens=2)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    assert len(script.scheduler.waiting) == 2
    script.run()
    assert all(script.reason(name) == "length" for name in (a, b, c))


def test_a_resumed_request_that_is_preempted_resumes_with_all_of_its_tokens(engine: Make) -> None:
    script = engine(num_pages=24)
    a = script.arrive(A, max_tokens=30)
    first = script.arrive(B, max_tokens=30, name="elsewhere")
    whole, _ = script.alone(first)
    script.abort(first)
    b = script.arrive(B, max_tokens=30, output_ids=whole[:5])
    script.run()
    assert script.requests[b].num_preemptions > 0 and script.requests[a].num_preemptions == 0
    assert script.tokens(b) == whole[5:]
    assert script.cache.stats.query_tokens == len(A), "what another engine had computed is no query here"


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_drafts_are_given_up_before_any_request_is_preempted(engine: Make, right: float) -> None:
    plain = engine(num_pages=24)
    drafting = engine(num_pages=24, drafter=ScriptedDrafts(right), max_drafts=6)
    for script in (plain, drafting):
        for prompt in (A, B):
            script.arrive(prompt, max_tokens=30)
        script.run()
    assert drafting.scheduler.load(0).num_preemptions <= plain.scheduler.load(0).num_preemptions
    assert sum(plan.num_drafts for plan in drafting.runner.plans) > 0


def test_no_request_is_preempted_for_a_page_that_an_end_makes_free(engine: Make) -> None:
    """The older request needs it in the step after the younger one's stop token; a token later is too late."""
    preemptions = []
    for stops in (False, True):
        script = engine(num_pages=20)
        a = script.arrive(range(1, 33), max_tokens=25)
        script.arrive(B[:24], max_tokens=30, eos_after=12 if stops else None)
        script.run(until=lambda: script.reason(a) is not None)  # noqa: B023
        preemptions.append(script.scheduler.load(script.now).num_preemptions)
    assert preemptions == [1, 0]
