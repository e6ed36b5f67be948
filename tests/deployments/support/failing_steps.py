"""Runners whose steps fail: all of them, or those with a request named "poison"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.values.plan import Step, StepPlan
from tests.deployments.support.in_process_engines import CountingRunner


def fail_steps(runner: CountingRunner, find: Callable[[StepPlan], Exception | None]) -> None:
    """Let those steps fail for which `find` returns an error."""
    prepare = runner.prepare

    def prepared(plan: StepPlan) -> Step:
        step, error = prepare(plan), find(plan)

        def run() -> Any:
            if error is not None:
                raise error
            return step()

        return run

    runner.prepare = prepared  # type: ignore[method-assign]


def has_poison(plan: StepPlan, at_token: int = 0) -> bool:
    """Whether a step computes a token of a request named "poison"."""
    return any(
        chunk.request.request_id.startswith("poison") and chunk.request.num_output >= at_token
        for chunk in plan.chunks
    )
