"""`raydix serve` ends when Serve's controller answers no more, and not because the command itself was paused."""

from __future__ import annotations

import threading
import time

import pytest

from deployments.cli.controller_watch import CONTROLLER_S, WATCH_S, ControllerWatch, Gone

NUM_CHECKS = int(CONTROLLER_S / WATCH_S)


@pytest.fixture
def watch() -> ControllerWatch:
    """Watches a controller that never answers."""

    def ask() -> bool:
        raise TimeoutError

    return ControllerWatch(ask)


def test_a_controller_that_answers_no_more_ends_the_command(watch: ControllerWatch) -> None:
    for _ in range(NUM_CHECKS):
        watch.check()
    with pytest.raises(Gone, match="controller has not answered for 120 s; start the server again"):
        watch.check()


def test_a_command_that_was_paused_asks_before_it_judges(
    watch: ControllerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.check()
    with monkeypatch.context() as later:
        now = time.monotonic() + 10 * CONTROLLER_S
        later.setattr("time.monotonic", lambda: now)
        watch.check()


def test_a_closed_watch_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray, Serve's client would start another one."""
    monkeypatch.setattr("deployments.cli.controller_watch.WATCH_S", 0.001)
    before, asked = set(threading.enumerate()), threading.Semaphore(0)

    def ask() -> bool:
        asked.release()
        return True

    watch = ControllerWatch(ask)
    [thread] = set(threading.enumerate()) - before
    assert asked.acquire(timeout=60) and asked.acquire(timeout=60), "it asks again and again"
    watch.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
