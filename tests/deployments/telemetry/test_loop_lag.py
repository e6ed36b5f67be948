"""The delay of an event loop is noticed, reported for a minute, and then forgotten."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployments.telemetry.loop_lag import IDLE_PERIOD_S, PERIOD_S, WINDOW_S, LoopLag, RunQueue
from monitoring.metrics import Metrics
from tests.deployments.support.virtual_time import VirtualLoop, run
from tests.support.metric_values import snapshot_of


def block(seconds: float) -> None:
    """Let a callback take so long: the clock goes on, the loop does not."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_time(seconds)


def test_the_longest_delay_of_the_last_minute_is_reported() -> None:
    async def scenario() -> None:
        lag = LoopLag()
        assert lag.longest_s() == 0
        lag.start()
        await asyncio.sleep(1)
        assert lag.longest_s() == pytest.approx(0, abs=1e-6)
        block(0.5)
        await asyncio.sleep(10)
        block(0.25)
        await asyncio.sleep(10)
        assert 0.5 - PERIOD_S <= lag.longest_s() <= 0.5
        await asyncio.sleep(WINDOW_S - 15)
        assert 0.25 - PERIOD_S <= lag.longest_s() <= 0.25
        await asyncio.sleep(WINDOW_S)
        assert lag.longest_s() == pytest.approx(0, abs=1e-6)
        lag.close()
        lag.close()

    run(scenario())


def test_while_no_request_is_open_the_timer_goes_off_seldom_and_still_notices_long_delays() -> None:
    async def scenario(is_idle: bool) -> int:
        looks = 0

        def processor_time() -> float:
            nonlocal looks
            looks += 1
            return 0.0

        lag = LoopLag(processor_time, lambda: 0.0, lambda: is_idle)
        lag.start()
        await asyncio.sleep(10)
        block(0.5)
        await asyncio.sleep(1)
        assert 0.5 - IDLE_PERIOD_S <= lag.longest_s() <= 0.5
        lag.close()
        return looks

    assert run(scenario(is_idle=True)) < 0.3 * run(scenario(is_idle=False))


def test_the_lag_is_a_gauge_of_the_ingress() -> None:
    async def scenario() -> dict[tuple[str, ...], float]:
        lag, metrics = LoopLag(), Metrics("m", "i", "ingress")
        lag.start()
        await asyncio.sleep(1)
        block(1.0)
        await asyncio.sleep(0.1)
        lag.report(metrics)
        lag.close()
        return {tuple(key): value for key, value in snapshot_of(metrics).values["ingress_loop_lag_seconds"]}

    assert run(scenario()) == {(): pytest.approx(1.0, abs=2 * PERIOD_S)}


@pytest.mark.parametrize(
    ("computed", "queued", "own"),
    [(0.0, 0.0, 0.0), (0.125, 0.375, 0.125), (4.0, 0.0, 0.5), (4.0, 0.375, 0.125), (0.5, 0.6, 0.0)],
    ids=["stopped", "shares a core", "has threads", "its threads have the cores", "waits for a core"],
)
def test_the_process_s_own_part_of_a_delay_excludes_the_wait_for_a_processor(
    computed: float, queued: float, own: float
) -> None:
    async def scenario() -> None:
        used = waited = 0.0
        lag, metrics = LoopLag(lambda: used, lambda: waited), Metrics("m", "i", "ingress")
        lag.start()
        await asyncio.sleep(1)
        block(0.5)
        used += computed
        waited += queued
        await asyncio.sleep(1)
        lag.report(metrics)
        lag.close()
        (told,) = snapshot_of(metrics).values["ingress_loop_own_lag_seconds"]
        assert told[1] == pytest.approx(own, abs=2 * PERIOD_S)
        assert lag.longest_s() == pytest.approx(0.5, abs=2 * PERIOD_S)

    run(scenario())


def test_the_kernel_says_how_long_a_thread_waits_for_a_processor() -> None:
    """More threads of processes than there are processors: each waits while others compute."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count it")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        queue = RunQueue()
        before, began = queue.waited_s(), time.process_time()
        while queue.waited_s() == before:
            assert time.process_time() - began < 60, "it never waits"
        assert queue.waited_s() > before
        queue.close()
    finally:
        for process in busy:
            process.kill()
            process.wait()
