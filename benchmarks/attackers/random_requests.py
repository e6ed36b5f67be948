"""Random requests, made from the service's own /openapi.json: right, nearly right, and quite wrong.

A body follows the schema; then some of its parts are replaced by what somebody might send instead. Each answer
must be a proper success or a proper error.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.siege_answers import Answer, fault
from benchmarks.siege_app import authorization

AT_ONCE, IN_A_ROUND = 8, 40
LEAVES_AFTER_S = 20.0
"""After which a request is given up: a queue for the engines is no defect."""

_TEXTS = (
    "Return the", "a word", "Tell me.", "", " ", "a" * 300, "\u0000", "\U0001f469\u200d\U0001f469", "%s%n", "..",
    "<|im_start|>system", "</tool_call>", "word " * 200, "NaN", "1e400", "${jndi:x}", "'; --", "{{ 7 * 7 }}",
    "\ud83d\ude00", "x" * 5000,
)  # fmt: skip
_INTEGERS = (1, 2, 3, 0, 5, 8, 20, -1, 100, 4096, 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 10**20)
_NUMBERS = (1.0, 0.5, 0.25, 0.0, 1.5, -1.0, 2.0, 1e-9, 100.0, 1e300, -1e300)
_OTHERS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, 10**400, "", "text", [], {}, [[]], [{}], {"a": None}, [None], ["a", 1],
    {"type": "object"}, {"$ref": "#"}, [[[[[[[[1]]]]]]]], "\ud800", {"": ""}, float("nan"), float("inf"),
)  # fmt: skip
"""What is put in the place of something else."""
_PATHS = ("demo", "none", "..%2f..", "%00", "a" * 3000, "%F0%9F", "demo/load", ";", "{model_id}")
_QUERIES = (
    "",
    "limit=5",
    "limit=-1",
    "limit=x",
    "limit=5&model=demo",
    "model=%00",
    "a" * 2000,
    "limit=" + "9" * 400,
)
_HEADERS: tuple[dict[str, str], ...] = (
    {"x-session-id": "s"}, {"x-session-id": "s" * 300}, {"x-max-wait-s": "5"}, {"x-max-wait-s": "nan"},
    {"x-request-id": "a b"}, {"x-request-id": "a" * 200}, {"x-raydix-explain": "true"}, {"traceparent": "00-x-y"},
    {"content-type": "text/plain"}, {"content-encoding": "gzip"}, {"host": "evil.example"}, {"accept": "nothing"},
    {"origin": "https://evil.example"}, {"content-type": "application/json; charset=utf-16"},
)  # fmt: skip


class RandomRequests(Attacker):
    """Sends random requests, and judges each answer."""

    name = "random requests"

    _document: dict[str, Any] | None = None

    def kinds(self) -> Mapping[str, Kind]:
        """Return the only kind."""
        return {f"{IN_A_ROUND} requests": self._send_all}

    async def _send_all(self) -> None:
        """Send some requests, a few at a time."""
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=self.target.app.url, timeout=None, limits=limits) as client:
            while self._document is None:
                self._document = await _document(client)
            room = asyncio.Semaphore(AT_ONCE)

            async def one() -> None:
                async with room:
                    await self._send(client)

            await asyncio.gather(*(one() for _ in range(IN_A_ROUND)))

    async def _send(self, client: httpx.AsyncClient) -> None:
        assert self._document is not None
        path, method, content = drawn(self._document, self.draw)
        keys = {"authorization": "Bearer " + "x" * 40} if self.draw.random() < 0.1 else authorization("hostile")
        headers = {"content-type": "application/json"}
        if self.draw.random() < 0.25:
            headers |= self.draw.choice(_HEADERS)
        if self.draw.random() < 0.9:
            headers = {**keys, **headers}
        try:
            async with asyncio.timeout(LEAVES_AFTER_S):
                response = await client.request(method, path, content=content, headers=headers)
        except TimeoutError:
            self.counts["given up"] += 1
            return
        except httpx.TransportError:  # a killed ingress
            self.counts["broken off"] += 1
            return
        self.counts[str(response.status_code)] += 1
        told = Answer(response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.content)
        what = None if method == "HEAD" else fault(told)
        if what is not None:
            self.wrong.append(f"{method} {path[:80]} {content[:500]!r}: {what}")


async def _document(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """Return the description of the API; None when the ingress that should have told was killed."""
    try:
        response = await client.get("/openapi.json", headers=authorization("hostile"))
    except httpx.TransportError:
        await asyncio.sleep(0.5)
        return None
    document: dict[str, Any] = response.raise_for_status().json()
    return document


def drawn(document: Mapping[str, Any], draw: random.Random) -> tuple[str, str, bytes]:
    """Return the path with its query, the method and the body of a request."""
    paths = sorted(document["paths"])
    with_bodies = [path for path in paths if "requestBody" in document["paths"][path].get("post", {})]
    path, method = draw.choice(with_bodies), "post"
    if draw.random() < 0.3:
        path = draw.choice(paths)
        method = draw.choice([*document["paths"][path], "get", "post", "put", "head", "patch"])
    operation = document["paths"][path].get(method, {})
    path = re.sub(r"\{\w+\}", lambda _: draw.choice(_PATHS), path)
    if draw.random() < 0.1:
        path += draw.choice(("/", "//", "/x", "%20"))
    if query := draw.choice(_QUERIES) if method == "get" else "":
        path += f"?{query}"
    if "requestBody" not in operation:
        return path, method.upper(), b"" if draw.random() < 0.8 else b"{}"
    content = operation["requestBody"]["content"]  # that of a form is sent as JSON, which is a fault of its own
    schema = content.get("application/json", next(iter(content.values())))["schema"]
    return path, method.upper(), _body(_Maker(document, draw).body(schema), draw)


def _body(value: Any, draw: random.Random) -> bytes:
    text = json.dumps(value).encode()
    how = draw.random()
    if how < 0.9:
        return text
    if how < 0.95:
        return text[: draw.randrange(len(text))]
    place = draw.randrange(len(text))
    return text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :]


def _both(schema: Mapping[str, Any], form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an object that has the fields of both."""
    fields = {**schema.get("properties", {}), **form.get("properties", {})}
    return {**schema, "properties": fields, "required": [*schema.get("required", ()), *form.get("required", ())]}


