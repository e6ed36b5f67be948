"""An engine computes a token before it serves, and its file shows supervisors that it is healthy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.config.settings import HealthSettings
from deployments.replica.deployment import EngineReplica
from deployments.replica.liveness import Beat, EngineUnhealthy, prove_step
from deployments.replica.pod import NotReadyError, ready_engine
from deployments.replica.settings import ReplicaSettings
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from tests.deployments.support.in_process_engines import CountingRunner


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_config(EngineConfig(kv_pages=16, max_model_len=64, max_running=4, threads=1))


def test_a_step_is_computed_and_not_counted_as_a_users(engine: Engine) -> None:
    prove_step(engine)
    load = engine.loop.load()
    assert (load.num_finished, load.num_running, load.num_waiting) == (0, 0, 0)
    assert load.pages.free == 16


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), MemoryError(), ValueError("odd")],
)
def test_an_engine_whose_steps_fail_takes_no_requests(error: Exception) -> None:
    runner = CountingRunner(16)
    runner.prepare = Mock(side_effect=error)  # type: ignore[method-assign]
    with pytest.raises(EngineUnhealthy, match="first step failed"):
        prove_step(Engine(EngineConfig(page_size=4), runner))


@pytest.fixture
def replica(engine: Engine, tmp_path: Path) -> Iterator[EngineReplica]:
    health = HealthSettings(stall_timeout_s=1e-9, beat_directory=str(tmp_path / "beats"))
    settings = ReplicaSettings(health=health)
    made = EngineReplica(
        EngineConfig(), settings, None, lambda _: engine, lambda: ("r1", "127.0.0.1"), lambda: False
    )
    yield made
    made.close()


def test_a_passed_health_check_touches_the_file_and_a_failed_one_does_not(
    replica: EngineReplica, tmp_path: Path
) -> None:
    beats = str(tmp_path / "beats")
    with pytest.raises(NotReadyError, match="yet"):
        ready_engine(beats)
    asyncio.run(replica.check_health())
    ready_engine(beats)
    an_hour_ago = time.time() - 3600
    os.utime(tmp_path / "beats" / "r1", (an_hour_ago, an_hour_ago))
    replica.engine.loop.fail("the engine loop ended")
    with pytest.raises(EngineUnhealthy):
        asyncio.run(replica.check_health())
    with pytest.raises(NotReadyError, match="3600 s ago"):
        ready_engine(beats)
    replica.close()
    with pytest.raises(NotReadyError, match="yet"):
        ready_engine(beats)


def test_a_file_that_cannot_be_touched_does_not_fail_the_replica(tmp_path: Path) -> None:
    beat = Beat(str(tmp_path / "beats"), "r1")
    (tmp_path / "beats").rmdir()
    beat.mark()
    beat.clear()
    with pytest.raises(NotReadyError):
        ready_engine(str(tmp_path / "beats"))
