"""How requests end: by length, by a token, before they begin; and what must not happen after it."""

from __future__ import annotations

import pytest

from engine.base.errors import NeverFits
from engine.values.sampling_params import SamplingParams
from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model
from tests.engine.support.script import next_token


def test_a_single_token_takes_a_single_step(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 10), max_tokens=1)
    script.run()
    assert [len(plan.chunks) for plan in script.runner.plans] == [1]
    assert len(script.tokens(a)) == 1


def test_a_prompt_of_one_token_is_a_prompt(engine: Make) -> None:
    script = engine()
    names = [script.arrive([5], max_tokens=6, seed=seed) for seed in (1, 2)]
    script.run()
    assert script.tokens(names[0]) != script.tokens(names[1])
    assert script.cache.stats.query_tokens == 2


def test_the_first_token_may_be_the_end(engine: Make) -> None:
    script = engine()
    a, b = script.arrive(range(1, 10), eos_after=0), script.arrive(range(1, 10))
    script.run()
    assert (script.tokens(a), script.reason(a)) == ([0], "stop")
    assert len(script.tokens(b)) == 8


def test_an_end_as_the_last_token_is_an_end_by_that_token(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 10), max_tokens=5, eos_after=4)
    script.run()
    assert (script.reason(a), len(script.tokens(a))) == ("stop", 5)


def test_tokens_planned_beyond_a_stop_token_move_no_other_requests_tokens(engine: Make) -> None:
    """Requests end one after the other, from the middle of the batch outwards."""
    script = engine()
    names = [script.arrive([i + 1] * 7, max_tokens=12, eos_after=end) for i, end in enumerate((6, 4, 2, 5, 7))]
    script.run()
    assert [len(script.tokens(name)) for name in names] == [7, 5, 3, 6, 8]
    extra = [len(script.chunks(name)) - len(script.tokens(name)) for name in names]
    assert extra == [int(script.overlap)] * 5


def test_the_step_beyond_a_stop_token_may_need_a_page_more(engine: Make) -> None:
    """Prompt and output end with a page: what is in flight then has one more, which goes with the request."""
    script = engine(num_pages=4, page_size=4)
    a = script.arrive(range(1, 10), max_tokens=7, eos_after=3)
    b = script.arrive([50, 51], max_tokens=2)
    script.run()
    assert (len(script.tokens(a)), len(script.tokens(b))) == (4, 2)


def test_a_stop_token_in_the_prompt_stops_nothing(engine: Make) -> None:
    script = engine()
    a = script.arrive([7, 0, 7, 0], stop_token_ids=(7,), max_tokens=5)
    script.run()
    assert script.reason(a) == "length"


def test_stop_tokens_before_the_least_length_are_tokens(engine: Make) -> None:
    script = engine()
    prompt = list(range(1, 10))
    first = next_token(prompt, 7)
    a = script.arrive(prompt, stop_token_ids=(first,), min_tokens=1, max_tokens=4)
    b = script.arrive(prompt, stop_token_ids=(first,), max_tokens=4)
    script.run()
    assert (script.reason(a), len(script.tokens(a))) == ("length", 4)
    assert (script.reason(b), len(script.tokens(b))) == ("stop", 1)


def test_a_request_that_comes_with_all_of_its_output_takes_no_step_next_to_others(engine: Make) -> None:
    script = engine(limits={"max_running": 1})
    a = script.arrive(range(1, 10), max_tokens=6)
    script.step()
    whole, _ = script.alone(a)
    b = script.arrive(range(1, 10), max_tokens=6, output_ids=whole)
    script.step()
    assert (script.reason(b), script.tokens(b), script.chunks(b)) == ("length", [], [])


def test_a_request_that_comes_with_all_of_its_output_ends_as_it_had_though_aborted(engine: Make) -> None:
    script = engine()
    whole, _ = hash_model.alone(range(1, 10), 7, SamplingParams(max_tokens=3))
    a = script.arrive(range(1, 10), max_tokens=3, output_ids=whole)
    script.abort(a)
    script.run()
    assert [event.finish_reason for event in script.events[a]] == ["length"]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_an_output_longer_than_its_prompt_is_resumed(engine: Make, page_size: int) -> None:
    first = engine(num_pages=256, page_size=page_size)
    a = first.arrive([1, 2, 3], max_tokens=50)
    whole, _ = first.alone(a)
    script = engine(
        num_pages=256 // page_size, page_size=page_size, limits={"max_step_tokens": 16, "max_running": 2}
    )
    b = script.arrive([1, 2, 3], max_tokens=50, output_ids=whole[:41])
    script.run()
    assert script.tokens(b) == whole[41:]
    assert script.num_computed(b) == 3 + 41 + 8, "once each"
    assert script.requests[b].num_recomputed == 43, "all but the last were computed elsewhere"
    assert script.cache.stats.query_tokens == 0


def test_a_resumed_request_finds_the_pages_that_it_left_here(engine: Make) -> None:
    """The request's replica was thought lost: the output so far is in the tree."""
    script = engine(num_pages=100)
    a = script.arrive(range(1, 20), max_tokens=20)
    script.run(until=lambda: len(script.tokens(a)) == 9)
    sent = script.tokens(a)
    script.abort(a)
    b = script.arrive(range(1, 20), max_tokens=20, output_ids=sent)
    script.run()
    assert script.num_computed(b) == 11, "the last token that was sent, and those that follow but the last"
    assert script.requests[b].num_recomputed == 0


def test_all_that_a_context_holds_and_not_a_token_more(engine: Make) -> None:
    script = engine(limits={"max_model_len": 20})
    a = script.arrive(range(1, 16), max_tokens=5)
    script.run()
    assert len(script.tokens(a)) == 5
    with pytest.raises(NeverFits, match="= 21"):
        script.arrive(range(1, 16), max_tokens=6, name="long")
    del script.requests["long"]


def test_a_request_that_ends_makes_room_in_the_next_plan(engine: Make) -> None:
    """The end frees pages and a place in the batch: the next request begins in the step after the last token."""
    script = engine(num_pages=4, limits={"max_running": 1})
    a, b = script.arrive(range(1, 9), max_tokens=8), script.arrive(range(50, 58), max_tokens=8)
    script.run(until=lambda: script.reason(a) is not None)
    assert script.chunks(b) == []
    script.step()
    assert len(script.chunks(b)) == 1
