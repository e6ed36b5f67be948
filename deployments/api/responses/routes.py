"""The endpoints under /v1/responses/{id}: a stored response, its input, its stream; cancelling it, deleting it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.errors import invalid, quoted
from deployments.api.http.access import tenant_of
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.transport import EventStream, json_response
from deployments.api.off_loop import off_loop
from deployments.api.output.response_encoder import encode_json
from deployments.api.responses.background import ResponseJob
from deployments.api.responses.items import Item
from deployments.api.responses.plan import nothing
from deployments.api.responses.stored import Shelf, is_background, not_found
from deployments.api.service import ApiService

PAGE, LARGEST_PAGE = 20, 100
"""Items of a page by default, and at most, as in OpenAI's API."""
NO_STREAM = "This response cannot be read as a stream: only one that was asked for with background and stream can."


def add_response_routes(app: FastAPI, service: ApiService, room_for: Callable[[Request], BodyRoom]) -> None:
    """Register them. What they read of conversations takes the room that `room_for` gives a request."""
    routes = _ResponseRoutes(service, room_for)
    path = "/v1/responses/{response_id}"
    app.add_api_route(path, routes.retrieve, methods=["GET"])
    app.add_api_route(path, routes.delete, methods=["DELETE"])
    app.add_api_route(f"{path}/cancel", routes.cancel, methods=["POST"])
    app.add_api_route(f"{path}/input_items", routes.input_items, methods=["GET"])


class _ResponseRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService, room_for: Callable[[Request], BodyRoom]) -> None:
        self._service, self._room_for = service, room_for

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Return a response as it is, or its events with `stream=true`."""
        job = self._job(request, response_id)
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            return await self._stream(request, response_id, job)
        if job is not None:
            return _json(job.now())
        return _json((await self._shelf(request).find(response_id)).response)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a response; one that runs in the background is cancelled."""
        job = self._job(request, response_id)
        if job is not None:
            await job.cancel()
        if not await self._shelf(request).delete(response_id) and job is None:
            raise not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancel a response that runs in the background. One that has ended stays as it is."""
        job = self._job(request, response_id)
        if job is not None:
            await job.cancel()
            return _json(job.now())
        stored = await self._shelf(request).find(response_id)
        if not is_background(stored.response):
            raise invalid("Only a response that was asked for with background can be cancelled.", "response_id")
        return _json(stored.response)

    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the items that a response answers, those of responses that it continues included."""
        limit, is_newest_first = _page(request)
        with self._room_for(request) as room:
            shelf = self._shelf(request, room)
            items = await shelf.input_of(await shelf.find(response_id))
            if is_newest_first:
                items.reverse()
            after = request.query_params.get("after")
            if after is not None:
                at = next((at for at, item in enumerate(items) if item["id"] == after), None)
                if at is None:
                    raise invalid(f"after is {quoted(after)}, which is not among the items.", "after")
                items = items[at + 1 :]
            return _json(await off_loop(partial(_listed, items, limit)))

    async def _stream(self, request: Request, response_id: str, job: ResponseJob | None) -> Response:
        after = _starting_after(request)
        if job is not None:
            if not job.keeps_events:
                raise invalid(NO_STREAM, "stream")
            events = job.events(after)
        else:
            stored = await self._shelf(request).find(response_id)
            if not stored.events:
                raise invalid(NO_STREAM, "stream")
            events = _events(stored.events, after)
        return EventStream(events, nothing, self._service.limits.slow_reader_timeout_s, {})

    def _job(self, request: Request, name: str) -> ResponseJob | None:
        return self._service.responses.background.find(tenant_of(request).name, name)

    def _shelf(self, request: Request, room: BodyRoom | None = None) -> Shelf:
        service = self._service
        return Shelf(
            service.responses.store, tenant_of(request).name, service.limits, room or self._room_for(request)
        )


async def _events(stored: bytes, after: int) -> AsyncGenerator[bytes, None]:
    for event in [event for event in stored.split(b"\n\n") if event][after + 1 :]:
        yield event + b"\n\n"


def _starting_after(request: Request) -> int:
    given = request.query_params.get("starting_after", "-1")
    try:
        number = int(given) if len(given) <= 18 else -2
    except ValueError:
        number = -2
    if number < -1:
        raise invalid(
            f"starting_after must be a sequence number of an event, got {quoted(given)}.", "starting_after"
        )
    return number


def _page(request: Request) -> tuple[int, bool]:
    given, order = request.query_params.get("limit", str(PAGE)), request.query_params.get("order", "desc")
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= LARGEST_PAGE):
        raise invalid(f"limit must be an integer in [1, {LARGEST_PAGE}], got {quoted(given)}.", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, got {quoted(order)}.", "order")
    return int(given), order == "desc"


def _listed(items: list[Item], limit: int) -> bytes:
    page = items[:limit]
    return encode_json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
