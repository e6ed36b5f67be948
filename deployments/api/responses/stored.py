"""The stored form of a response, and the conversation that it continues.

    resp_2: chain [resp_1], own input, response  ─▶  input 1 · output 1 · input 2 · output 2

Each record has only what its own response added, so a conversation takes memory once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.base.off_loop import near_or_far
from deployments.api.http.body import check_num_values
from deployments.api.http.body_memory import VALUE_BYTES, BodyRoom
from deployments.api.http.json_size import most_values
from deployments.api.output.response_encoder import encode_json
from deployments.api.responses.ids import is_response_id, response_of
from deployments.api.responses.items import Item
from deployments.api.responses.store import ResponseStore
from deployments.config.limits import Limits

LOST_AFTER_S = 30.0
"""Seconds without news of a response that runs in the background of another ingress, after which it has failed."""


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
    conversation: str | None = None
    """The conversation that contains it and the items before it."""
    beat_at: float | None = None
    """When the ingress that generates it in the background last reported it, in Unix seconds; None if it has
    ended, or if no other ingress can read this."""

    def packed(self) -> bytes:
        """Return it as bytes, in MessagePack. Its encoder would hold up other threads while it copies."""
        pieces = [bytes([_MAP_OF + len(self.__struct_fields__)])]
        for name, value in msgspec.structs.asdict(self).items():
            is_long = isinstance(value, bytes)
            pieces += (
                _pack(name),
                *((_BYTES, len(value).to_bytes(4, "big"), value) if is_long else (_pack(value),)),
            )
        return b"".join(pieces)

    @classmethod
    def unpacked(cls, record: bytes) -> StoredResponse:
        """Read it from bytes."""
        return _unpack(record)


class Conversation(msgspec.Struct):
    """The items before a response's own input."""

    chain: list[str] = []
    items: list[Item] = []
    num_bytes: int = 0
    """Size of these items as JSON."""


class _State(msgspec.Struct):
    status: str
    background: bool = False


class _Output(msgspec.Struct):
    output: msgspec.Raw


_pack = msgspec.msgpack.Encoder().encode
_MAP_OF, _BYTES = 0x80, b"\xc6"
"""How MessagePack marks a map of fewer than 16 names, to be added to their number, and bytes."""
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


def output_of(response: bytes) -> bytes:
    """Return the items that a response said, as a JSON array."""
    return bytes(_output(response).output)


