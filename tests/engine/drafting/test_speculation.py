"""Speculation changes how many tokens a step yields, never which: with scripted drafts, right and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.ngram import NgramDrafter
from engine.scheduling.prefill_budget import PrefillBudget
from engine.scheduling.stats import StepStats
from engine.values.beam_search import BeamParams
from engine.values.request import Request
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.hash_model import says
from tests.engine.support.script import EOS, Script
from tests.support.examples import examples

# --- every shape of memory and steps --------------------------------------------------------------------------


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_the_tokens_are_those_of_plain_decoding(data: st.DataObject) -> None:
    """Requests are preempted, swapped, aborted, resumed and stopped, share prefixes and run beside prefill."""
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    room = 72 // page_size + 1  # the longest request below
    drafts = ScriptedDrafts(data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))
    script = Script(
        num_pages=data.draw(st.integers(room, 2 * room)),
        page_size=page_size,
        limits={"max_step_tokens": data.draw(st.integers(5, 80)), "max_running": data.draw(st.integers(1, 5))},
        prefix_cache=data.draw(st.booleans()),
        overlap=data.draw(st.booleans()),
        host_pages=data.draw(st.sampled_from([0, 2 * room])),
        drafter=drafts,
        max_drafts=data.draw(st.integers(1, 6)),
    )
    wanted: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 6))):
        first = data.draw(st.sampled_from([1, 1, 100 + number]))
        prompt = list(range(first, first + data.draw(st.integers(1, 30))))
        max_tokens = data.draw(st.integers(1, 40))
        min_tokens = data.draw(st.integers(0, max_tokens))
        stop = data.draw(st.sampled_from([None, *says(prompt, max_tokens)]))
        whole = says(prompt, max_tokens, stop, min_tokens)
        cut = data.draw(st.integers(0, len(whole)))
        name = script.arrive(
            prompt,
            output_ids=whole[:cut],
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=() if stop is None else (stop,),
            priority=data.draw(st.integers(0, 1)),
        )
        wanted[name] = whole[cut:]
        for _ in range(data.draw(st.integers(0, 4))):
            script.step()
    aborted = data.draw(st.sampled_from([None, *wanted]))
    if aborted is not None:
        script.abort(aborted)
    script.run()
    for name, tokens in wanted.items():
        if script.reason(name) == "abort":
            assert script.tokens(name) == tokens[: len(script.tokens(name))]
        else:
            assert script.tokens(name) == tokens
    assert script.nothing_held()
    assert not drafts.mistakes
    assert not drafts.held, "every request that was drafted for is forgotten"


# --- one thing at a time --------------------------------------------------------------------------------------


def steps_of(script: Script, *names: str) -> int:
    """Count the steps until all requests have ended."""
    for count in range(1, 500):
        script.step()
        if all(script.reason(name) is not None for name in names):
            return count
    raise AssertionError("not done")


def speculating(**options: Any) -> Script:
    return Script(num_pages=options.pop("num_pages", 200), drafter=ScriptedDrafts(), **options)


def test_right_draft_tokens_save_steps() -> None:
    plain = Script(num_pages=200)
    assert steps_of(plain, plain.arrive(range(1, 11), max_tokens=60)) == 60
    script = speculating()
    a = script.arrive(range(1, 11), max_tokens=60)
    assert steps_of(script, a) < 30
    assert script.tokens(a) == script.undisturbed(a)


class FailsFor(ScriptedDrafts):
    """Fails when it is asked to draft for one request."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        if self._name in {request.request_id for request in requests}:
            raise RuntimeError("scripted failure")
        return super().propose(requests, max_tokens)


