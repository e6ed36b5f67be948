"""What is kept of a response, and the conversation that it continues.

    resp_2: chain [resp_1], own input, response  ─▶  input 1 · output 1 · input 2 · output 2

Each record has only what its own response added, so a conversation takes memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from deployments.api.errors import ApiError, invalid, quoted
from deployments.api.off_loop import near_or_far
from deployments.api.responses.ids import is_response_id, response_of
from deployments.api.responses.items import Item
from deployments.api.responses.store import ResponseStore
from deployments.config.limits import Limits


class StoredResponse(msgspec.Struct):
    """A response as it is kept."""

    response: bytes
    """The response object, as JSON."""
    items: bytes
    """The items of its own input, as a JSON array."""
    chain: list[str] = []
    """The responses that it continues, oldest first."""
    events: bytes = b""
    """The events of its stream, where they may be read again."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)


class Conversation(msgspec.Struct):
    """What precedes a response's own input."""

    chain: list[str] = []
    items: list[Item] = []
    num_bytes: int = 0
    """Size of the records with these items."""


class _State(msgspec.Struct):
    status: str
    background: bool = False


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


_unpack = msgspec.msgpack.Decoder(StoredResponse).decode
_state = msgspec.json.Decoder(_State).decode
_output = msgspec.json.Decoder(_Output).decode
_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


def status_of(response: bytes) -> str:
    """Return the status in a response object."""
    return _state(response).status


def is_background(response: bytes) -> bool:
    """Whether a response was made in the background."""
    return _state(response).background


def output_of(stored: StoredResponse) -> list[Item]:
    """Return the items that a response said."""
    return _output(stored.response).output


class Shelf:
    """The responses of one tenant."""

    def __init__(self, store: ResponseStore, tenant: str, limits: Limits) -> None:
        self._store, self._tenant, self._limits = store, tenant, limits

    async def find(self, name: str) -> StoredResponse:
        """Return a stored response. Raises `ApiError` 404."""
        record = (await self._store.get(self._tenant, [name]))[0] if is_response_id(name) else None
        if record is None:
            raise not_found(name)
        return _unpack(record)

    async def delete(self, name: str) -> bool:
        """Forget a response. Return whether it was there."""
        return is_response_id(name) and await self._store.delete(self._tenant, name)

    async def conversation(self, previous: str | None) -> Conversation:
        """Return what a response continues. Raises `ApiError` 400 or 404."""
        if previous is None:
            return Conversation()
        last = await self.find_previous(previous)
        if status_of(last.response) in ("queued", "in_progress"):
            raise invalid(
                f"previous_response_id is {quoted(previous)}, which is still being generated; wait for its end.",
                "previous_response_id",
            )
        return Conversation([*last.chain, previous], *await self._until(last, with_output=True))

    async def find_previous(self, name: str) -> StoredResponse:
        """Return the response that another continues. Raises `ApiError` 404 for the field."""
        try:
            return await self.find(name)
        except ApiError as error:
            raise ApiError(
                404, error.message, param="previous_response_id", code="previous_response_not_found"
            ) from None

    async def input_of(self, last: StoredResponse) -> list[Item]:
        """Return all items that a response answers. Raises `ApiError` 404."""
        return (await self._until(last, with_output=False))[0]

    async def _until(self, last: StoredResponse, *, with_output: bool) -> tuple[list[Item], int]:
        """Return all items up to a response, with or without its own output, and their size."""
        records = await self._store.get(self._tenant, last.chain)
        for name, record in zip(last.chain, records, strict=True):
            if record is None:
                raise not_found(name)
        packed = [record for record in records if record is not None]
        size = sum(map(len, packed)) + len(last.items) + len(last.response)
        work = partial(_joined, packed, last, with_output=with_output)
        return await near_or_far(size, self._limits.inline_body_bytes, work), size

    async def named(self, names: Sequence[str]) -> dict[str, Item]:
        """Return those of the items with these names that stored responses have."""
        responses = sorted({response for name in names if (response := response_of(name)) is not None})
        found: dict[str, Item] = {}
        for record in await self._store.get(self._tenant, responses):
            if record is not None:
                stored = _unpack(record)
                work = partial(_own_items, stored)
                size = len(stored.items) + len(stored.response)
                found |= {
                    item["id"]: item for item in await near_or_far(size, self._limits.inline_body_bytes, work)
                }
        return {name: found[name] for name in names if name in found}


def not_found(name: str) -> ApiError:
    """Create a 404 for a response that is not stored, whoever made it."""
    return ApiError(
        404,
        f"The response {quoted(name)} is not stored here: it was never stored, was deleted or forgotten "
        "(responses.max_bytes, responses.ttl_s), or another ingress has it (ingresses.count); send the "
        "conversation itself.",
        code="response_not_found",
    )


def _joined(packed: Sequence[bytes], last: StoredResponse, *, with_output: bool) -> list[Item]:
    items = [item for record in packed for item in _own_items(_unpack(record))]
    return [*items, *_items(last.items), *(output_of(last) if with_output else ())]


def _own_items(stored: StoredResponse) -> list[Item]:
    return [*_items(stored.items), *output_of(stored)]
