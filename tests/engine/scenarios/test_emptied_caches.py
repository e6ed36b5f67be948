"""A cache that is emptied while the engine works: running requests keep what they rely on, others compute anew."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from engine.base.errors import EngineStopped
from tests.engine.scenarios.conftest import Make
from tests.engine.support.script import Script


def test_a_prefix_that_no_request_uses_is_gone(engine: Make) -> None:
    script = engine()
    script.arrive(range(1, 41))
    script.run()
    held = script.scheduler.account().evictable
    emptied = script.loop.empty_cache()
    script.step()
    assert emptied.result(0) == held > 0
    assert script.scheduler.account().free == script.num_pages
    again = script.arrive(range(1, 41))
    script.run()
    assert script.num_computed(again) >= 40, "nothing of the prompt was found"


def test_a_running_request_keeps_its_pages_and_its_text(engine: Make) -> None:
    script = engine()
    script.arrive(range(1, 41))
    script.run()
    running = script.arrive([*range(1, 41), *range(100, 110)], max_tokens=20)
    script.run(until=lambda: len(script.tokens(running)) == 5)
    computed = script.num_computed(running)
    assert computed < 40, "the prefix was found"
    for _ in range(3):
        emptied = script.loop.empty_cache()
        script.step()
        assert emptied.done()
    assert script.scheduler.account().locked
    script.run()
    assert script.tokens(running) == script.undisturbed(running)


def test_emptying_is_work_for_an_idle_loop() -> None:
    script = Script()
    script.arrive(range(1, 41))
    script.run()
    script.loop.start(lambda events: None)
    assert script.loop.empty_cache().result(60) > 0
    script.loop.stop()


def test_a_loop_that_has_ended_empties_nothing_and_raises_an_error() -> None:
    script = Script()
    script.loop.stop()
    with pytest.raises(EngineStopped, match="stopping"):
        script.loop.empty_cache()


def test_a_wait_for_a_loop_that_ends_is_cancelled() -> None:
    script = Script()
    asked: list[Future[int]] = []
    ended = threading.Event()

    def ask_and_fail(events: object) -> None:
        asked.append(script.loop.empty_cache())
        script.loop.fail("the test says so")
        ended.set()

    script.arrive(range(1, 10))
    script.loop.start(ask_and_fail)
    assert ended.wait(60)
    script.loop.stop()
    assert asked[0].cancelled()