class _Maker:
    """Makes values that a schema of the document describes, and spoils them."""

    def __init__(self, document: Mapping[str, Any], draw: random.Random) -> None:
        self._document, self._draw = document, draw

    def body(self, schema: Mapping[str, Any]) -> Any:
        """Return a body with none, one or several faults."""
        schema = self._named(schema)
        value = self.value(schema)
        value["model"] = "demo"
        if "max_tokens" in schema.get("properties", {}):
            value["max_tokens"] = self._draw.randint(1, 40)
        for _ in range(self._draw.choice([0, 0, 1, 1, 1, 2, 3])):
            value = self._spoiled(value)
        return value

    def _named(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema that a reference names, or the schema itself."""
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return what the schema describes."""
        draw = self._draw
        schema = self._named(schema)
        if forms := schema.get("anyOf") or schema.get("oneOf"):
            form = self._named(draw.choice(forms))
            if "type" not in schema:
                return self.value(form, depth)
            schema = _both(schema, form)
        if "enum" in schema or "const" in schema:
            return draw.choice(schema["enum"]) if "enum" in schema else schema["const"]
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items", {})
            return [self.value(items, depth + 1) for _ in range(draw.choice([1, 1, 2, 3]))]
        common = {"string": _TEXTS, "integer": _INTEGERS, "number": _NUMBERS, "boolean": (True, False)}
        if kind == "null":
            return None
        return draw.choice(self._common(common[kind]) if kind in common else _OTHERS)

    def _common(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the first few, which most fields take, or now and then all."""
        return values if self._draw.random() < 0.15 else values[:3]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        draw, fields = self._draw, schema.get("properties", {})
        required = set(schema.get("required", ()))
        chosen = [name for name in fields if name in required or draw.random() < (0.12 if depth == 0 else 0.5)]
        made = {name: self.value(fields[name], depth + 1) for name in chosen}
        extra = schema.get("additionalProperties")
        if isinstance(extra, Mapping):
            made |= {str(draw.choice(_INTEGERS)): self.value(extra, depth + 1) for _ in range(draw.randint(0, 2))}
        return made

    def _spoiled(self, value: Any) -> Any:
        """Replace, remove or add something somewhere in a value."""
        draw = self._draw
        if isinstance(value, dict) and value and draw.random() < 0.85:
            name = draw.choice(sorted(value))
            if (how := draw.random()) < 0.1:
                return {key: inner for key, inner in value.items() if key != name}
            if how < 0.2:
                return {**value, draw.choice(_TEXTS): draw.choice(_OTHERS)}
            return {**value, name: self._spoiled(value[name])}
        if isinstance(value, list) and value and draw.random() < 0.8:
            place = draw.randrange(len(value))
            return [*value[:place], self._spoiled(value[place]), *value[place + 1 :]]
        return draw.choice(_OTHERS)
