"""The loop with several steps in flight: how fast a pipeline is, what it waits for, and how it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.null_model import NullRunner
from engine.base.errors import RankLost
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan, StepResult
from engine.values.stream_delta import StreamDelta
from tests.engine.support.script import Script
from tests.engine.support.simulated_pipeline import SimulatedPipeline
from tests.engine.support.simulated_time import SimulatedEngine


def tokens_per_second(engine: SimulatedEngine, num_requests: int, num_steps: int = 200) -> float:
    for _ in range(num_requests):
        engine.arrive(4, max_tokens=100_000)
    engine.run(until=lambda: len(engine.plans) > 20)
    before, began = sum(map(len, engine.token_times.values())), engine.now
    engine.run(until=lambda: len(engine.plans) > 20 + num_steps)
    return (sum(map(len, engine.token_times.values())) - before) / (engine.now - began)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_pipeline_computes_as_many_steps_at_a_time_as_it_has_stages(num_stages: int) -> None:
    """Each request gets a token as often as from one process with the whole model, but steps have fewer rows."""
    one = tokens_per_second(SimulatedEngine(lambda plan: num_stages * 1e-4 * len(plan.chunks)), 24)
    several = tokens_per_second(SimulatedPipeline(num_stages, None, lambda plan: 1e-4 * len(plan.chunks)), 24)
    assert several == pytest.approx(num_stages * one, rel=0.02)


@pytest.mark.parametrize(("num_requests", "share"), [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (30, 1.0)])
def test_fewer_requests_than_stages_use_as_many_of_them(num_requests: int, share: float) -> None:
    engine = SimulatedPipeline(3)
    tokens_per_second(engine, num_requests)
    steps = len(engine.begins[30:]) / (engine.now - engine.begins[30])
    assert steps == pytest.approx(share, rel=0.05)


def test_a_prompt_that_comes_while_the_pipeline_has_room_is_planned_immediately() -> None:
    engine = SimulatedPipeline(3)
    engine.arrive(4, max_tokens=10)
    names: list[str] = []
    engine.at(10.3, lambda: names.append(engine.arrive(4, max_tokens=2)))
    engine.run()
    [begin] = [at for at, plan in zip(engine.begins, engine.plans, strict=True) if plan.num_prefill and at > 1]
    assert 10.3 <= begin <= 10.302
    assert engine.token_times[names[0]] == pytest.approx([begin + 3, begin + 6])


def test_a_prompt_that_comes_while_the_pipeline_is_full_is_in_the_next_step() -> None:
    engine = SimulatedPipeline(2)
    for _ in range(4):
        engine.arrive(4, max_tokens=10)
    engine.at(10.3, lambda: engine.arrive(4, max_tokens=2))
    engine.run()
    [begin] = [at for at, plan in zip(engine.begins, engine.plans, strict=True) if plan.num_prefill and at > 1]
    assert begin == pytest.approx(11.0)


def test_results_are_applied_in_the_order_of_their_steps() -> None:
    engine = SimulatedPipeline(2, 3)
    applied: list[int] = []
    engine.loop.on_step = lambda stats: applied.append(stats.num_requests)
    names = [engine.arrive(4, max_tokens=10 + 7 * number) for number in range(9)]
    engine.run()
    assert applied == [len(plan.chunks) for plan in engine.plans] and len(set(applied)) > 2
    assert [len(engine.token_times[name]) for name in names] == [10 + 7 * number for number in range(9)]


def test_a_step_takes_from_its_call_to_its_result_and_prompts_are_computed_by_all_stages() -> None:
    """The latency of a step is the time by which a token is delayed; `prefill_rate` is what a queue drains at."""
    engine = SimulatedPipeline(4, None, lambda plan: 1e-3 * plan.num_tokens, max_step_tokens=100)
    seconds: list[float] = []
    engine.loop.on_step = lambda stats: seconds.append(stats.stages.forward)
    engine.arrive(4000)
    engine.run()
    assert seconds == pytest.approx([0.4, 0.5, 0.6, 0.7] + [0.4] * 36), "the first four come to an empty pipeline"
    assert engine.now == pytest.approx(0.1 * 43)
    assert engine.scheduler.load(engine.now).prefill_rate == pytest.approx(1000)


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 4096), (16, 256)])
def test_prompts_that_fit_into_one_step_are_divided_so_that_all_stages_compute(
    num_prompts: int, length: int
) -> None:
    """4,096 tokens take each of two stages 4.1 s: one after the other 8.2 s, in pieces of up to 512 tokens 4.6."""
    engine = SimulatedPipeline(2, None, lambda plan: 1e-3 * plan.num_tokens, max_step_tokens=8192, max_running=16)
    for _ in range(num_prompts):
        engine.arrive(length, max_tokens=1)
    engine.run()
    assert max(plan.num_tokens for plan in engine.plans) == 512
    assert engine.now < 4.7


@pytest.mark.parametrize(("pace", "most_s"), [(1e-4, 1.0), (1e-5, 0.5)])
def test_prompts_delay_streams_in_other_steps_as_little_as_in_their_own(pace: float, most_s: float) -> None:
    """One stream is in flight by itself, and a prompt of 4,000 tokens in steps of its own."""
    limits = {"max_step_ms": None, "max_step_stretch": 0.75}
    engine = SimulatedPipeline(
        2, None, lambda plan: 0.01 + pace * plan.num_prefill, max_step_tokens=4000, **limits
    )
    stream = engine.arrive(4, max_tokens=1000)
    engine.run(until=lambda: len(engine.token_times[stream]) == 50)
    prompt = engine.arrive(4000)
    engine.run(until=lambda: bool(engine.token_times[prompt]))
    times = engine.token_times[stream][50:]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) < 2 * 0.02 and max(gaps) < 3 * 0.02
    assert times[-1] - times[0] < most_s


def test_the_requests_of_a_tenant_take_turns_in_a_pipeline() -> None:
    """While another tenant's requests come first, not all of them have a turn in each round."""
    limits = {"max_step_ms": 100.0, "max_step_stretch": 0.75}
    engine = SimulatedPipeline(2, None, lambda plan: 1e-3 * (1 + len(plan.chunks)), **limits)
    many = [engine.arrive(4, max_tokens=100_000, tenant="many") for _ in range(9)]
    few = [engine.arrive(4, max_tokens=100_000, tenant="few") for _ in range(2)]
    engine.run(until=lambda: engine.now > 2)
    counts = [len(engine.token_times[name]) for name in many]
    assert max(counts) - min(counts) <= 0.1 * max(counts)
    assert min(len(engine.token_times[name]) for name in few) >= max(counts)


