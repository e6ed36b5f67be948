"""GET /openapi.json, and GET /docs: the document as a page that loads nothing, for clusters without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from threading import Lock
from typing import Any

from starlette.responses import Response

from deployments.api.document.openapi import document_of, operations_of
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response, whole
from deployments.api.service.api_service import ApiService

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
code,pre{font:13px/1.4 ui-monospace,monospace}pre{background:#8881;padding:.8em;overflow:auto;max-height:40em}
summary{cursor:pointer}h2{font-size:1.05em;margin:1.6em 0 .2em}p{margin:.2em 0}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def add_document_routes(table: RouteTable, service: ApiService) -> None:
    """Register the document and the page, which show all endpoints of the table."""
    document = OnceMade(lambda: document_of(table, service))

    def openapi() -> Response:
        """Describe the API as an OpenAPI document."""
        return json_response(document.get())

    def docs() -> Response:
        """Show the endpoints with their parameters, bodies and answers."""
        headers = {"content-security-policy": _POLICY}
        return whole([page(document.get()).encode()], headers=headers, media_type="text/html")

    table.add("GET", "/openapi.json", openapi, is_documented=False)
    table.add("GET", "/docs", docs, is_documented=False)


class OnceMade:
    """A document that is made on the first request. Thread-safe."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make, self._making = make, Lock()
        self._made: dict[str, Any] | None = None

    def get(self) -> dict[str, Any]:
        """Return the document."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made


def page(document: dict[str, Any]) -> str:
    """Return the page of a document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    endpoints = "".join(_endpoint(*operation) for operation in operations_of(document))
    schemas = "".join(
        f'<h2 id="{escape(name)}">{escape(name)}</h2>{_json(schema)}'
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>What this server answers, from its <a href='openapi.json'>OpenAPI document</a>.</p>"
        f"{endpoints}<h1>Schemas</h1>{schemas}</html>"
    )


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"]
    if operation.get("security"):
        parts.append("<p>Needs the admin key.</p>")
    if operation.get("parameters"):
        parts.append(_details("Parameters", operation["parameters"]))
    if "requestBody" in operation:
        parts.append(_details("Body", operation["requestBody"]["content"]))
    for status, response in operation["responses"].items():
        if not status.startswith("4") and status != "500":
            parts.append(_details(f"{status}: {response['description']}", response.get("content", {})))
    return "".join(parts)


def _details(title: str, value: Any) -> str:
    return f"<details><summary>{escape(title)}</summary>{_json(value)}</details>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"
