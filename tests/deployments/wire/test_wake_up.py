"""A thread that waits in a poll is woken from another one, once for any number of calls."""

from __future__ import annotations

import select

from deployments.wire.wake_up import WakeUp


def test_calls_before_a_poll_end_it_once() -> None:
    wake_up = WakeUp()
    poller = select.poll()
    poller.register(wake_up.readable, select.POLLIN)
    wake_up.clear()
    assert not poller.poll(0)
    for _ in range(100):
        wake_up.wake()
    assert poller.poll(0)
    wake_up.clear()
    assert not poller.poll(0)
    wake_up.close()


def test_no_call_ever_waits() -> None:
    wake_up = WakeUp()
    for _ in range(100_000):  # more than a pipe holds
        wake_up.wake()
    wake_up.close()
