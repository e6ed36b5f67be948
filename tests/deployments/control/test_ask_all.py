"""Calls to all replicas, while Serve's handle knows some and while it knows none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.control.ask_all import ask_all


class ScriptedHandle:
    """A handle whose replicas answer with values; without any, it does what Serve's does."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> ScriptedHandle:
        assert method == "empty_cache"
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if not self._answers:
            raise DeploymentUnavailableError(DeploymentID("EngineReplica", "demo"))
        if isinstance(self._answers[0], BaseException):
            raise self._answers[0]
        return list(self._answers)


def test_a_handle_that_knows_no_replica_yet_has_no_answers() -> None:
    assert asyncio.run(ask_all(ScriptedHandle(), "empty_cache")) == []
    assert asyncio.run(ask_all(ScriptedHandle(1, 2), "empty_cache")) == [1, 2]


def test_a_defect_is_not_taken_for_silence() -> None:
    with pytest.raises(KeyError):
        asyncio.run(ask_all(ScriptedHandle(KeyError("x")), "empty_cache"))