class Shelf:
    """The responses of one tenant, for one request. The conversations that it reads take room as a body does."""

    def __init__(self, store: ResponseStore, tenant: str, limits: Limits, room: BodyRoom) -> None:
        self._store, self._tenant, self._limits, self._room = store, tenant, limits, room

    async def find(self, name: str) -> StoredResponse:
        """Return a stored response. Raises `ApiError` 404."""
        record = (await self._store.get(self._tenant, [name]))[0] if is_response_id(name) else None
        if record is None:
            raise not_found(name)
        return _as_it_is(_unpack(record))

    async def delete(self, name: str) -> bool:
        """Forget a response. Return whether it was there."""
        return is_response_id(name) and await self._store.delete(self._tenant, name)

    async def conversation(self, previous: str | None) -> Conversation:
        """Return the conversation that a response continues. Raises `ApiError` 400, 404 or 429."""
        if previous is None:
            return Conversation()
        last = await self.find_previous(previous)
        if status_of(last.response) in ("queued", "in_progress"):
            raise invalid(
                f"previous_response_id is {quoted(previous)}, which is still being generated; wait for its end.",
                "previous_response_id",
            )
        if last.conversation is not None:
            raise invalid(
                f"previous_response_id is {quoted(previous)}, which continues the conversation "
                f"{last.conversation}; give conversation instead.",
                "previous_response_id",
            )
        packed = await self._before(last)
        texts = _texts(chain(map(_unpack, packed), [last]))
        read = await self.read(_size(packed, last), texts, "previous_response_id")
        return Conversation([*last.chain, previous], *read)

    async def find_previous(self, name: str) -> StoredResponse:
        """Return the response that another continues. Raises `ApiError` 404 for the field."""
        try:
            return await self.find(name)
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiError(
                404, error.message, param="previous_response_id", code="previous_response_not_found"
            ) from None

    async def input_of(self, last: StoredResponse) -> list[Item]:
        """Return all items that a response answers. Raises `ApiError` 404 or 429."""
        packed = await self._before(last)
        texts = chain(_texts(map(_unpack, packed)), [last.items])
        return (await self.read(_size(packed, last), texts))[0]

    async def named(self, names: Sequence[str], param: str = "input") -> tuple[dict[str, Item], int]:
        """Return those of the items with these names that stored responses have, and the size that they have as
        JSON where each is repeated as often as the field `param` names it. Raises `ApiError` 400 or 429.
        """
        if not names:
            return {}, 0
        responses = sorted({response for name in names if (response := response_of(name)) is not None})
        counts, found, num_bytes = Counter(names), dict[str, Item](), 0
        for record in await self._store.get(self._tenant, responses):
            if record is None:
                continue
            with self._room.another() as room:  # Most records that are read are not named, and are soon dropped.
                items, _ = await self.read(len(record), _texts([_unpack(record)]), room=room)
                for item in items:
                    if (count := counts.pop(item["id"], 0)) > 0:
                        found[item["id"]] = item
                        num_bytes += self._repeated(encode_json(item), count, num_bytes, param)
        return found, num_bytes

    async def _before(self, last: StoredResponse) -> list[bytes]:
        """Return the records of the responses that a response continues. Raises `ApiError` 404."""
        records = await self._store.get(self._tenant, last.chain)
        for name, record in zip(last.chain, records, strict=True):
            if record is None:
                raise not_found(name)
        return [record for record in records if record is not None]

    async def read(
        self, size: int, texts: Iterable[bytes], param: str | None = None, room: BodyRoom | None = None
    ) -> tuple[list[Item], int]:
        """Return the items in JSON arrays, read from records of this size, and the arrays' own size.

        For a field `param` they may be as many as if it had them itself.
        """
        work = partial(self._parsed, texts, room or self._room, param)
        return await near_or_far(size, self._limits.inline_body_bytes, work)

    def _parsed(self, texts: Iterable[bytes], room: BodyRoom, param: str | None) -> tuple[list[Item], int]:
        kept, num_bytes = [], 0
        for text in texts:
            room.take(len(text))
            num_bytes += len(text)
            if param is not None and num_bytes > self._limits.max_body_bytes:
                raise _too_large(self._limits, param)
            kept.append(text)
        if param is not None:
            check_num_values(kept, self._limits, "The conversation", param)
        room.take(sum(most_values(text) for text in kept) * VALUE_BYTES)
        return [item for text in kept for item in _items(text)], num_bytes

    def _repeated(self, text: bytes, count: int, num_before: int, param: str) -> int:
        """Take room for an item that is named so often, after others of this size, and return its size."""
        num_bytes = len(text) * count
        if num_before + num_bytes > self._limits.max_body_bytes:
            raise _too_large(self._limits, param)
        self._room.take(num_bytes + most_values(text) * count * VALUE_BYTES)
        return num_bytes


def _as_it_is(stored: StoredResponse) -> StoredResponse:
    """Return a response; as failed, if it runs at another ingress that no longer reports it."""
    if stored.beat_at is None or time.time() - stored.beat_at < LOST_AFTER_S:
        return stored
    fields = msgspec.json.decode(stored.response)
    message = "The ingress that generated the response was lost, or could not store it; send the request again."
    fields |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return msgspec.structs.replace(stored, response=encode_json(fields), beat_at=None)


def not_found(name: str) -> ApiError:
    """Create a 404 for a response that is not stored, or is another tenant's."""
    return ApiError(
        404,
        f"The response {quoted(name)} is not stored here: it was never stored, was deleted or forgotten "
        "(responses.max_bytes, responses.ttl_s), or another ingress has it (ingresses.count, responses.store); "
        "send the conversation itself.",
        code="response_not_found",
    )


def _too_large(limits: Limits, param: str) -> ApiError:
    what = "names items of other responses" if param in ("input", "items") else "is the end of a conversation"
    return invalid(
        f"{param} {what} with more than {limits.max_body_bytes} bytes in all, which is as much as a body may have "
        "(limits.max_body_bytes); send only the items that the model needs.",
        param,
    )


def _texts(responses: Iterable[StoredResponse]) -> Iterator[bytes]:
    """Yield the arrays of items that responses have as JSON: what each adds to its conversation."""
    for stored in responses:
        yield stored.items
        yield output_of(stored.response)


def _size(packed: Sequence[bytes], last: StoredResponse) -> int:
    return sum(map(len, packed)) + len(last.items) + len(last.response)
