"""Steps in flight in a pipeline: each request is in one of them, they share the requests, tokens stay right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.ngram import NgramDrafter
from engine.scheduling.waiting_queue import precedence
from engine.values.beam_search import BeamParams
from engine.values.plan import StepPlan
from engine.values.request import PENDING
from tests.engine.support.draft_sources import ScriptedDrafts
from tests.engine.support.histories import Action, histories
from tests.engine.support.histories import play as play_histories
from tests.engine.support.pipeline_runner import PipelineRunner
from tests.engine.support.script import Script
from tests.support.examples import examples

ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(0, 3),
            st.sampled_from(["", "", "deferrable", "other", "beams", "urgent"]),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("stop"), st.integers(0, 30), st.integers(0, 12)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "deferrable": {"is_deferrable": True},
    "other": {"tenant": "other"},
    "beams": {"beams": BeamParams(2, 2)},
    "urgent": {"priority": -1},
}


def pipeline(micro_batches: int = 2, slowness: int = 99, **options: Any) -> Script:
    """An engine whose steps end when the loop waits for them, if `slowness` is large."""
    limits = {"max_running": 16, "max_step_tokens": 64}
    options = {"num_pages": 400, "limits": limits, "prefix_cache": False, **options}
    return Script(micro_batches=micro_batches, slowness=lambda: slowness, **options)


def runner_of(script: Script) -> PipelineRunner:
    assert isinstance(script.runner, PipelineRunner)
    return script.runner


def decoding(script: Script, count: int, max_tokens: int = 40) -> list[str]:
    """Let requests arrive and begin to decode, all in the same step."""
    names = [script.arrive([i + 1] * 3, max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
    script.run(until=lambda: all(script.tokens(name) for name in names))
    script.runner.plans.clear()
    return names


def names_in(plan: StepPlan) -> list[str]:
    return [chunk.request.request_id for chunk in plan.chunks]


# --- tokens ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(
    ACTIONS,
    st.integers(1, 4),
    st.sampled_from([(16, 4), (60, 1), (10, 16), (200, 4)]),
    st.lists(st.integers(0, 4), min_size=1, max_size=7),
    st.sampled_from([0, 20]),
    st.sampled_from([None, 1.0, 0.5]),
)
def test_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[tuple[Any, ...]],
    micro_batches: int,
    memory: tuple[int, int],
    slowness: list[int],
    host_pages: int,
    drafts: float | None,
) -> None:
    """Whatever comes and goes, and however long steps take. The runner notices a request that is in two steps in
    flight while it decodes, and a token that is not known yet; each step checks that pages add up.
    """
    turns = iter(slowness * 10_000)
    script = Script(
        *memory,
        {"max_step_tokens": 24, "max_running": 6},
        micro_batches=micro_batches,
        slowness=lambda: next(turns),
        host_pages=host_pages,
        drafter=None if drafts is None else ScriptedDrafts(drafts),
    )
    script.play(actions, OPTIONS)
    for name, request in script.requests.items():
        got, reason = script.tokens(name), script.reason(name)
        assert reason is not None and PENDING not in got
        if request.sampling.beams is not None:
            assert reason in ("abort", "error") or script.found(name) == script.found_alone(name)
            continue
        alone = script.undisturbed(name)
        assert got[:-1] == alone[: len(got)][:-1]
        assert reason == "stop" or got == alone[: len(got)]
        assert reason != "length" or len(got) == request.sampling.max_tokens
    assert script.nothing_held()


@settings(max_examples=60, deadline=None)
@given(histories(40), st.integers(2, 4), st.sampled_from([{"state_slots": 12}, {"window": (8, 2)}]))
def test_states_and_windows_are_right_too(
    actions: list[Action], micro_batches: int, model: dict[str, Any]
) -> None:
    """Layers with a recurrent state, and layers with pages of their own for a window."""
    limits = {"max_step_tokens": 16, "max_running": 6, "max_model_len": 60}
    play_histories(pipeline(micro_batches, 3, limits=limits, num_pages=128, prefix_cache=True, **model), actions)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_beams_and_drafts_in_flight_next_to_others(micro_batches: int) -> None:
    script = pipeline(micro_batches, drafter=ScriptedDrafts(0.8), max_drafts=3)
    search = script.arrive(range(1, 11), max_tokens=12, beams=BeamParams(4, 4))
    others = [script.arrive([i + 2] * 9, max_tokens=30) for i in range(5)]
    script.run()
    assert script.found(search) == script.found_alone(search)
    assert all(script.tokens(name) == script.undisturbed(name) for name in others)
    assert runner_of(script).most_in_flight == micro_batches
    drafted = [chunk for plan in script.runner.plans for chunk in plan.chunks if chunk.num_drafts]
    assert len(drafted) > 20


def test_prompt_lookup_drafts_in_a_pipeline() -> None:
    """A request that decodes has no token in flight, so drafts need not wait for other steps."""
    script = pipeline(3, drafter=NgramDrafter())
    names = [script.arrive([5, 6, 7, 8] * 6 + [number], max_tokens=20) for number in range(6)]
    needed = []
    while script.loop.has_work:
        script.step()
        needed.append(script.scheduler.needs_results)
    assert not any(needed)
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


# --- who is in which step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "micro_batches", "sizes"),
    [(7, 2, [4, 3]), (8, 2, [4, 4]), (7, 3, [3, 3, 1]), (1, 2, [1]), (2, 3, [1, 1]), (3, 4, [1, 1, 1])],
)
def test_decodes_are_divided_over_the_steps_in_flight(count: int, micro_batches: int, sizes: list[int]) -> None:
    """Although all of them have got their first token in one step."""
    script = pipeline(micro_batches)
    names = decoding(script, count)
    script.run(until=lambda: len(script.runner.plans) == 4 * len(sizes))
    found = [len(plan.chunks) for plan in script.runner.plans]
    for first in range(len(found) - len(sizes) + 1):  # any of them may come first
        assert sorted(found[first : first + len(sizes)]) == sorted(sizes)
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    assert runner_of(script).most_in_flight == min(count, micro_batches)


def test_requests_that_join_or_leave_are_divided_again() -> None:
    script = pipeline(2)
    decoding(script, 4)
    joined = [script.arrive([50 + i] * 3, max_tokens=40, ignore_eos=True) for i in range(4)]
    script.run(until=lambda: all(len(script.tokens(name)) > 1 for name in joined))
    script.runner.plans.clear()
    script.run(until=lambda: len(script.runner.plans) == 6)
    assert [len(plan.chunks) for plan in script.runner.plans[2:]] == [4] * 4
    for name in joined:
        script.abort(name)
    script.step()
    script.step()
    script.runner.plans.clear()
    script.run(until=lambda: len(script.runner.plans) == 8)
    assert [len(plan.chunks) for plan in script.runner.plans[4:]] == [2] * 4


@pytest.mark.parametrize("slowness", [0, 1, 2, 99])
@pytest.mark.parametrize("tenants", [1, 2])
def test_no_request_decodes_more_often_than_another(slowness: int, tenants: int) -> None:
    """However soon steps end: a step that has ended may leave its requests ready before others had a turn."""
    script = pipeline(3, slowness)
    names = [script.arrive([i + 1] * 3, max_tokens=60, ignore_eos=True, tenant=str(i % tenants)) for i in range(8)]
    script.run(until=lambda: all(script.tokens(name) for name in names))
    script.runner.plans.clear()
    script.run(until=lambda: len(script.runner.plans) == 60)
    counts = Counter(name for plan in script.runner.plans for name in names_in(plan))
    assert max(counts.values()) - min(counts[name] for name in names) <= 1


def test_a_long_prompt_fills_the_pipeline() -> None:
    """Its chunks follow each other before the first is computed."""
    script = pipeline(4, limits={"max_step_tokens": 10, "max_running": 4})
    name = script.arrive(range(1, 96), max_tokens=3)
    script.run(until=lambda: runner_of(script).num_in_flight == 4)
    assert [(chunk.start, chunk.num_tokens) for chunk in script.chunks(name)] == [
        (0, 10),
        (10, 10),
        (20, 10),
        (30, 10),
    ]
    script.run()
    assert script.tokens(name) == script.undisturbed(name)


def test_a_prompt_enters_while_all_others_are_in_flight() -> None:
    script = pipeline(3)
    decoding(script, 1)
    assert runner_of(script).num_in_flight == 1
    late = script.arrive(range(60, 70), max_tokens=4)
    script.step()
    assert runner_of(script).num_in_flight == 2 and names_in(script.runner.plans[-1]) == [late]
    script.run()
    assert script.tokens(late) == script.undisturbed(late)


def test_deferrable_requests_are_divided_by_their_own_number() -> None:
    script = pipeline(2)
    for i in range(6):
        script.arrive([i + 1] * 3, max_tokens=40, ignore_eos=True, is_deferrable=True)
    script.run(until=lambda: all(script.tokens(name) for name in script.requests))
    script.runner.plans.clear()
    script.run(until=lambda: len(script.runner.plans) == 6)
    assert [len(plan.chunks) for plan in script.runner.plans] == [3] * 6


# --- memory, aborts, failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_pages", [0, 64])
def test_pages_are_taken_from_a_running_request_only_with_nothing_in_flight(host_pages: int) -> None:
    """Then the first in order gets what it needs, and pages that were written to the host may be read."""
    script = pipeline(3, num_pages=24, page_size=4, host_pages=host_pages)
    in_flight = []
    schedule, allocator = script.scheduler.schedule, script.scheduler.allocator

    def watched(now: float) -> StepPlan:
        is_drained = allocator.is_starved or allocator.is_swapping
        assert not (is_drained and runner_of(script).num_in_flight)
        plan = schedule(now)
        in_flight.extend([runner_of(script).num_in_flight] if plan.preempted else [])
        decodes = [chunk.request for chunk in plan.chunks if chunk.num_tokens == 1]
        assert decodes == sorted(decodes, key=precedence)
        assert not is_drained or plan.chunks[0].request is allocator.running[0]
        return plan

    script.scheduler.schedule = watched  # type: ignore[method-assign]
    names = [script.arrive([i + 1] * 20, max_tokens=30) for i in range(5)]
    script.run()
    assert in_flight and not any(in_flight)
    load = script.scheduler.load(script.now)
    assert load.num_preemptions > 0 and (load.num_swapped > 0) == (host_pages > 0)
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)
    assert script.nothing_held()


def test_an_abort_ends_a_request_whose_step_is_in_flight() -> None:
    script = pipeline(2)
    names = decoding(script, 4)
    script.run(until=lambda: runner_of(script).num_in_flight == 2)
    script.abort(names[0])
    script.step()
    assert script.reason(names[0]) == "abort" and not script.is_running(names[0])
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in names[1:])
    assert script.nothing_held()


def test_a_step_that_fails_ends_only_its_own_requests() -> None:
    """The steps behind it are applied before the engine is tested."""
    script = pipeline(3)
    names = decoding(script, 6)
    script.run(until=lambda: runner_of(script).num_in_flight == 3 and len(script.runner.plans) > 3)
    first = names_in(script.runner.plans[-3])
    script.runner.fail_next = True
    script.run()
    assert sorted(script.runner.failed) == sorted(first) and len(first) == 2
    for name in names:
        assert script.reason(name) == ("error" if name in first else "length")
        assert script.tokens(name) == script.undisturbed(name)[: len(script.tokens(name))]
    assert script.nothing_held()
