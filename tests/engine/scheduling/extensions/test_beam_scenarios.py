"""Beam searches in the scheduler: with others, in too little memory, aborted, failing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import NeverFits
from engine.values.beam_search import BeamParams
from engine.values.plan import Step, StepPlan
from tests.engine.support.script import Script
from tests.support.examples import examples


def search(script: Script, prompt: range | list[int], width: int, max_tokens: int = 8, **options: Any) -> str:
    return script.arrive(prompt, max_tokens=max_tokens, beams=BeamParams(width, min(width, 3)), **options)


def most_pages(num_prompt: int, max_tokens: int, width: int, page_size: int) -> int:
    """Count the prompt's whole pages once, and everything behind them for each beam."""
    shared = num_prompt // page_size
    return shared + width * (-(-(num_prompt + max_tokens) // page_size) - shared)


def most_held(script: Script, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run to the end and return the most pages that were in use while a step ran."""
    held, prepare = [], script.runner.prepare

    def watched(plan: StepPlan) -> Step:
        account = script.scheduler.account()
        held.append(account.locked + account.private)
        return prepare(plan)

    monkeypatch.setattr(script.runner, "prepare", watched)
    script.run()
    return max(held)


def finish(script: Script) -> None:
    script.run()
    for name, request in script.requests.items():
        if request.sampling.beams is not None:
            assert script.found(name) == script.found_alone(name)
            assert script.tokens(name) == list(script.found(name)[0].token_ids)
        else:
            assert script.tokens(name) == script.undisturbed(name)
    assert script.nothing_held()


@pytest.mark.parametrize("overlap", [False, True])
def test_all_beams_are_in_one_step_next_to_other_requests(overlap: bool) -> None:
    script = Script(num_pages=200, overlap=overlap)
    name, other = search(script, range(1, 11), 4, 12), script.arrive(range(50, 70), max_tokens=20)
    finish(script)
    for plan in script.runner.plans:
        beams = [chunk for chunk in plan.chunks if chunk.request.leader is script.requests[name]]
        assert len(beams) in (0, 4)
    together = [{chunk.request.request_id for chunk in plan.chunks} for plan in script.runner.plans]
    assert any(other in names and len(names) == 5 for names in together)
    event = script.events[name][0]
    assert event.timings is not None and event.finish_reason in ("stop", "length") and event.num_cached == 0
    assert script.scheduler.load(script.now).num_running == 0


def test_the_prompt_is_found_in_the_cache_and_the_output_by_the_next_turn() -> None:
    script = Script(num_pages=100)
    script.arrive(range(1, 21), max_tokens=1)
    script.run()
    name = search(script, range(1, 23), 3)
    script.run()
    assert script.events[name][0].num_cached == 20
    best = script.found(name)[0].token_ids
    follow_up = script.arrive([*range(1, 23), *best, 5], max_tokens=1)
    finish(script)
    assert script.events[follow_up][0].num_cached == 22 + len(best) - 1


STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("search"), st.integers(1, 30), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2)),
        st.tuples(st.just("arrive"), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("fail")),
    ),
    max_size=25,
)


@settings(max_examples=examples(250), deadline=None)
@given(
    STORIES, st.sampled_from([(40, 4), (160, 1), (60, 3), (12, 16)]), st.booleans(), st.booleans(), st.booleans()
)
def test_a_search_always_finds_the_same_as_by_itself(
    story: list[tuple[Any, ...]], memory: tuple[int, int], overlap: bool, prefix_cache: bool, swaps: bool
) -> None:
    num_pages, page_size = memory
    script = Script(
        num_pages,
        page_size,
        {"max_step_tokens": 24, "max_running": 8},
        overlap=overlap,
        prefix_cache=prefix_cache,
        host_pages=num_pages if swaps else 0,
        preemption="swap" if swaps else "auto",
    )
    for kind, *values in story:
        name = f"r{values[0]}" if values else ""
        if kind == "search":
            length, max_tokens, width, beginning = values
            if most_pages(length, max_tokens, width, page_size) <= num_pages:
                search(script, [beginning + 1] * length, width, max_tokens)
        elif kind == "arrive":
            length, max_tokens, beginning = values
            script.arrive([beginning + 1] * length, max_tokens=max_tokens)
        elif kind == "step":
            for _ in range(values[0]):
                script.step()
        elif kind == "abort" and name in script.requests:
            script.abort(name)
        elif kind == "fail":
            script.runner.fail_next = True
            script.step()
            script.runner.fail_next = False
    script.run()
    for name, request in script.requests.items():
        reason = script.reason(name)
        if reason in ("abort", "error"):
            assert not script.events[name][-1].alternatives
        elif request.sampling.beams is not None:
            assert script.found(name) == script.found_alone(name)
        else:
            assert script.tokens(name) == script.undisturbed(name)
    assert script.nothing_held()


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.sampled_from([1, 3, 4, 16]), st.booleans())
def test_an_accepted_search_fits_and_with_one_page_less_it_is_refused(
    num_prompt: int, max_tokens: int, width: int, page_size: int, prefix_cache: bool
) -> None:
    """The memory is exactly what a search may need at most, with a younger request to preempt first."""
    num_pages = most_pages(num_prompt, max_tokens, width, page_size)
    script = Script(num_pages, page_size, prefix_cache=prefix_cache)
    search(script, [7] * num_prompt, width, max_tokens)
    script.arrive([8] * num_prompt, max_tokens=max_tokens)
    finish(script)
    if num_pages * page_size - page_size >= num_prompt + max_tokens:
        with pytest.raises(NeverFits, match=f"may need {num_pages} KV pages"):
            search(Script(num_pages - 1, page_size), [7] * num_prompt, width, max_tokens)


@pytest.mark.parametrize(("num_prompt", "num_pages"), [(1, 3), (18, 4)])
def test_a_search_by_itself_gets_the_page_in_the_tree_that_its_prompt_ends_in(
    num_prompt: int, num_pages: int
) -> None:
    """The end of the prompt lies in another request's page, which the beams copy."""
    script = Script(num_pages, page_size=16)
    script.arrive([1] * num_prompt, max_tokens=1)
    script.run()
    search(script, [1] * num_prompt, 3)
    finish(script)


def test_a_preempted_search_begins_again_after_its_prompt() -> None:
    script = Script(num_pages=90, page_size=1)
    script.arrive(range(1, 31), max_tokens=60)
    name = search(script, range(101, 111), 3, 26, ignore_eos=True)
    script.run(until=lambda: script.requests[name].num_preemptions > 0)
    assert script.requests[name].num_preemptions == 1
    assert not script.is_running(name) and script.requests[name].beams == []
    finish(script)
    end = script.events[name][0].timings
    assert end is not None and end.num_preemptions > 0


def test_a_search_takes_its_width_of_the_places_in_the_batch() -> None:
    script = Script(num_pages=400, limits={"max_running": 5})
    searches = [search(script, range(10 * i + 1, 10 * i + 9), 3) for i in range(3)]
    plain = script.arrive(range(300, 310))
    script.step()
    assert [script.is_running(name) for name in searches] == [True, False, False]
    finish(script)
    assert all(len(plan.chunks) <= 5 for plan in script.runner.plans) and script.reason(plain) == "length"


@pytest.mark.parametrize("others", [0, 1])
def test_a_search_of_higher_priority_preempts_as_many_as_it_has_beams_or_none(others: int) -> None:
    """Equals hold two of four places, or none: three beams take three places or, where that cannot be, wait."""
    script = Script(num_pages=400, limits={"max_running": 4})
    equal = [script.arrive([i + 1] * 9, max_tokens=9, priority=-1) for i in range(2 * others)]
    low = [script.arrive([i + 5] * 9, max_tokens=9) for i in range(4 - 2 * others)]
    script.step()
    high = search(script, range(1, 9), 3, priority=-1)
    script.run(until=lambda: script.is_running(high))
    assert [script.requests[name].num_preemptions for name in equal + low] == ([0] * 4 if others else [0, 1, 1, 1])
    finish(script)
    assert all(len(plan.chunks) <= 4 for plan in script.runner.plans)


def test_a_search_that_can_never_fit_is_refused_at_its_arrival() -> None:
    script = Script(num_pages=20, limits={"max_running": 6})
    with pytest.raises(NeverFits, match="7 beams, but this engine runs at most 6 sequences"):
        search(script, range(4), 7)
    with pytest.raises(NeverFits, match="5 beams of 28 tokens may need 27 KV pages of 4 tokens"):
        search(script, range(10), 5, 18)
    with pytest.raises(NeverFits, match="cannot resume from generated tokens"):
        search(script, range(4), 2, output_ids=[5])
    assert not script.loop.has_work


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_within_a_step(steps: int) -> None:
    script = Script(num_pages=100, limits={"max_step_tokens": 8, "max_running": 8})
    name = search(script, range(1, 15), 4, 30)
    for _ in range(steps):
        script.step()
    script.abort(name)
    script.step()
    assert script.reason(name) == "abort" and script.nothing_held()
    assert [event.alternatives for event in script.events[name]] == [None]


def test_a_failed_step_ends_a_search_with_one_error() -> None:
    script = Script(num_pages=100)
    name = search(script, range(1, 9), 4)
    script.step()
    script.step()
    script.runner.fail_next = True
    script.step()
    assert [event.finish_reason for event in script.events[name]] == ["error"] and script.nothing_held()


def test_a_model_that_computes_nothing_valid_ends_a_search_with_an_error() -> None:
    script = Script(num_pages=100)
    name, other = search(script, range(1, 9), 4), search(script, range(1, 9), 4)
    script.step()
    script.step()
    script.runner.invalid.add(name)
    script.run()
    assert [event.finish_reason for event in script.events[name]] == ["error"]
    assert "no valid probabilities" in (script.events[name][0].error or "")
    assert script.found(other) == script.found_alone(other) and script.nothing_held()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [3, 16])
def test_eight_beams_on_a_long_prompt_take_its_pages_and_eight_tails(
    page_size: int, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_prompt, max_tokens = 501, 40
    script = Script(1000 // page_size, page_size, prefix_cache=prefix_cache)
    name = search(script, list(range(num_prompt)), 8, max_tokens, ignore_eos=True)
    most = most_pages(num_prompt, max_tokens, 8, page_size)
    assert most < num_prompt // page_size + 8 * (max_tokens // page_size + 3)
    highest = most_held(script, monkeypatch)
    assert num_prompt // page_size + 8 <= highest <= most
    assert script.found(name) == script.found_alone(name)


@pytest.mark.parametrize("page_size", [3, 16])
def test_eight_choices_of_a_long_prompt_take_its_pages_and_eight_tails(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of one prompt arrive at once, as the API makes them."""
    num_prompt, max_tokens = 501, 40
    script = Script(1000 // page_size, page_size)
    names = [script.arrive(range(num_prompt), max_tokens=max_tokens, seed=seed) for seed in range(8)]
    most = most_pages(num_prompt, max_tokens, 8, page_size)
    highest = most_held(script, monkeypatch)
    assert num_prompt // page_size + 8 <= highest <= most
    computed = sum(plan.num_tokens for plan in script.runner.plans)
    # The prompt once; what a match leaves to compute for each; and the output, but for its last tokens.
    assert computed <= num_prompt + 8 * (page_size + max_tokens)
    assert [script.tokens(name) for name in names] == [script.undisturbed(name) for name in names]
