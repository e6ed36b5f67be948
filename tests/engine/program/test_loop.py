"""The loop in its own thread: callbacks, wake-ups, stopping, and what happens when something breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from engine.base.errors import EngineStopped, NeverFits, RankLost
from engine.scheduling.stats import StepStats
from engine.values.plan import StepPlan, StepResult
from engine.values.stream_delta import StreamDelta
from tests.engine.support.memory_runner import Table
from tests.engine.support.script import Script


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def test_requests_from_many_threads_all_get_their_tokens() -> None:
    script = Script(num_pages=400)
    events: list[StreamDelta] = []
    steps: list[StepStats] = []
    script.loop.start(events.extend, steps.append)

    lock = threading.Lock()

    def client(number: int) -> None:
        for _ in range(5):
            with lock:  # of the script's bookkeeping; the loop needs none
                script.arrive([number + 1] * 10, max_tokens=4)
            time.sleep(0.001)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: sum(event.finish_reason is not None for event in events) == 30)
    script.loop.stop()
    for name in script.requests:
        got = [t for event in events if event.request_id == name for t in event.token_ids]
        assert got == script.undisturbed(name)
    assert sum(step.num_decode_tokens + step.num_prefill_tokens for step in steps) >= 30 * 4
    assert script.nothing_held()


def test_submit_immediately_refuses_a_request_that_can_never_fit() -> None:
    script = Script(num_pages=2)
    with pytest.raises(NeverFits):
        script.arrive(range(1, 100))


def test_a_stopped_loop_takes_nothing() -> None:
    script = Script()
    script.loop.start(lambda events: None)
    script.loop.stop()
    with pytest.raises(EngineStopped, match="stopping"):
        script.arrive([1, 2, 3])


def test_a_defect_ends_the_loop_visibly() -> None:
    """An exception outside a step must not leave a replica that looks healthy and does nothing."""
    script = Script()

    def broken(events: list[StreamDelta]) -> None:
        raise RuntimeError("scripted defect")

    script.loop.start(broken)
    script.arrive([1, 2, 3])
    wait_for(lambda: script.loop.failure is not None)
    assert "RuntimeError" in (script.loop.failure or "")
    with pytest.raises(EngineStopped, match="RuntimeError"):
        script.arrive([1, 2, 3])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_rank_ends_the_loop_and_none_of_its_requests(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Requests can resume elsewhere; a failed step would have ended them. `on_failure` is called once."""
    script = Script(overlap=overlap)

    def lost(plan: StepPlan) -> NoReturn:
        raise RankLost("rank 2 is gone")

    monkeypatch.setattr(script.runner, "prepare", lost)
    events: list[StreamDelta] = []
    reasons: list[str] = []
    script.loop.start(events.extend, on_failure=reasons.append)
    script.arrive([1, 2, 3])
    wait_for(lambda: script.loop.failure is not None)
    script.loop.fail("and so is rank 3")
    script.loop.stop()
    assert (script.loop.failure, reasons, events) == ("rank 2 is gone", ["rank 2 is gone"], [])


def test_load_counts_waiting_and_running_requests() -> None:
    script = Script(limits={"max_running": 2, "max_step_tokens": 8})
    for i in range(4):
        script.arrive([i + 1] * 20)
    script.step()
    load = script.loop.load()
    assert (load.num_running + load.num_waiting, load.num_steps) == (4, 1)
    assert load.waiting_prefill_tokens == 4 * 20 - 8
    assert load.oldest_wait_seconds > 0
    script.run()
    load = script.loop.load()
    assert (load.num_running, load.num_waiting, load.waiting_prefill_tokens, load.num_finished) == (0, 0, 0, 4)


def test_load_shows_the_work_of_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator sees the work of an engine that hangs in the first step after a pause."""
    script = Script(limits={"max_running": 1})
    shown = []
    run = script.runner.run

    def hanging(plan: StepPlan, tables: list[list[Table]]) -> StepResult:
        shown.append(script.loop.load())
        return run(plan, tables)

    monkeypatch.setattr(script.runner, "run", hanging)
    script.arrive([1] * 10)
    script.arrive([2] * 10)
    script.step()
    assert [(load.num_running, load.num_waiting, load.num_steps) for load in shown] == [(1, 1, 0)]
