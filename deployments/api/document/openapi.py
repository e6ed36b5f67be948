"""Makes /openapi.json: the endpoints of the route table, with the answers and errors of `operations.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from deployments.api.document.bounds import bound, bounds_of, open_to_others
from deployments.api.document.operations import EVENTS, JSON, OPERATIONS, AnswerType, EndpointAnswers
from deployments.api.document.reports import Error, MessageError
from deployments.api.fields.ignored import HARMLESS, LABELS
from deployments.api.http.anthropic_errors import is_ours
from deployments.api.http.route_table import RouteTable
from deployments.api.service.api_service import ApiService

_PREFIX = "#/components/schemas/"
_OF_ALL = (400, 401, 403, 404, 421, 429, 431, 500, 503)
"""Statuses of errors that any request may get: its keys, its headers, its names, unread answers, the engines."""
_OF_BODIES = (408, 413, 415)
_SECURITY = {
    "key": {"type": "http", "scheme": "bearer", "description": "A tenant's key, where there are tenants."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
    "admin": {"type": "http", "scheme": "bearer", "description": "The admin key (admin_key_hash)."},
}


def document_of(table: RouteTable, service: ApiService) -> dict[str, Any]:
    """Return the OpenAPI document of all endpoints. It takes too long for the event loop."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Raydix", "version": service.version},
        "paths": table.paths(),
    }
    return _completed(document, service)


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and operation of each endpoint in a document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _completed(document: dict[str, Any], service: ApiService) -> dict[str, Any]:
    bounds, refuses = bounds_of(service), service.limits.unknown_fields == "refuse"
    found = list(operations_of(document))
    known = {(method, path): OPERATIONS.get(f"{method} {path}") for method, path, _ in found}
    types = [answer.type for one in known.values() if one for answer in one.answers.values() if answer.type]
    schemas, parts = msgspec.json.schema_components([*types, Error, MessageError], ref_template=_PREFIX + "{name}")
    by_type = dict(zip(map(str, [*types, Error, MessageError]), schemas, strict=True))
    document["components"] = {"schemas": dict(parts), "securitySchemes": _SECURITY}
    document["security"] = [{}, {"key": []}, {"x-api-key": []}]
    for method, path, operation in found:
        _hoist(operation, document["components"]["schemas"])
        body = operation.get("requestBody", {"content": {}})["content"].get(JSON)
        if body is not None:
            bound(body["schema"], bounds)
            open_to_others(body["schema"], HARMLESS, refuses=refuses)
        one = known[method, path]
        if one is not None:
            _complete(operation, path, one, by_type)
    for schema in document["components"]["schemas"].values():
        open_to_others(schema, LABELS, refuses=refuses)
    return document


def _complete(operation: dict[str, Any], path: str, known: EndpointAnswers, schemas: dict[str, Any]) -> None:
    """Add the description of an endpoint."""
    for name, schema in known.query.items():
        parameters = operation.setdefault("parameters", [])
        parameters[:] = [one for one in parameters if one["name"] != name]
        parameters.append({"name": name, "in": "query", "required": False, "schema": dict(schema)})
    bodies = _OF_BODIES if "requestBody" in operation else ()
    error = schemas[str(MessageError if is_ours(path) else Error)]
    failed = {"description": "What was wrong, and what to do.", "content": {JSON: {"schema": error}}}
    statuses = sorted({*_OF_ALL, *bodies, *known.errors} - known.answers.keys())
    operation["responses"] = {
        **{str(status): _response(answer, schemas) for status, answer in known.answers.items()},
        **{str(status): failed for status in statuses},
    }
    if known.is_admins:
        operation["security"] = [{"admin": []}]


def _response(answer: AnswerType, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = {} if answer.type is None else {"schema": schemas[str(answer.type)]}
    content = {media: schema if media == JSON else {} for media in answer.media}
    text = "The answer" + (", or a stream of its parts." if EVENTS in answer.media else ".")
    return {"description": text, **({"content": content} if content else {})}


def _hoist(value: Any, schemas: dict[str, Any]) -> None:
    """Move the definitions that a body's schema brings to where its references look for them."""
    if isinstance(value, dict):
        for name, schema in value.pop("$defs", {}).items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two types of bodies or answers are named {name}: rename one")
            _hoist(schema, schemas)
        for inner in value.values():
            _hoist(inner, schemas)
    elif isinstance(value, list):
        for inner in value:
            _hoist(inner, schemas)