def test_steps_behind_one_that_fails_are_applied_and_then_the_engine_is_tested() -> None:
    engine = SimulatedPipeline(3)
    names = [engine.arrive(4, max_tokens=10) for _ in range(6)]
    engine.failing[6] = RuntimeError("scripted failure")
    events: list[StreamDelta] = []
    while engine.loop.has_work:
        events += engine.step()
    failed = {chunk.request.request_id for chunk in engine.plans[6].chunks}
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {name: "error" if name in failed else "length" for name in names}
    assert 0 < len(failed) < 6
    assert engine.loop.self_test.counts["other"] == 1 and engine.loop.failing == ""


def test_a_lost_stage_ends_the_loop_and_none_of_its_requests() -> None:
    engine = SimulatedPipeline(3)
    engine.failing[5] = RankLost("stage 1 is gone")
    events: list[StreamDelta] = []
    is_over = threading.Event()
    engine.loop.start(events.extend, on_failure=lambda _: is_over.set())
    for _ in range(6):
        engine.arrive(4, max_tokens=10)
    assert is_over.wait(60)
    assert engine.loop.failure == "stage 1 is gone"
    assert not [event for event in events if event.finish_reason]
    engine.loop.stop()


# --- stages that are threads -------------------------------------------------------------------------------------


class Stages:
    """Runs a script's steps in stages that are threads, each for a millisecond; the last computes them."""

    def __init__(self, script: Script, num_stages: int) -> None:
        self._script, self._num_stages = script, num_stages
        self._prepare = script.runner.prepare
        self._ends: list[threading.Event] = [threading.Event() for _ in range(num_stages)]
        for end in self._ends:
            end.set()

    def prepare(self, plan: StepPlan) -> Callable[[], Any]:
        step = self._prepare(plan)

        def call() -> Any:
            found: Any = step()
            befores, self._ends = self._ends, [threading.Event() for _ in range(self._num_stages)]
            done = threading.Event()
            ends = self._ends

            def run() -> None:
                for before, end in zip(befores, ends, strict=True):
                    before.wait()
                    threading.Event().wait(0.001)
                    end.set()
                done.set()

            threading.Thread(target=run, daemon=True).start()
            return Threaded(found.wait, done)

        return call


class Threaded:
    """A step in stages that are threads."""

    def __init__(self, result: Callable[[], StepResult], done: threading.Event) -> None:
        self._result, self._done = result, done

    def is_done_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait(self) -> StepResult:
        self._done.wait()
        return self._result()


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_requests_from_many_threads_all_get_their_tokens(micro_batches: int) -> None:
    script = Script(num_pages=400, micro_batches=micro_batches)
    script.runner.prepare = Stages(script, 2).prepare  # type: ignore[method-assign]
    events: list[StreamDelta] = []
    is_done = threading.Event()

    def deliver(deltas: list[StreamDelta]) -> None:
        events.extend(deltas)
        if sum(event.finish_reason is not None for event in events) == 30:
            is_done.set()

    script.loop.start(deliver)
    lock = threading.Lock()

    def client(number: int) -> None:
        for turn in range(5):
            with lock:  # of the script's bookkeeping; the loop needs none
                script.arrive([number + 1] * (10 + turn), max_tokens=6)
            threading.Event().wait(0.002)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done.wait(60)
    script.loop.stop()
    assert not script.runner.mistakes
    for name in script.requests:
        assert [t for event in events if event.request_id == name for t in event.token_ids] == script.alone(name)[
            0
        ]
    assert script.nothing_held()


def test_a_loop_stops_with_steps_in_flight() -> None:
    script = Script(num_pages=400, micro_batches=3)
    script.runner.prepare = Stages(script, 3).prepare  # type: ignore[method-assign]
    begun = threading.Event()
    script.loop.start(lambda deltas: begun.set())
    for number in range(6):
        script.arrive([number + 1] * 10, max_tokens=300)
    assert begun.wait(60)
    script.loop.stop(timeout=10)
    assert script.loop.failure is None and script.loop._thread is not None
    assert not script.loop._thread.is_alive()


def test_settings_and_stages_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size is 2, but the model was loaded in 1 stages"):
        Engine(EngineConfig(model="none", pipeline_parallel_size=2), NullRunner())
