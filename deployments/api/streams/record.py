"""A request as it stays with its stream, so that it can be run again without its client sending it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from deployments.api.http.scopes import header, route_path

_KEPT = (b"x-session-id", b"x-raydix-detached-s", b"anthropic-version", b"anthropic-beta")
"""Headers that matter to the answer. The key is none of them: whoever continues a stream sends an own one."""


class StreamRecord(msgspec.Struct, array_like=True, frozen=True):
    """A request for a stream."""

    path: str
    created: int
    """When its answer was begun, in Unix seconds."""
    body: bytes
    headers: list[tuple[bytes, bytes]] = []

    @classmethod
    def of(cls, scope: Scope, created: int, body: bytes) -> StreamRecord:
        """Take down a request whose body, unpacked, was read."""
        kept = [(name, value.encode("latin-1")) for name in _KEPT if (value := header(scope, name)) is not None]
        return cls(route_path(scope), created, body, kept)

    def packed(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, packed: bytes) -> StreamRecord:
        """Read it from bytes."""
        return msgspec.msgpack.decode(packed, type=cls)
