"""How requests reach engine replicas: `Control` over a Serve handle, whose router picks the replica."""

from __future__ import annotations

import contextlib
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.context import _set_request_context
from ray.serve.exceptions import BackPressureError

from deployments.client.attempt import ReplicaDied
from deployments.client.protocol import GenerateRequest


class HandleControl:
    """`Control` over a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def generate(self, request: GenerateRequest, ingress_id: str, avoid: tuple[str, ...]) -> HandleCall:
        """Call the replica that the router picks.

        What this task logs from here on, and the replica in the call, bears the client's request id: Serve takes
        it from this context.
        """
        _set_request_context(request_id=request.x_request_id)
        return HandleCall(self._handle.generate.remote(request, ingress_id, avoid))


class HandleCall:
    """`ControlCall` over a `DeploymentResponse`."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def result(self) -> dict[str, Any]:
        """Wait for the record."""
        try:
            record: dict[str, Any] = await self._response
        except BackPressureError as error:
            return {"refused": "queue_full", "reason": str(error), "retry_after_s": 1.0}
        except ActorDiedError:
            raise ReplicaDied("its process died") from None
        return record

    def cancel(self) -> None:
        """Cancel the call in the replica too."""
        with contextlib.suppress(Exception):
            self._response.cancel()
