"""The endpoints under /v1/cluster/rollouts: versions of models, their weights, and rollouts of new ones."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import ApiError, from_client, model_not_found, quoted
from deployments.api.http.admin import require_admin
from deployments.api.http.route_table import RouteTable
from deployments.api.http.scopes import request_id
from deployments.api.http.transport import json_response
from deployments.api.service.api_service import ApiService
from deployments.client.protocol import RolloutAction, RolloutControl, RolloutRefused, Unavailable

_PATH = "/v1/cluster/rollouts"


def add_rollout_routes(table: RouteTable, service: ApiService, rollouts: RolloutControl) -> None:
    """Register GET, and POST .../{model}/pause, resume and abort."""
    routes = _RolloutRoutes(service, rollouts)
    table.add("GET", _PATH, routes.rollouts)
    for action in ("pause", "resume", "abort"):
        table.add("POST", f"{_PATH}/{{model_id:path}}/{action}", getattr(routes, action))


class _RolloutRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService, rollouts: RolloutControl) -> None:
        self._service, self._rollouts = service, rollouts

    async def rollouts(self, request: Request) -> Response:
        """List the models that have versions, with the weights of these and the rollout of a new one."""
        if self._service.admin_key_hash is not None:
            require_admin(request, self._service.admin_key_hash)
        try:
            return json_response({"object": "list", "data": await self._rollouts.report()})
        except Unavailable as error:
            raise from_client(error, request_id(request.scope)) from None

    async def pause(self, request: Request, model_id: str) -> Response:
        """Let a rollout take no further step. It is still rolled back if the new version exceeds a limit."""
        return await self._control(request, model_id, "pause")

    async def resume(self, request: Request, model_id: str) -> Response:
        """Resume a rollout that is paused, or begin one again that was rolled back or aborted."""
        return await self._control(request, model_id, "resume")

    async def abort(self, request: Request, model_id: str) -> Response:
        """Take all sessions from the new version, also after its rollout is done."""
        return await self._control(request, model_id, "abort")

    async def _control(self, request: Request, model_id: str, action: RolloutAction) -> Response:
        require_admin(request, self._service.admin_key_hash)
        if model_id not in self._service.names:
            raise model_not_found(model_id, self._service.names)
        try:
            report = await self._rollouts.control(model_id, action)
        except RolloutRefused as error:
            raise ApiError(409, f"{error.reason[:1].upper()}{error.reason[1:]}.", code="rollout_refused") from None
        except Unavailable as error:
            raise from_client(error, request_id(request.scope)) from None
        if report is None:
            raise ApiError(404, f"The model {quoted(model_id)} has no rollout in its config.", code="no_rollout")
        return json_response(report)
