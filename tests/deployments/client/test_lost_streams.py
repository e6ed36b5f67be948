"""A stream that cannot continue ends with an error object and is counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from monitoring.metrics import Metrics
from tests.deployments.support.api_over_engines import api_over
from tests.deployments.support.in_process_engines import SILENCE, until
from tests.deployments.support.time_limit import run_scenario
from tests.support.metric_values import count_of


@pytest.mark.parametrize(
    ("health", "outcome"), [({"max_migrations": 0}, "gave_up"), ({"migration_wait_s": 0.3}, "no_replica")]
)
def test_a_stream_that_cannot_be_resumed_ends_with_an_error(health: dict[str, Any], outcome: str) -> None:
    """The limit of migrations is reached, or the only replica is gone."""

    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        async with api_over(1, metrics=metrics, health={**SILENCE, **health}, kv_pages=400) as api:
            [replica], [runner] = api.engines.replicas, api.engines.runners
            runner.step_s = 0.01  # the streams last longer than it takes to lose their replica
            asked = [asyncio.create_task(api.complete(stream=True, max_tokens=480)) for _ in range(3)]
            await until(lambda: replica.engine.scheduler.load(0).num_steps > 10)
            api.engines.fall_silent(0)
            for answer in await asyncio.gather(*asked):
                *said, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
                assert said and not any("error" in event for event in said)
                assert "lost" in last["error"]["message"]
        assert count_of(metrics, "migrations_total", reason="silent", outcome=outcome) == len(asked)

    run_scenario(scenario())
