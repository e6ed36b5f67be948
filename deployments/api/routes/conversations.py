"""The endpoints of /v1/conversations: conversations by name, and their items."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import invalid
from deployments.api.base.off_loop import off_loop
from deployments.api.fields.field_values import described_as
from deployments.api.fields.ignored import IgnoredFields
from deployments.api.fields.metadata import checked_metadata
from deployments.api.fields.openapi import body_of
from deployments.api.fields.protocol import parse
from deployments.api.fields.strict_model import StrictModel
from deployments.api.http.access import tenant_of
from deployments.api.http.body import ReadBody
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.paging import is_newest_first, page_of, page_size
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_in_pieces, json_response, name_ignored
from deployments.api.output.response_encoder import encode_json
from deployments.api.responses.conversations import Conversations, StoredConversation, unknown_item
from deployments.api.responses.item_schema import AnyItem
from deployments.api.responses.items import Item, usable_items
from deployments.api.responses.stored import Shelf
from deployments.api.service.api_service import ApiService

PAGE, LARGEST_PAGE = 20, 100


class _Items(StrictModel):
    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """See `StrictModel`."""
        return (
            fields | {"items": usable_items(fields.get("items"), ignored, "items")}
            if "items" in fields
            else fields
        )


class NewConversation(_Items):
    """Body of POST /v1/conversations."""

    items: Annotated[list[Any] | None, described_as(list[AnyItem] | None)] = None
    metadata: dict[str, str] | None = None


class ConversationChange(StrictModel):
    """Body of POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None


class NewItems(_Items):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[list[Any], described_as(Annotated[list[AnyItem], Field(min_length=1)])]
    include: list[str] | None = None


def add_conversation_routes(
    table: RouteTable, service: ApiService, read: ReadBody, room_for: Callable[[Request], BodyRoom]
) -> None:
    """Register them."""
    routes = _ConversationRoutes(service, read, room_for)
    top = "/v1/conversations"
    one, items = f"{top}/{{conversation_id}}", f"{top}/{{conversation_id}}/items"
    item = f"{items}/{{item_id}}"
    table.add("POST", top, routes.create, body=partial(body_of, NewConversation))
    table.add("GET", one, routes.retrieve)
    table.add("POST", one, routes.update, body=partial(body_of, ConversationChange))
    table.add("DELETE", one, routes.delete)
    table.add("POST", items, routes.add_items, body=partial(body_of, NewItems))
    table.add("GET", items, routes.list_items)
    table.add("GET", item, routes.retrieve_item)
    table.add("DELETE", item, routes.delete_item)


class _ConversationRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService, read: ReadBody, room_for: Callable[[Request], BodyRoom]) -> None:
        self._service, self._read, self._room_for = service, read, room_for

    async def create(self, request: Request) -> Response:
        """Keep a new conversation."""
        asked = await self._asked(request, NewConversation)
        if not self._service.responses.settings.max_bytes:
            raise invalid("Conversations need responses to be stored, but responses.max_bytes is 0.")
        metadata = checked_metadata(asked.metadata) or {}
        with self._room_for(request) as room:
            return _shown(*await self._conversations(request, room).create(asked.items or [], metadata))

    async def retrieve(self, request: Request, conversation_id: str) -> Response:
        """Return the description of a conversation."""
        with self._room_for(request) as room:
            return _shown(conversation_id, await self._conversations(request, room).find(conversation_id))

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replace a conversation's metadata."""
        asked = await self._asked(request, ConversationChange)
        metadata = checked_metadata(asked.metadata) or {}
        with self._room_for(request) as room:
            conversations = self._conversations(request, room)
            return _shown(conversation_id, await conversations.set_metadata(conversation_id, metadata))

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Forget a conversation."""
        with self._room_for(request) as room:
            await self._conversations(request, room).delete(conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        """Add items at the end of a conversation."""
        asked = await self._asked(request, NewItems)
        with self._room_for(request) as room:
            conversations = self._conversations(request, room)
            items = await conversations.new_items(asked.items)
            text = encode_json(items)
            await conversations.add(conversation_id, text)
        ids = [item["id"] for item in items] or [None]  # all of them may be omitted
        fields = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return _json(encode_json(fields))

    async def list_items(self, request: Request, conversation_id: str) -> Response:
        """List a conversation's items."""
        limit, newest_first = page_size(request, PAGE, LARGEST_PAGE), is_newest_first(request)
        with self._room_for(request) as room:
            items = await self._items(request, conversation_id, room)
            if newest_first:
                items.reverse()
            page = page_of(request, items, limit, lambda item: str(item["id"]), lambda item: item)
            return _json(await off_loop(partial(encode_json, page)))

    async def retrieve_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Return an item of a conversation."""
        with self._room_for(request) as room:
            for item in await self._items(request, conversation_id, room):
                if item["id"] == item_id:
                    return _json(encode_json(item))
        raise unknown_item(item_id)

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Remove an item from a conversation."""
        with self._room_for(request) as room:
            return _shown(
                conversation_id, await self._conversations(request, room).remove(conversation_id, item_id)
            )

    async def _asked(self, request: Request, kind: Any) -> Any:
        asked, ignored = parse(await self._read(request), self._service.limits, kind)
        if ignored:
            name_ignored(request.scope, ignored)
        return asked

    async def _items(self, request: Request, name: str, room: BodyRoom) -> list[Item]:
        conversations = self._conversations(request, room)
        return await conversations.items(await conversations.find(name))

    def _conversations(self, request: Request, room: BodyRoom) -> Conversations:
        store, limits, tenant = self._service.responses.store, self._service.limits, tenant_of(request).name
        return Conversations(store, tenant, limits, Shelf(store, tenant, limits, room))


def _shown(name: str, stored: StoredConversation) -> Response:
    return json_response(
        {"id": name, "object": "conversation", "created_at": stored.created_at, "metadata": stored.metadata}
    )


def _json(body: bytes) -> Response:
    return json_in_pieces([body])
