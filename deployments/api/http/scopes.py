"""Reads facts about a request from its ASGI scope, by the names that the layers know."""

from __future__ import annotations

from starlette.types import Scope, Send

REQUEST_ID = "raydix.request_id"
"""Where `Envelope` leaves a request's id."""


DEFERRABLE = "raydix.deferrable"
"""Where a scope says that its request gives way to all requests of clients."""
NO_READER = "raydix.no_reader"
"""Key of a scope whose answer no client reads: a program within this process asked for it."""
OWN_PROBE = "raydix-serve"
"""User agent with which `raydix serve` asks /health whether its server is ready."""
_ERROR = "raydix.error"
_SEND = "raydix.send"


def request_id(scope: Scope) -> str:
    """Return the id that `Envelope` gave this request."""
    return str(scope.get(REQUEST_ID, ""))


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header, given in lower case; None if the request has none."""
    for given, value in scope["headers"]:
        if given == name:
            text: str = value.decode("latin-1")
            return text
    return None


def route_path(scope: Scope) -> str:
    """Return the path below the application's route prefix, as routes see it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def as_deferrable(scope: Scope) -> Scope:
    """Return the scope of a request that gives way to all requests of clients."""
    return {**scope, DEFERRABLE: True}


def is_deferrable(scope: Scope) -> bool:
    """Return whether a request gives way to all requests of clients: a batch has sent it, in this process."""
    return DEFERRABLE in scope


def is_own_probe(scope: Scope) -> bool:
    """Return whether `raydix serve` asks if it is ready, which is no client's request: it is neither shown nor
    counted.
    """
    return route_path(scope) == "/health" and header(scope, b"user-agent") == OWN_PROBE


def has_reader(scope: Scope) -> bool:
    """Return whether a client reads the answer, which may take as long as it likes."""
    return NO_READER not in scope


def address_of(scope: Scope) -> str:
    """Return the address of a request's client, without its port; "" where it is not known."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


def note_send(scope: Scope, send: Send) -> None:
    """Leave the server's own `send` for bodies, because the layers around an endpoint read only heads."""
    scope[_SEND] = send


def forget_send(scope: Scope) -> None:
    """Remove it at the request's end: it refers back to the scope, so both would wait for a garbage collection."""
    scope.pop(_SEND, None)


def send_for_bodies(scope: Scope, send: Send) -> Send:
    """Return the server's own `send`, to which the parts of a body go once the head has gone through `send`."""
    found: Send = scope.get(_SEND, send)
    return found


def note_error(scope: Scope, message: str) -> None:
    """Leave a request's fault for the layers around."""
    scope[_ERROR] = message


def error_of(scope: Scope) -> str | None:
    """Return a request's fault; None if it was not answered with an error object."""
    found: str | None = scope.get(_ERROR)
    return found
