"""A request as it stays with its stream, so that it can be run again without its client sending it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from deployments.api.http.scopes import header

_KEPT = (b"x-session-id", b"x-raydix-detached-s", b"anthropic-version", b"anthropic-beta")
"""Headers that matter to the answer. The key is none of them: the client that continues a stream sends one."""


class StreamRecord(msgspec.Struct, array_like=True, frozen=True):
    """A request for a stream."""

    path: str
    created: int
    """When its answer was begun, in Unix seconds."""
    body: bytes
    headers: list[tuple[bytes, bytes]] = []
    has_ids: bool = True
    in_background: bool = False
    """Whether it asks for a response in the background."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, packed: bytes) -> StreamRecord:
        """Read it from bytes."""
        return msgspec.msgpack.decode(packed, type=cls)


def kept_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that its record has."""
    return [(name, value.encode("latin-1")) for name in _KEPT if (value := header(scope, name)) is not None]
