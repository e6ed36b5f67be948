"""Every route is in /openapi.json: a new one has its entry in `deployments/api/document/operations.py`."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from deployments.api import ApiService
from deployments.api.application.app import route_table
from deployments.api.document.operations import OPERATIONS

_OF_THE_DOCUMENT = ("/docs", "/openapi.json")


class Anything:
    """Stands for what routes would call; none is called here."""


def routes() -> set[str]:
    """Method and path of every route."""
    service: Any = ApiService({}, Anything, cluster=Anything(), rollouts=Anything())  # type: ignore[arg-type]
    return {
        f"{method} {route.path.replace(':path', '')}"
        for route in route_table(service).app({}).routes
        if isinstance(route, Route) and route.path not in _OF_THE_DOCUMENT
        for method in (route.methods or set()) - {"HEAD"}
    }


def test_every_route_is_an_entry_and_every_entry_a_route() -> None:
    assert routes() - OPERATIONS.keys() == set(), "give each an entry in deployments/api/document/operations.py"
    assert OPERATIONS.keys() - routes() == set(), "no such route: remove the entry"
