"""Registers the endpoints of stored objects: responses, conversations, files and batches."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp

from deployments.api.batches.batches import add_batch_routes
from deployments.api.batches.files import add_file_routes
from deployments.api.http.body import ReadBody
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.route_table import RouteTable
from deployments.api.routes.conversations import add_conversation_routes
from deployments.api.routes.responses import add_response_routes
from deployments.api.service.api_service import ApiService


def add_kept_routes(
    table: RouteTable,
    service: ApiService,
    read: ReadBody,
    room_for: Callable[[Request], BodyRoom],
    app: Callable[[], ASGIApp],
) -> None:
    """Register them. `read` reads bodies; stored objects take the room that `room_for` gives a request. Requests
    that are run again go to `app`.
    """
    add_response_routes(table, service, room_for, app)
    add_conversation_routes(table, service, read, room_for)
    add_file_routes(table, service)
    add_batch_routes(table, service, read)
