"""`raydix serve` ends when Serve's controller answers no more, and not because the command itself was paused."""

from __future__ import annotations

import time

import pytest

from deployments.cli.serve import CONTROLLER_S, WATCH_S, _ControllerWatch, _Gone

NUM_CHECKS = int(CONTROLLER_S / WATCH_S)


@pytest.fixture
def watch() -> _ControllerWatch:
    """Watches a controller that never answers."""

    def ask() -> bool:
        raise TimeoutError

    return _ControllerWatch(ask)


def test_a_controller_that_answers_no_more_ends_the_command(watch: _ControllerWatch) -> None:
    for _ in range(NUM_CHECKS):
        watch.check()
    with pytest.raises(_Gone, match="controller has not answered for 120 s; start the server again"):
        watch.check()


def test_a_command_that_was_paused_asks_before_it_judges(
    watch: _ControllerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.check()
    with monkeypatch.context() as later:
        now = time.monotonic() + 10 * CONTROLLER_S
        later.setattr("time.monotonic", lambda: now)
        watch.check()