def test_a_drafter_that_fails_within_a_step_that_has_its_drafts_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for deferrable requests after the others, whose drafts are then in the step."""
    monkeypatch.setattr(PrefillBudget, "num_deferrable_decodes", lambda *_, **__: 4)  # whatever time they take
    script = Script(num_pages=200, overlap=True, drafter=FailsFor("later"))
    a = script.arrive(range(1, 11), max_tokens=40)
    for _ in range(4):
        script.step()
    later = script.arrive(range(1, 8), max_tokens=40, name="later", is_deferrable=True)
    script.run()
    assert not script.scheduler.speculator.is_on
    assert [script.tokens(name) for name in (a, later)] == [script.undisturbed(name) for name in (a, later)]


def test_the_token_after_the_draft_tokens_counts_too() -> None:
    """A step with one accepted draft token yields two tokens."""
    script = Script(num_pages=200, drafter=ScriptedDrafts(most=1))
    a = script.arrive(range(1, 11), max_tokens=60)
    script.step()
    sizes: set[int] = set()
    while script.reason(a) is None:
        sizes.update(len(event.token_ids) for event in script.step())
    assert sizes == {1, 2}


def test_a_stop_token_inside_an_accepted_run_ends_the_request_there() -> None:
    script = speculating(max_drafts=6)
    tokens = says(range(1, 11), 30)
    for stop in tokens[3:12]:
        a = script.arrive(range(1, 11), max_tokens=30, stop_token_ids=(stop,))
        script.run()
        assert script.tokens(a) == tokens[: tokens.index(stop) + 1]
        assert script.reason(a) == "stop"
        assert script.requests[a].tokens == [*range(1, 11), *script.tokens(a)]
    assert script.nothing_held()


def test_the_end_of_text_is_forbidden_at_first_and_then_ends_it() -> None:
    script = speculating()
    tokens = says(range(1, 11), 30)
    a = script.arrive(range(1, 11), max_tokens=30, min_tokens=9, stop_token_ids=(tokens[4], tokens[13]))
    script.run()
    assert (script.tokens(a), script.reason(a)) == (tokens[:14], "stop")
    b = script.arrive(range(1, 11), max_tokens=30)
    script.runner.eos_after[b] = 12
    script.run()
    assert (script.tokens(b), script.reason(b)) == ([*tokens[:12], EOS], "stop")


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_reached_exactly(max_tokens: int) -> None:
    script = speculating(limits={"max_model_len": 10 + 11})
    a = script.arrive(range(1, 11), max_tokens=max_tokens)
    script.run()
    assert (script.tokens(a), script.reason(a)) == (says(range(1, 11), max_tokens), "length")
    longest = max(chunk.start + chunk.num_tokens for plan in script.runner.plans for chunk in plan.chunks)
    assert longest <= 10 + max_tokens - 1 or max_tokens == 1, "no KV past what any token needs"


def test_draft_tokens_leave_room_in_the_step_for_prompts() -> None:
    """A long prompt beside eight decoding requests gets at least half of the rest of a step."""
    script = speculating(limits={"max_step_tokens": 48, "max_running": 16}, max_drafts=16)
    for first in range(8):
        script.arrive([first + 1] * 4, max_tokens=200)
    for _ in range(3):
        script.step()
    long = script.arrive([500] * 300, max_tokens=1)
    script.step()
    while script.requests[long].is_prefilling:
        before = script.requests[long].num_computed
        script.step()
        plan = script.runner.plans[-1]
        assert plan.num_tokens <= 48
        assert script.requests[long].num_computed - before >= min(20, 300 - before)
    script.run()


def test_draft_tokens_take_pages_from_no_request() -> None:
    """There is room for both requests but not for draft tokens too: the younger one is not preempted for them."""
    for drafter in (None, ScriptedDrafts()):
        script = Script(num_pages=13, page_size=1, drafter=drafter, max_drafts=6)
        a, b = script.arrive([1] * 4, max_tokens=9), script.arrive([2] * 4, max_tokens=3)
        script.run(until=lambda: script.reason(b) is not None)  # noqa: B023
        assert script.requests[b].num_preemptions == 0
        script.run()
        assert (script.tokens(a), script.tokens(b)) == (says([1] * 4, 9), says([2] * 4, 3))


def test_a_preempted_request_is_forgotten_meanwhile() -> None:
    drafts = ScriptedDrafts(0.5)
    script = Script(num_pages=24, page_size=4, drafter=drafts)
    a, b = script.arrive(range(1, 33), max_tokens=30), script.arrive(range(100, 132), max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions > 0)
    assert drafts.held == {a}
    script.run()
    assert (script.tokens(a), script.tokens(b)) == (script.undisturbed(a), script.undisturbed(b))


def test_the_next_turn_finds_the_accepted_draft_tokens_in_the_cache() -> None:
    script = speculating(page_size=3)
    a = script.arrive(range(1, 20), max_tokens=21)
    script.run()
    history = [*range(1, 20), *script.tokens(a)]
    b = script.arrive([*history, 500, 501], max_tokens=9)
    script.run()
    assert script.tokens(b) == script.undisturbed(b)
    assert script.events[b][-1].num_cached == len(history) - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_tokens_enter_the_tree_as_the_tokens_they_proved_to_be(overlap: bool) -> None:
    """The second of two equal prompts continues in its own page: each of its steps inserts that into the tree."""
    script = speculating(overlap=overlap)
    for seed in (7, 8):
        name = script.arrive(range(1, 11), max_tokens=12, seed=seed)
        script.run()
        assert script.tokens(name) == script.undisturbed(name)
    assert script.nothing_held()


def test_nothing_is_drafted_for_a_beam_search() -> None:
    """The last token of its prompt is a step of its own, like a decode."""
    script = speculating(limits={"max_step_tokens": 8, "max_running": 8})
    a = script.arrive(range(1, 10), max_tokens=8, beams=BeamParams(3, num_returned=3))
    b = script.arrive(range(100, 109), max_tokens=8)
    script.run()
    assert list(script.events[a][-1].alternatives or ()) == script.found_alone(a)
    assert script.tokens(b) == script.undisturbed(b)
    assert all(
        chunk.request.request_id == b for plan in script.runner.plans for chunk in plan.chunks if chunk.num_drafts
    )
    assert script.nothing_held()


def test_draft_tokens_find_room_in_a_step_next_to_the_beams_of_searches() -> None:
    """Six beams and a decode leave room for one token; drafts may take half of it, which is none."""
    script = speculating(limits={"max_step_tokens": 8, "max_running": 7})
    a = script.arrive(range(1, 6), max_tokens=20, beams=BeamParams(6))
    b = script.arrive(range(100, 106), max_tokens=20)
    script.run(until=lambda: bool(script.tokens(b)))
    c = script.arrive(range(200, 206), max_tokens=2)
    script.run()
    assert max(plan.num_tokens for plan in script.runner.plans) <= 8
    assert list(script.events[a][-1].alternatives or ()) == script.found_alone(a)
    assert all(script.tokens(name) == script.undisturbed(name) for name in (b, c))
    assert script.nothing_held()


def test_a_step_that_fails_ends_its_requests_and_holds_nothing() -> None:
    script = speculating()
    a = script.arrive(range(1, 11), max_tokens=30)
    for _ in range(3):
        script.step()
    script.runner.fail_next = True
    script.step()
    assert script.reason(a) == "error"
    assert script.nothing_held()


def test_a_request_without_draft_tokens_is_planned_ahead() -> None:
    """Overlap is given up only while there are drafts: prompt lookup finds nothing in these tokens."""
    script = Script(num_pages=400, overlap=True, drafter=NgramDrafter())
    script.arrive(range(1, 11), max_tokens=60)
    script.step()
    assert script.scheduler.needs_results
    adaptive = Script(num_pages=400, overlap=True, drafter=NgramDrafter(), is_adaptive=True)
    adaptive.arrive(range(1, 11), max_tokens=60)
    needed = []
    while adaptive.loop.has_work:
        adaptive.step()
        needed.append(adaptive.scheduler.needs_results)
    assert 8 <= sum(needed) < 40


def test_nothing_is_drafted_for_a_prompt_whose_tokens_are_in_flight() -> None:
    """Its last token is planned like one to decode, while another step computes those before it."""
    drafts = ScriptedDrafts()
    script = Script(overlap=True, drafter=drafts, limits={"max_step_tokens": 9, "max_running": 2})
    a = script.arrive(range(1, 11), max_tokens=8)
    script.run()
    planned = [(chunk.start, chunk.num_tokens, chunk.num_drafts) for chunk in script.chunks(a)]
    assert planned[:2] == [(0, 9, 0), (9, 1, 0)]
    assert script.tokens(a) == script.undisturbed(a)
    assert not drafts.mistakes


def test_steps_report_how_many_draft_tokens_they_held() -> None:
    script = Script(num_pages=200, drafter=ScriptedDrafts(0.5))
    stats: list[StepStats] = []
    script.loop.on_step = stats.append
    a = script.arrive(range(1, 11), max_tokens=60)
    script.run()
    assert sum(step.num_draft_tokens for step in stats) == sum(plan.num_drafts for plan in script.runner.plans)
    accepted = sum(step.num_accepted_tokens for step in stats)
    assert len(script.tokens(a)) == len(stats) + accepted
    assert 0 < accepted < sum(step.num_draft_tokens for step in stats)
    assert all(step.phase == "decode" for step in stats[1:])


def test_an_idle_engine_reports_it_however_short_its_last_step_was() -> None:
    """The step after the last one is planned with its result: there is none, and nothing remains to report."""
    script = Script(num_pages=400, overlap=True, drafter=NgramDrafter())
    script.loop.clock = lambda: 0.0  # all within a moment
    for number in range(8):
        script.arrive([1, 2, 3, 4] * 8, max_tokens=12)
        for _ in range(number + 2):
            script.step()
        script.abort(f"r{number}")
        script.run()
        assert script.loop.load().num_running == 0, number
        assert script.loop.load().pages.private == 0
