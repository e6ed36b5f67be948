"""Steps that fail: their requests end, once, and no other request is affected."""

from __future__ import annotations

import pytest

from engine.values.plan import Step, StepPlan
from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model


def test_two_in_a_row_end_those_that_are_in_them(engine: Make) -> None:
    script = engine(limits={"max_running": 1})
    a, b, c = (script.arrive([i + 1] * 9, max_tokens=4) for i in range(3))
    for name in (a, b):
        script.run(until=lambda: script.is_running(name))  # noqa: B023
        script.runner.fail_next = True
        script.run(until=lambda: script.reason(name) is not None)  # noqa: B023
    script.run()
    assert [script.reason(name) for name in (a, b, c)] == ["error", "error", "length"]


def test_the_step_planned_after_it_ends_no_request_twice(engine: Make) -> None:
    """The next request gets the same pages while that step still writes to them."""
    script = engine(num_pages=10)
    names = [script.arrive([i + 1] * 9, max_tokens=9) for i in range(2)]
    script.run(until=lambda: len(script.tokens(names[1])) == 3)
    script.runner.fail_next = True
    script.arrive([9] * 25, max_tokens=9)
    script.run()
    for name in names:
        assert [event.finish_reason for event in script.events[name] if event.finish_reason] == ["error"]
        assert "failed to compute" in (script.events[name][-1].error or "")


def test_the_kv_that_a_failed_chunk_should_have_written_is_never_found(engine: Make) -> None:
    """Another prompt waited for the chunk: it finds the chunks before, and computes the rest."""
    script = engine(num_pages=100, limits={"max_step_tokens": 8, "max_running": 4})
    a, b = script.arrive(range(1, 61)), script.arrive([*range(1, 31), 99])
    script.run(until=lambda: script.requests[a].num_computed == 16)
    script.runner.fail_next = True
    script.run()
    assert (script.reason(a), script.reason(b)) == ("error", "length")
    held = 24 if script.overlap else 16  # the chunk in flight when the order to fail came was computed
    assert script.requests[b].num_cached in (16, held)


def test_a_copy_that_failed_leaves_its_source_as_it_was(engine: Make) -> None:
    script = engine()
    script.arrive(range(1, 19))
    script.run()
    b = script.arrive([*range(1, 15), 99])
    script.runner.fail_next = True
    script.run(until=lambda: script.reason(b) is not None)
    assert script.reason(b) == "error" and script.nothing_held()
    c = script.arrive([*range(1, 15), 99])
    script.run()
    assert (script.reason(c), script.events[c][-1].num_cached) == ("length", 14)


def test_pages_that_were_to_come_back_from_the_host_are_released(engine: Make) -> None:
    script = engine(num_pages=24, host_pages=24)
    a, b = script.arrive(range(1, 33), max_tokens=30), script.arrive(range(100, 132), max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    script.runner.fail_if = lambda plan: bool(plan.swap_in)
    script.run()
    assert (script.reason(a), script.reason(b)) == ("length", "error")
    assert script.nothing_held()


def test_a_step_that_cannot_be_prepared_has_failed(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 9), max_tokens=9)
    script.run(until=lambda: len(script.tokens(a)) == 7)

    def broken(plan: StepPlan) -> Step:
        script.runner.failed |= {chunk.request.request_id for chunk in plan.chunks}
        raise RuntimeError("scripted failure")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.runner, "prepare", broken)
        script.step()
    script.run()
    b = script.arrive(range(1, 9), max_tokens=9)
    script.run()
    assert (script.reason(a), script.reason(b)) == ("error", "length")


def test_a_request_aborted_before_the_failure_is_known_ends_as_aborted(engine: Make) -> None:
    """An abort comes before the result of a failing step in flight; without overlap there is no such moment."""
    script = engine()
    a, b = script.arrive(range(1, 9), max_tokens=9), script.arrive(range(50, 59), max_tokens=9)
    script.run(until=lambda: len(script.tokens(a)) == 3)
    script.runner.fail_next = True
    script.abort(a)
    script.run()
    assert (script.reason(a), script.reason(b)) == ("abort", "error")
    assert len([event for event in script.events[a] if event.finish_reason]) == 1


def test_scores_of_a_failed_chunk_are_not_reported(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 2})
    a = script.arrive(range(1, 60), prompt_logprobs=1)
    script.run(until=lambda: script.scores(a) is not None)
    script.runner.fail_next = True
    script.run()
    reported = script.scores(a)
    assert script.reason(a) == "error" and reported is not None
    assert reported.end <= 25 and reported == hash_model.scores(range(1, reported.end + 1), 1, 1)
    b = script.arrive(range(1, 60), prompt_logprobs=1)
    script.run()
    assert script.scores(b) == hash_model.scores(range(1, 60), 1, 1)
