"""A `Dispatcher` over a Serve handle, whose router picks the replica."""

from __future__ import annotations

import contextlib
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.context import _set_request_context
from ray.serve.exceptions import BackPressureError

from deployments.client.attempt import ReplicaDied
from deployments.client.protocol import CallOutcome, GenerateRequest


class ServeHandleDispatcher:
    """Sends each request in a call that stays open until the request has ended."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def generate(self, request: GenerateRequest, ingress_id: str, avoid: tuple[str, ...]) -> ServeHandleCall:
        """Call the replica that the router picks.

        Later log lines of this task, and those of the replica in the call, bear the client's request id, which
        Serve takes from this context.
        """
        _set_request_context(request_id=request.x_request_id)
        return ServeHandleCall(self._handle.generate.remote(request, ingress_id, avoid))


class ServeHandleCall:
    """A `ReplicaCall` over a `DeploymentResponse`."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def result(self) -> CallOutcome:
        """Wait for the end of the call. Raises ReplicaDied when the replica's process is gone."""
        try:
            outcome: CallOutcome = await self._response
        except BackPressureError as error:
            return CallOutcome("", refusal="queue_full", reason=str(error))
        except ActorDiedError:
            raise ReplicaDied("its process died") from None
        return outcome

    def cancel(self) -> None:
        """Cancel the call in the replica too."""
        with contextlib.suppress(Exception):
            self._response.cancel()
