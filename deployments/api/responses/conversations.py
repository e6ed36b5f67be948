"""Conversations that clients keep with the server by name: items that they and responses add, oldest first.

A conversation is one record, which is replaced as a whole; changes are made while the store excludes other
writers.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

import msgspec

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.base.field_checks import at_most
from deployments.api.base.off_loop import near_or_far
from deployments.api.output.response_encoder import encode_json
from deployments.api.responses.ids import is_conversation_id, new_conversation_id, output_id
from deployments.api.responses.items import Item, references, taken_items
from deployments.api.responses.store import ResponseStore
from deployments.api.responses.stored import Conversation, Shelf
from deployments.config.limits import Limits


class StoredConversation(msgspec.Struct):
    """A conversation as it is kept."""

    created_at: int
    metadata: dict[str, str]
    items: bytes = b"[]"
    """Its items, as a JSON array."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)


_unpack = msgspec.msgpack.Decoder(StoredConversation).decode


class Conversations:
    """The conversations of one tenant, for one request, which reads items through its `shelf`."""

    def __init__(self, store: ResponseStore, tenant: str, limits: Limits, shelf: Shelf) -> None:
        self._store, self._tenant, self._limits, self._shelf = store, tenant, limits, shelf

    async def create(self, given: list[Any], metadata: dict[str, str]) -> tuple[str, StoredConversation]:
        """Keep a new conversation. Raises `ApiError` 400."""
        items = encode_json(await self.new_items(given)) if given else b"[]"
        name, stored = new_conversation_id(), StoredConversation(int(time.time()), metadata, items)
        await self._store.put(self._tenant, name, stored.packed())
        return name, stored

    async def new_items(self, given: list[Any]) -> list[Item]:
        """Return items that a client adds, with names. Raises `ApiError` 400, 404 or 429."""
        at_most(self._limits, "max_messages", "items", len(given), "items")
        known, _ = await self._shelf.named(references(given), "items")
        return taken_items(given, self._limits, f"resp_{secrets.token_hex(16)}", known, "items")

    async def find(self, name: str, param: str | None = None) -> StoredConversation:
        """Return a conversation. Raises `ApiError` 404."""
        record = (await self._store.get(self._tenant, [name]))[0] if is_conversation_id(name) else None
        if record is None:
            raise unknown_conversation(name, param)
        return _unpack(record)

    async def read(self, name: str, param: str) -> Conversation:
        """Return the items before a response in a conversation. Raises `ApiError` 400, 404 or 429."""
        stored = await self.find(name, param)
        return Conversation([], *await self._shelf.read(len(stored.items), [stored.items], param))

    async def items(self, stored: StoredConversation) -> list[Item]:
        """Return a conversation's items. Raises `ApiError` 429."""
        return (await self._shelf.read(len(stored.items), [stored.items]))[0]

    async def set_metadata(self, name: str, metadata: dict[str, str]) -> StoredConversation:
        """Replace the metadata of a conversation. Raises `ApiError` 404."""

        def change(stored: StoredConversation) -> None:
            stored.metadata = metadata

        return await self._change(name, change)

    async def add(self, name: str, items: bytes, response: str | None = None) -> None:
        """Add items, a JSON array, at the end. Raises `ApiError` 400 or 404. Those of a `response` are added only
        once, as its stream may have been continued after its end.
        """
        named = None if response is None else output_id("", response, 0).encode()

        def change(stored: StoredConversation) -> None:
            if named is not None and named in stored.items:
                return
            if len(stored.items) + len(items) > self._limits.max_body_bytes:
                raise invalid(
                    f"The conversation would have more than {self._limits.max_body_bytes} bytes, which is as much "
                    "as a body may have (limits.max_body_bytes); begin another.",
                    "items",
                )
            stored.items = joined(stored.items, items)

        await self._change(name, change)

    async def remove(self, name: str, item: str) -> StoredConversation:
        """Remove an item. Raises `ApiError` 404."""
        while True:
            before = await self.find(name)
            items = await self.items(before)
            kept = [each for each in items if each["id"] != item]
            if len(kept) == len(items):
                raise unknown_item(item)
            size = len(before.items)
            text = await near_or_far(size, self._limits.inline_body_bytes, partial(encode_json, kept))

            def change(stored: StoredConversation, seen: bytes = before.items, text: bytes = text) -> None:
                if stored.items == seen:
                    stored.items = text

            after = await self._change(name, change)
            if after.items == text:
                return after

    async def delete(self, name: str) -> None:
        """Forget a conversation. Raises `ApiError` 404."""
        if not is_conversation_id(name) or not await self._store.delete(self._tenant, name):
            raise unknown_conversation(name)

    async def _change(self, name: str, change: Any) -> StoredConversation:
        if not is_conversation_id(name):
            raise unknown_conversation(name)
        changed: list[StoredConversation] = []

        def update(record: bytes) -> bytes:
            stored = _unpack(record)
            change(stored)
            changed.append(stored)
            return stored.packed()

        if not await self._store.update(self._tenant, name, update):
            raise unknown_conversation(name)
        return changed[-1]


def joined(before: bytes, after: bytes) -> bytes:
    """Return a JSON array with the entries of two."""
    if len(before) == 2 or len(after) == 2:
        return before if len(after) == 2 else after
    return before[:-1] + b"," + after[1:]


def unknown_conversation(name: str, param: str | None = None) -> ApiError:
    """Create a 404 for a conversation that is not stored, or is another tenant's."""
    return ApiError(
        404,
        f"The conversation {quoted(name)} is not stored here: it was never made, was deleted or forgotten "
        "(responses.max_bytes, responses.ttl_s), or another ingress has it (ingresses.count, responses.store).",
        param=param,
        code="conversation_not_found",
    )


def unknown_item(name: str) -> ApiError:
    """Create a 404 for an item that a conversation does not have."""
    return ApiError(404, f"The conversation has no item {quoted(name)}.", code="item_not_found")
