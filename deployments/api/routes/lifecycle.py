"""The endpoints under /v1/models: listing models with their states, loading and unloading them."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import ApiError, from_client, invalid
from deployments.api.http.admin import require_admin
from deployments.api.http.route_table import RouteTable
from deployments.api.http.scopes import request_id
from deployments.api.http.transport import json_response
from deployments.api.served.served_model import ServedModel
from deployments.api.service.api_service import ApiService
from deployments.client.protocol import ModelState, NotSwitchable, Unavailable


def add_model_routes(table: RouteTable, service: ApiService) -> None:
    """Register GET, POST .../load and DELETE under /v1/models."""
    routes = _ModelRoutes(service)
    table.add("GET", "/v1/models", routes.list)
    table.add("POST", "/v1/models/{model_id:path}/load", routes.load)
    table.add("GET", "/v1/models/{model_id:path}", routes.describe)
    table.add("DELETE", "/v1/models/{model_id:path}", routes.unload)


class _ModelRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def list(self) -> Response:
        """List the models."""
        service = self._service
        models = await asyncio.gather(*(described(service.find(name), name) for name in service.names))
        return json_response({"object": "list", "data": models})

    async def describe(self, model_id: str) -> Response:
        """Describe one model."""
        self._check_path(model_id)
        return json_response(await described(self._service.find(model_id), model_id))

    async def load(self, request: Request, model_id: str) -> Response:
        """Start a model's engines if it has none. Answers immediately; the model's state shows when they are
        up."""
        return await self._switch(request, model_id, is_on=True)

    async def unload(self, request: Request, model_id: str) -> Response:
        """Take no more requests for a model and stop its engines when their streams have ended."""
        self._check_path(model_id)
        return await self._switch(request, model_id, is_on=False)

    def _check_path(self, model_id: str) -> None:
        """Answer with a 405 unless a model has this name, which else can only be the path that loads one."""
        if model_id.endswith("/load") and model_id not in {*self._service.models, *self._service.versions}:
            raise HTTPException(405)

    async def _switch(self, request: Request, model_id: str, *, is_on: bool) -> Response:
        require_admin(request, self._service.admin_key_hash)
        if model_id in self._service.versions:
            labels = ", ".join(self._service.versions[model_id].labels)
            raise invalid(f"{model_id} has versions, which are loaded separately: name one of {labels}.")
        served = self._service.find(model_id)
        try:
            if served.switch is None:
                raise NotSwitchable("this model is always loaded")
            state = await (served.switch.load() if is_on else served.switch.unload())
        except NotSwitchable as error:
            raise ApiError(409, f"{error.reason[:1].upper()}{error.reason[1:]}.", code="not_switchable") from None
        except Unavailable as error:
            raise from_client(error, request_id(request.scope)) from None
        return json_response(_object(served, state, model_id), 202)


async def described(served: ServedModel, name: str | None = None) -> dict[str, object]:
    """Return a model as /v1/models describes it. `name` is the one by which it was found."""
    return _object(served, "loaded" if served.switch is None else await served.switch.state(), name or served.name)


def _object(served: ServedModel, state: ModelState | None, name: str) -> dict[str, object]:
    """Return a model as OpenAI's clients know it, with its state, which is null if it is not known now."""
    card = served.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.max_model_len,
        "state": state,
    }
