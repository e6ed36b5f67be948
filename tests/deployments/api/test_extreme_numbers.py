"""Each field of each body, with the numbers at which float32, float64 and int64 end: taken, or refused by name.

The fields are those of the request models, so a new one is tried as soon as it exists.
"""

from __future__ import annotations

import asyncio
import json
import logging
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from deployments.api import create_app
from deployments.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from deployments.api.batches.batches import NewBatch
from deployments.api.fields.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.api.pooling.protocol import EmbeddingsRequest, RerankRequest, ScoreRequest
from deployments.api.responses.protocol import InputTokensRequest, ResponsesRequest
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from engine.loading.load_model import load_model
from tests.deployments.support.api_over_engines import Api, api_over
from tests.deployments.support.described_api import BODIES

ENDPOINTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/batches": NewBatch,
}
FLOATS = (
    "0.0", "-0.0", "1e-320", "5e-324", "-5e-324", "2.2250738585072014e-308", "1.401298464324817e-45",
    "1e-45", "1e-39",
    "1.1754942106924411e-38", "1.1754943508222875e-38", "-1.1754943508222875e-38", "1e-30", "1e-7", "0.5",
    "3.4028234663852886e38", "-3.4028234663852886e38", "3.4028235677973366e38", "1e39", "-1e39",
    "1.7976931348623157e308", "-1.7976931348623157e308",
)  # fmt: skip
INTEGERS = (
    "0", "-0", "1", "-1", "2147483647", "2147483648", "-2147483648", "-2147483649", "4294967296",
    "9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809",
    "18446744073709551615", "18446744073709551616", "1e18", "1e400", "-1e400", "NaN", "Infinity",
    "-Infinity",
)  # fmt: skip
NOT_OF_JSON = {"NaN", "Infinity", "-Infinity"}
HOLE = "<number>"
OF_THE_MODEL = ("model_not_supported", "context_length_exceeded")
"""Errors that name no field because they are about the model: it cannot rank, or its context is too short."""


@dataclass(frozen=True)
class Place:
    """Where a number goes: the field's name, and a value that has `HOLE` in the number's place."""

    field: str
    value: Any


def places(kind: type[BaseModel]) -> Iterator[Place]:
    """Yield each place of a body that takes a number, in objects and arrays of it, too."""
    for name, field in kind.model_fields.items():
        for value in holes(field.annotation, 2):
            yield Place(field.alias or name, value)


def holes(form: Any, depth: int) -> Iterator[Any]:
    """Yield values of a type, each with `HOLE` where it has a number."""
    origin, arguments = get_origin(form), get_args(form)
    if form in (int, float, Any):
        yield HOLE
    elif origin is Annotated:
        yield from holes(arguments[0], depth)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from holes(argument, depth)
    elif depth and origin is list:
        yield from ([value] for value in holes(arguments[0], depth - 1))
    elif depth and origin is dict:
        yield from ({"5": value} for value in holes(arguments[1], depth - 1))
    elif depth and isinstance(form, type) and issubclass(form, BaseModel):
        for place in places(form):
            yield {place.field: place.value}


def numbers_of(kind: type[BaseModel]) -> Sequence[Place]:
    """The same, without what is tried twice."""
    return list({json.dumps([place.field, place.value]): place for place in places(kind)}.values())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_number_in_any_field_is_an_internal_error(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the API, the wire and a real engine."""

    async def ask(http: httpx.AsyncClient, place: Place, number: str) -> None:
        fields = {"model": "m"} if "model" in ENDPOINTS[path].model_fields else {}
        if "max_tokens" in ENDPOINTS[path].model_fields:
            fields["max_tokens"] = 2  # type: ignore[assignment]
        if "max_output_tokens" in ENDPOINTS[path].model_fields:
            fields["max_output_tokens"] = 2  # type: ignore[assignment]
        text = json.dumps(fields | BODIES[path] | {place.field: place.value})
        answer = await http.post(path, content=text.replace(f'"{HOLE}"', number), headers=JSON)
        case = f"{path} {place.field} {place.value} {number}: {answer.status_code} {answer.text}"
        assert answer.status_code < 500, case
        if answer.status_code >= 400 and number not in NOT_OF_JSON:
            error = answer.json()["error"]
            said = f"{error['message']} {error.get('param')}"
            assert place.field in said or error.get("code") in OF_THE_MODEL, case

    async def run() -> None:
        config: dict[str, Any] = {"model": "demo", "kv_pages": 128, "page_size": 16, "served_name": "m"}
        async with api_over(1, load=load_model, **config) as api, client_of(api, tmp_path) as http:
            for place in numbers_of(ENDPOINTS[path]):
                await asyncio.gather(*(ask(http, place, number) for number in (*FLOATS, *INTEGERS)))

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


JSON = {"content-type": "application/json"}


def client_of(api: Api, files: Path) -> httpx.AsyncClient:
    """A client of the same API with files and batches."""
    service = replace(api.service, spool=Spool(FileSettings(directory=str(files))))
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(service)), base_url="http://test", timeout=60
    )
