"""Clients that disconnect, at every moment at which they can."""

from __future__ import annotations

from engine.values.request import Status
from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model


def test_an_aborted_request_that_waits_is_never_computed(engine: Make) -> None:
    script = engine(limits={"max_running": 1})
    script.arrive(range(1, 20))
    b = script.arrive(range(50, 60))
    script.step()
    script.abort(b)
    script.run()
    (event,) = script.events[b]
    assert (event.finish_reason, event.timings, script.chunks(b)) == ("abort", None, [])


def test_a_request_that_came_and_went_between_two_steps_has_one_event(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 20))
    script.abort(a)
    script.run()
    assert [event.finish_reason for event in script.events[a]] == ["abort"]
    assert script.runner.plans == []


def test_the_next_prompt_finds_the_part_that_an_aborted_one_had_computed(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 4})
    a = script.arrive(range(1, 41))
    script.run(until=lambda: script.requests[a].num_computed >= 16)
    script.abort(a)
    script.step()
    assert script.reason(a) == "abort"
    b = script.arrive(range(1, 41))
    script.run()
    assert script.events[b][-1].num_cached >= 16


def test_the_token_that_a_step_in_flight_samples_falls_away(engine: Make) -> None:
    """The tokens of the requests beside it stay where they belong."""
    script = engine()
    names = [script.arrive([i + 1] * 9, max_tokens=12) for i in range(3)]
    script.run(until=lambda: len(script.tokens(names[1])) == 4)
    script.abort(names[1])
    events = [event for event in script.step() if event.request_id == names[1]]
    assert [(event.token_ids, event.finish_reason) for event in events] == [([], "abort")]
    script.run()
    assert len(script.tokens(names[1])) == 4


def test_before_the_last_token_it_ends_without_it_and_after_it_there_is_nothing_to_end(engine: Make) -> None:
    script = engine()
    a, b = script.arrive(range(1, 9), max_tokens=3), script.arrive(range(1, 9), max_tokens=3)
    script.run(until=lambda: len(script.tokens(a)) == 2)
    script.abort(a)
    script.run()
    script.abort(b)
    script.run()
    assert (script.reason(a), len(script.tokens(a))) == ("abort", 2)
    assert (script.reason(b), len(script.tokens(b))) == ("length", 3)


def test_aborting_twice_is_the_same_as_once(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 9))
    script.step()
    for name in (a, a, "unknown"):
        script.abort(name)
    script.step()
    script.abort(a)
    script.run()
    assert [event.finish_reason for event in script.events[a]].count("abort") == 1


def test_an_id_can_come_again_with_another_prompt_while_its_old_step_is_in_flight(engine: Make) -> None:
    script = engine()
    b = script.arrive(range(50, 60), max_tokens=20)
    script.arrive(range(1, 9), name="again", max_tokens=9)
    script.run(until=lambda: len(script.tokens("again")) == 2)
    script.abort("again")
    script.step()
    assert script.reason("again") == "abort"
    script.arrive(range(80, 89), name="again", max_tokens=9)
    script.run()
    assert len(script.tokens("again")) == 9 and len(script.tokens(b)) == 20


def test_a_request_that_waits_for_an_aborted_prompts_page_computes_it_itself(engine: Make) -> None:
    script = engine(num_pages=100, limits={"max_step_tokens": 8, "max_running": 4})
    a, b = script.arrive(range(1, 61)), script.arrive([*range(1, 31), 99])
    script.run(until=lambda: script.requests[a].num_computed >= 8)
    assert script.scheduler.load(script.now).num_deferred == 1
    script.abort(a)
    script.run()
    assert script.requests[b].num_cached in (8, 16)
    assert script.num_computed(b) + (script.requests[b].num_cached or 0) == 31 + 7


def test_aborting_all_together_frees_everything_within_a_step(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 12, "max_running": 3})
    names = [script.arrive(range(i, i + 30), max_tokens=20) for i in range(6)]
    for _ in range(5):
        script.step()
    for name in names:
        script.abort(name)
    script.step()
    assert script.nothing_held() and not script.scheduler.has_work
    assert all(script.reason(name) == "abort" for name in names)


def test_a_preempted_request_comes_back_when_its_preemptor_is_aborted(engine: Make) -> None:
    script = engine(limits={"max_running": 1})
    low = script.arrive(range(1, 20), max_tokens=20)
    script.run(until=lambda: len(script.tokens(low)) == 3)
    high = script.arrive(range(50, 60), priority=-1, max_tokens=20)
    script.run(until=lambda: bool(script.tokens(high)))
    assert script.requests[low].status is Status.WAITING
    script.abort(high)
    script.run()
    assert script.requests[low].num_preemptions == 1
    assert script.events[low][-1].timings is not None


def test_a_page_that_was_to_be_copied_is_let_go(engine: Make) -> None:
    """The second prompt diverges from the first inside a page, and is aborted while that is copied."""
    script = engine()
    script.arrive(range(1, 19))
    script.run()
    b = script.arrive([*range(1, 15), 99])
    script.step()
    assert [copy.num_tokens for copy in script.runner.plans[-1].copies] == [2]
    script.abort(b)
    script.step()
    assert script.reason(b) == "abort" and script.nothing_held()
    assert script.cache.reset() > 0


def test_scores_reported_until_then_are_right(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 2})
    a = script.arrive(range(1, 60), prompt_logprobs=2)
    script.run(until=lambda: script.scores(a) is not None)
    script.abort(a)
    script.run()
    reported = script.scores(a)
    assert reported is not None and reported.end < 59
    assert reported == hash_model.scores(range(1, reported.end + 1), 1, 2)
