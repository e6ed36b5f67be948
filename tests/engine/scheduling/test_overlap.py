"""Planning a step while another runs: the same tokens as without, whatever comes and goes meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.batch import AttentionBatch
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan, StepResult
from engine.values.request import PENDING
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.memory_runner import Table
from tests.engine.support.oracle import save_tiny
from tests.engine.support.script import Script
from tests.support.examples import examples

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("stop"), st.integers(0, 30), st.integers(0, 12)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


def play(actions: list[tuple[Any, ...]], *, overlap: bool, num_pages: int, page_size: int) -> Script:
    script = Script(num_pages, page_size, {"max_step_tokens": 24, "max_running": 6}, overlap=overlap)
    script.play(actions)
    return script


@settings(max_examples=examples(150), deadline=None)
@given(ACTIONS, st.sampled_from([(16, 4), (60, 1), (10, 16)]))
def test_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[tuple[Any, ...]], memory: tuple[int, int]
) -> None:
    """Arrivals, aborts, stops, failures and preemptions: the tokens are those of steps that do not overlap."""
    num_pages, page_size = memory
    script = play(actions, overlap=True, num_pages=num_pages, page_size=page_size)
    for name, request in script.requests.items():
        got, alone = script.tokens(name), script.undisturbed(name)
        reason = script.reason(name)
        assert reason is not None
        if reason == "stop":
            assert got[:-1] == alone[: len(got) - 1]
        else:
            assert got == alone[: len(got)]
        if reason == "length":
            assert len(got) == request.sampling.max_tokens
        assert PENDING not in got
    assert script.nothing_held()


@settings(max_examples=60, deadline=None)
@given(ACTIONS.map(lambda actions: [a for a in actions if a[0] not in ("abort", "fail")]))
def test_the_synchronous_twin_gives_the_same_tokens_and_ends(actions: list[tuple[Any, ...]]) -> None:
    """All is the same without aborts and failures, whose moment differs."""
    overlapped = play(actions, overlap=True, num_pages=16, page_size=4)
    twin = play(actions, overlap=False, num_pages=16, page_size=4)
    for name in overlapped.requests:
        if name in twin.runner.eos_after:
            continue  # when it came to be known is a matter of steps
        assert overlapped.tokens(name) == twin.tokens(name)
        assert overlapped.reason(name) == twin.reason(name)


def test_a_step_is_planned_while_another_one_runs() -> None:
    """The planned step's decode begins with a token that only the device knows."""
    script = Script(overlap=True)
    script.arrive(range(1, 11), max_tokens=4)
    assert script.step() == []
    first = script.step()
    assert [event.token_ids for event in first] == [script.undisturbed("r0")[:1]]
    assert script.runner.plans[1].chunks[0].token_ids == [PENDING]
    script.run()
    assert script.tokens("r0") == script.undisturbed("r0")
    assert len(script.runner.plans) == 4, "no step is planned beyond max_tokens"


def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned late, as the step in flight is expected to take long."""
    script = Script(overlap=True)
    a = script.arrive(range(1, 11), max_tokens=4)
    started, finish = threading.Event(), threading.Event()
    run = script.runner.run

    def slow(plan: StepPlan, tables: list[list[Table]]) -> StepResult:
        started.set()
        finish.wait()
        return run(plan, tables)

    monkeypatch.setattr(script.runner, "run", slow)
    monkeypatch.setattr(script.scheduler, "expected_seconds", lambda plan: 1e6)
    script.step()
    started.wait()
    planner = threading.Thread(target=script.step)
    planner.start()
    b = script.arrive(range(100, 110), max_tokens=4)
    finish.set()
    planner.join()
    assert [chunk.request.request_id for chunk in script.runner.plans[1].chunks] == [a, b]
    script.run()
    assert script.tokens(b) == script.undisturbed(b)


def test_a_token_computed_after_a_stop_token_is_dropped() -> None:
    script = Script(overlap=True)
    a = script.arrive(range(1, 11), max_tokens=50)
    script.runner.eos_after[a] = 3
    script.run()
    assert len(script.tokens(a)) == 4 and script.reason(a) == "stop"
    assert len(script.runner.plans) == 5, "one step was in flight when the stop came to be known"
    assert script.nothing_held()


def test_pages_are_taken_from_a_running_request_only_with_nothing_in_flight() -> None:
    script = Script(num_pages=24, page_size=4, overlap=True)
    running: list[StepPlan] = []
    schedule, apply = script.scheduler.schedule, script.scheduler.apply

    def watched(now: float) -> StepPlan:
        plan = schedule(now)
        assert not (plan.preempted and running)
        running.extend([plan] if plan.chunks else [])
        return plan

    def applied(plan: StepPlan, *rest: Any) -> Any:
        running.remove(plan)
        return apply(plan, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.scheduler, "schedule", watched)
        patch.setattr(script.scheduler, "apply", applied)
        names = [script.arrive([i + 1] * 32, max_tokens=30) for i in range(3)]
        script.run()
    assert script.scheduler.load(script.now).num_preemptions > 0
    assert all(script.tokens(name) == script.undisturbed(name) for name in names)


def test_a_step_that_cannot_be_prepared_ends_its_own_requests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real runner fails a step; the step after it was planned with tokens that never came."""
    model = save_tiny("llama3.1", tmp_path)
    engine = Engine.from_config(EngineConfig(model=str(model), device="cpu", page_size=8, kv_pages=64))
    events: list[StreamDelta] = []

    def submit(name: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        engine.loop.submit(engine.new_request(name, [3, 1, 4, 1, 5], sampling))

    def step(times: int = 1) -> None:
        for _ in range(times):
            events.extend(engine.loop.step())

    submit("before")
    step(3)
    with monkeypatch.context() as patch:
        patch.setattr(AttentionBatch, "from_chunks", Mock(side_effect=RuntimeError("scripted failure")))
        step()
    submit("after")
    while engine.loop.has_work:
        step()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"before": "error", "after": "length"}
    submit("again")
    while engine.loop.has_work:
        step()
    got = {name: [t for event in events if event.request_id == name for t in event.token_ids] for name in ends}
    assert got["after"] == [t for event in events if event.request_id == "again" for t in event.token_ids]
    account = engine.cache.account()
    assert account.locked == account.private == 0
