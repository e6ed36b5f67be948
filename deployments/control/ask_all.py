"""Calls a method of all replicas of a deployment, through Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError


async def ask_all(engines: Any, method: str) -> list[Any]:
    """Return the answer of each replica that Serve's handle `engines` knows, or the exception that it raised.

    Empty while the handle knows no replica: in a process that has just started, or while none is up.
    """
    try:
        answers: list[Any] = await engines.broadcast(method).results_async(return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    return answers
