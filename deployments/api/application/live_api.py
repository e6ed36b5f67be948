"""The API of a service whose settings change while it runs."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.application.app import create_app
from deployments.api.service.api_service import ApiService
from deployments.api.service.workroom import Workroom


class LiveApi:
    """An ASGI application that answers each request by the settings that held when it arrived. New settings get
    new layers, which share the workroom of the old ones.
    """

    def __init__(self, service: ApiService) -> None:
        self.service = service
        self._room = Workroom(service)
        self._app: ASGIApp = create_app(service, is_eager=True, room=self._room)

    async def take_over(self, service: ApiService) -> None:
        """Answer the requests that come from now on as this service."""
        app = await asyncio.to_thread(create_app, service, is_eager=True, room=self._room)
        self._room.take_over(service)
        self.service, self._app = service, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)
