"""Everything at once: draft tokens, beam searches, scored prompts and plain requests in the same steps."""

from __future__ import annotations

import pytest

from engine.values.beam_search import BeamParams
from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model
from tests.engine.support.draft_sources import ScriptedDrafts


@pytest.mark.parametrize("num_pages", [24, 200])
def test_all_kinds_in_one_batch_with_room_and_without(engine: Make, num_pages: int) -> None:
    script = engine(
        num_pages=num_pages,
        host_pages=20,
        drafter=ScriptedDrafts(0.7),
        limits={"max_step_tokens": 24, "max_running": 12},
    )
    for i in range(2):
        prompt = [*range(1, 20), i]
        script.arrive(prompt, max_tokens=40)
        found = script.arrive(prompt, max_tokens=10, beams=BeamParams(4, num_returned=2))
        scored = script.arrive(prompt, max_tokens=5, prompt_logprobs=1)
        script.arrive([i + 60] * 20, max_tokens=40, eos_after=37)
        script.run()
        assert list(script.events[found][-1].alternatives or ()) == script.found_alone(found)
        assert script.scores(scored) == hash_model.scores(prompt, 1, 1)
    assert sum(plan.num_drafts for plan in script.runner.plans) > 0
    assert (script.scheduler.load(script.now).num_preemptions > 0) == (num_pages == 24)


def test_a_search_runs_next_to_a_request_of_the_same_prompt_inside_its_last_page(engine: Make) -> None:
    """Beams and the plain request write behind the same tokens, each in a page of its own."""
    script = engine(num_pages=60, limits={"max_running": 8})
    plain = script.arrive(range(1, 11), max_tokens=12)
    script.run(until=lambda: len(script.tokens(plain)) == 2)
    found = script.arrive(range(1, 11), max_tokens=9, beams=BeamParams(3))
    script.run()
    assert list(script.events[found][-1].alternatives or ()) == script.found_alone(found)
    assert script.events[found][-1].num_cached == 9


def test_a_search_that_is_preempted_finds_the_same_afterwards(engine: Make) -> None:
    script = engine(num_pages=200, limits={"max_running": 4})
    found = script.arrive(range(1, 11), max_tokens=12, beams=BeamParams(4), ignore_eos=True)
    script.run(until=lambda: len(script.requests[found].beams) == 4)
    script.arrive(range(50, 60), max_tokens=2, priority=-1)
    script.run()
    assert script.requests[found].num_preemptions == 1
    assert list(script.events[found][-1].alternatives or ()) == script.found_alone(found)


def test_drafts_run_next_to_a_prompt_that_is_scored_in_chunks(engine: Make) -> None:
    script = engine(num_pages=100, drafter=ScriptedDrafts(1.0), limits={"max_step_tokens": 12, "max_running": 3})
    a = script.arrive(range(1, 9), max_tokens=60)
    script.run(until=lambda: bool(script.tokens(a)))
    scored = script.arrive(range(100, 180), max_tokens=6, prompt_logprobs=0)
    script.run()
    assert script.scores(scored) == hash_model.scores(range(100, 180), 1, 0)
    assert max(plan.num_tokens for plan in script.runner.plans) <= 12
    assert len(script.chunks(a)) < 40, "its draft tokens are still accepted"


def test_drafts_for_a_request_that_stops_inside_them_while_another_fails(engine: Make) -> None:
    script = engine(drafter=ScriptedDrafts(1.0), max_drafts=6)
    a = script.arrive(range(1, 9), max_tokens=20)
    tokens, _ = script.alone(a)
    script.run(until=lambda: bool(script.tokens(a)))
    b = script.arrive(range(1, 9), max_tokens=20, stop_token_ids=(tokens[6],))
    script.run(until=lambda: bool(script.tokens(b)))
    c = script.arrive(range(70, 80), max_tokens=4)
    script.runner.fail_if = lambda plan: {c} == {chunk.request.request_id for chunk in plan.chunks}
    script.run()
    assert (script.reason(a), script.reason(b), script.tokens(b)) == ("length", "stop", tokens[:7])


def test_drafts_for_a_request_resumed_before_its_last_token(engine: Make) -> None:
    script = engine(drafter=ScriptedDrafts(1.0))
    a = script.arrive(range(1, 9), max_tokens=9)
    script.run()
    tokens, _ = script.alone(a)
    for cut in (7, 8):
        b = script.arrive(range(1, 9), max_tokens=9, output_ids=tokens[:cut])
        script.run()
        assert script.tokens(b) == tokens[cut:]
