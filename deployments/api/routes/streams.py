"""The endpoints under /v1/streams/{name}: continue a stream without its request, and end one.

GET ─▶ replicas: who has it? ─▶ its request, as it was kept there ─▶ run here, with the position
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deployments.api.base.errors import ApiError, from_client, quoted
from deployments.api.generation.exchange import CLIENT_ERRORS
from deployments.api.http.access import as_tenant, tenant_of
from deployments.api.http.inner_request import InnerAnswer, inner_scope
from deployments.api.http.route_table import RouteTable
from deployments.api.http.scopes import header, request_id
from deployments.api.http.transport import json_response
from deployments.api.output.response_encoder import AnswerName
from deployments.api.service.api_service import ApiService
from deployments.api.streams.asked import AskedStream, with_stream
from deployments.api.streams.position import StreamPosition, is_stream_name, wrong_id
from deployments.api.streams.record import StreamRecord
from deployments.client.protocol import FoundStream, GenerateRequest
from deployments.wire.messages import ResumableStream
from engine.values.sampling_params import SamplingParams


def add_stream_routes(table: RouteTable, service: ApiService, app: Callable[[], ASGIApp]) -> None:
    """Register them. The requests that are run again go to `app`."""
    routes = _StreamRoutes(service, app)
    table.add("GET", "/v1/streams/{name}", routes.continue_stream)
    table.add("DELETE", "/v1/streams/{name}", routes.end_stream)


class _StreamRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService, app: Callable[[], ASGIApp]) -> None:
        self._service, self._app = service, app

    async def continue_stream(self, request: Request, name: str) -> Response:
        """Continue a stream after the event that Last-Event-ID names, or from its first event.

        Its request must have asked for a stream with ids of events. The stream has one reader: one that read it
        before gets an error event, `taken_over`.
        """
        _, found = await found_stream(self._service, tenant_of(request).name, name)
        last = header(request.scope, b"last-event-id")
        position = StreamPosition.parse(last) if last else None
        if position is not None and position.name.id != name:
            raise wrong_id(f"Last-Event-ID belongs to the stream {position.name.id}, not to {quoted(name)}.")
        return continued(request, self._app(), name, found, position)

    async def end_stream(self, request: Request, name: str) -> Response:
        """End a stream, whether it is read or not. A client that continues it has it generated again."""
        tenant = tenant_of(request).name
        model, found = await found_stream(self._service, tenant, name)
        client = self._service.models[model].client

        async def end(index: int) -> None:
            stream, sampling = ResumableStream(name, index, tenant), SamplingParams(seed=0)
            part = found.parts[index]
            first_id = part.part.request_id.partition("~")[0]
            adopting = GenerateRequest(first_id, model, [], sampling, tenant=tenant, stream=stream)
            await (await client.adopt(adopting, part)).aclose()

        try:
            await asyncio.gather(*map(end, found.parts))
        except CLIENT_ERRORS as error:
            raise from_client(error, request_id(request.scope)) from None
        return json_response({"id": name, "object": "stream", "deleted": True})


async def found_stream(service: ApiService, tenant: str, name: str) -> tuple[str, FoundStream]:
    """Return a tenant's stream that replicas have, and the name of their model. Raises `ApiError` 404."""
    models = list(service.models) if is_stream_name(name) else []
    answers = await asyncio.gather(*(service.models[model].client.find(name, tenant) for model in models))
    for model, found in zip(models, answers, strict=True):
        if found is not None and found.parts:
            return model, found
    message = (
        f"There is no stream {quoted(name)}: it never was, has ended and is no longer kept (streams.keep_s), or "
        "was begun without ids of events."
    )
    raise ApiError(404, message, code="stream_not_found")


def continued(
    request: Request,
    app: ASGIApp,
    name: str,
    found: FoundStream,
    position: StreamPosition | None = None,
    after: int = -1,
) -> Response:
    """Run the request of a stream again, to continue it after a position, or after the event of this number.

    Raises `ApiError` 409 if the request was not kept.
    """
    if not found.record:
        message = (
            "The request of this stream was too large to be kept with it (streams.max_record_bytes); POST it "
            "again with Last-Event-ID."
        )
        raise ApiError(409, message, code="request_not_kept")
    record = StreamRecord.unpacked(found.record)
    answer = AnswerName(name, record.created)
    stream = AskedStream(answer, record.has_ids, position, is_continued=True, after=after)
    path = str(request.scope.get("root_path", "")) + record.path
    headers = [(b"content-type", b"application/json"), *record.headers]
    scope = inner_scope(
        request.scope,
        headers,
        request_id(request.scope),
        method="POST",
        path=path,
        raw_path=path.encode(),
    )
    return InnerAnswer(app, as_tenant(with_stream(scope, stream), tenant_of(request)), record.body)
