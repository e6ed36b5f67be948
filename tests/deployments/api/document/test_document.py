"""/openapi.json has every route, with what it really answers; /docs shows it without loading anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from deployments.api import ApiService, TextCodec, create_app
from deployments.api.application.app import route_table
from deployments.api.document.openapi import document_of, operations_of
from deployments.api.document.operations import OPERATIONS
from deployments.api.document.page import OnceMade, page
from monitoring.metrics import Metrics
from tests.deployments.support.all_routes import ADMIN, with_all_routes
from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine, service_around

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "Does it."}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ALL = {"include_timings": True, "return_token_ids": True, "prompt_logprobs": 1}


@pytest.fixture
def whole(service: ApiService, tmp_path: Path) -> ApiService:
    return with_all_routes(service, tmp_path)


@pytest.fixture
def client(whole: ApiService) -> Client:
    return Client(httpx.ASGITransport(create_app(whole)))


@pytest.fixture(scope="module")
def shared(codec: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Client, ScriptedEngine]:
    """A client of an API with all routes, which takes longer to be made than to answer, and its engine."""
    engine = ScriptedEngine(codec)
    whole = with_all_routes(service_around(engine, codec, Metrics(MODEL, "i")), tmp_path_factory.mktemp("files"))
    return Client(httpx.ASGITransport(create_app(whole))), engine


@pytest.fixture(scope="module")
def document(shared: tuple[Client, ScriptedEngine]) -> dict[str, Any]:
    """Every client's document: all have the same routes."""
    found: dict[str, Any] = shared[0].get("/openapi.json").json()
    found["strict components"] = strict(found["components"])  # once, and not for each answer
    return found


def test_the_document_has_every_entry_with_its_answers_and_errors(document: dict[str, Any]) -> None:
    assert {f"{method} {path}" for method, path, _ in operations_of(document)} == OPERATIONS.keys()
    for method, path, operation in operations_of(document):
        assert operation["description"], path
        assert {"400", "401", "404", "500"} <= operation["responses"].keys() and "422" not in operation[
            "responses"
        ]
        assert {str(status) for status in OPERATIONS[f"{method} {path}"].answers} <= operation["responses"].keys()
        if "requestBody" in operation:
            assert {"408", "413", "415", "429"} <= operation["responses"].keys()


def test_concurrent_first_readers_get_the_same_document(whole: ApiService) -> None:
    document = OnceMade(lambda: document_of(route_table(whole), whole))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: document.get(), range(8)))
    assert all(document is found[0] for document in found)


def strict(value: Any) -> Any:
    """Forbid all properties that a schema of an object does not name."""
    if isinstance(value, dict):
        closed = {name: strict(inner) for name, inner in value.items()}
        return {**closed, "additionalProperties": False} if "properties" in value else closed
    return [strict(inner) for inner in value] if isinstance(value, list) else value


def check(document: dict[str, Any], template: str, method: str, answer: httpx.Response) -> None:
    """Assert that an answer is as the document says, and has nothing that it does not say."""
    declared = document["paths"][template][method.lower()]["responses"][str(answer.status_code)]
    if not answer.content:
        assert "content" not in declared
        return
    media = answer.headers["content-type"].partition(";")[0]
    assert media in declared["content"]
    if media == "application/json":
        schema = declared["content"][media]["schema"]
        closed = {**strict(schema), "components": document["strict components"]}
        jsonschema.Draft202012Validator(closed).validate(answer.json())


POSTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2, **ALL}, "It is."),
    ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]}, CALL),
    ("/v1/chat/completions", {"messages": [USER], "stream": True}, "It is."),
    ("/v1/completions", {"prompt": "a b c", "logprobs": 2, "n": 2, "echo": True, **ALL}, "It is."),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}, "It is."),
    ("/v1/messages", {"messages": [USER], "max_tokens": 60, "include_timings": True}, "It is."),
    ("/v1/messages", {"messages": [USER], "max_tokens": 60, "tools": [{**TOOL, "input_schema": {}}]}, CALL),
    ("/v1/messages/count_tokens", {"messages": [USER]}, ""),
    ("/v1/responses", {"input": "hi", "top_logprobs": 1, "include_timings": True}, "It is."),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, "It is."),
    ("/v1/responses", {"input": "hi", "background": True}, "It is."),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **TOOL}]}, CALL),
    ("/v1/embeddings", {"input": ["a", "b"], "include_timings": True}, ""),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, ""),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "include_timings": True}, ""),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "return_documents": False}, ""),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, ""),
    ("/tokenize", {"prompt": "a b c", "return_token_strs": True}, ""),
    ("/detokenize", {"tokens": [5, 6]}, ""),
]


@pytest.mark.parametrize(("path", "body", "says"), POSTS, ids=[path for path, _, _ in POSTS])
def test_generated_answers_match_the_document(
    client: Client, engine: ScriptedEngine, document: dict[str, Any], path: str, body: dict[str, Any], says: str
) -> None:
    engine.says = says
    answer = client.post(path, {"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    check(document, path, "POST", answer)


NAMES = {
    "model_id": "demo",
    "response_id": "r",
    "file_id": "f",
    "batch_id": "b",
    "conversation_id": "c",
    "item_id": "i",
    "name": "n",
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", ["healthy", "unhealthy"])
def test_every_other_answer_is_as_described(
    shared: tuple[Client, ScriptedEngine], document: dict[str, Any], operation: str, state: str
) -> None:
    client, engine = shared
    method, template = operation.split(" ")
    path = template.format(**NAMES)
    engine.state = state
    check(document, template, method, client.request(method, path, headers=ADMIN, json={"model": "demo"}))
    check(document, template, method, client.request(method, path, headers={"x-request-id": "two words"}))


@pytest.mark.parametrize("what", ["", "/input_items", "/cancel", "DELETE"])
def test_stored_responses_are_as_described(client: Client, document: dict[str, Any], what: str) -> None:
    made = client.post("/v1/responses", {"model": "demo", "input": "hi", "background": True}).json()
    method = {"/cancel": "POST", "DELETE": "DELETE"}.get(what, "GET")
    end = "" if what == "DELETE" else what
    answer = client.request(method, f"/v1/responses/{made['id']}{end}")
    assert answer.status_code == 200
    check(document, f"/v1/responses/{{response_id}}{end}", method, answer)


def test_conversations_are_as_described(client: Client, document: dict[str, Any]) -> None:
    top, one = "/v1/conversations", "/v1/conversations/{conversation_id}"
    item = {"type": "message", "role": "user", "content": "hi"}
    made = client.post(top, {"metadata": {"a": "b"}})
    name = made.json()["id"]
    added = client.post(f"{top}/{name}/items", {"items": [item]})
    number = added.json()["data"][0]["id"]
    for method, template, answer in (
        ("POST", top, made),
        ("GET", one, client.get(f"{top}/{name}")),
        ("POST", one, client.post(f"{top}/{name}", {"metadata": {}})),
        ("POST", f"{one}/items", added),
        ("GET", f"{one}/items", client.get(f"{top}/{name}/items")),
        ("GET", f"{one}/items/{{item_id}}", client.get(f"{top}/{name}/items/{number}")),
        (
            "POST",
            "/v1/responses",
            client.post("/v1/responses", {"model": "demo", "input": "a", "conversation": name}),
        ),
        ("DELETE", f"{one}/items/{{item_id}}", client.request("DELETE", f"{top}/{name}/items/{number}")),
        ("DELETE", one, client.request("DELETE", f"{top}/{name}")),
    ):
        assert answer.status_code == 200, answer.text
        check(document, template, method, answer)


def test_files_and_batches_are_as_described(client: Client, document: dict[str, Any]) -> None:
    form = {"files": {"file": ("in.jsonl", b'{"custom_id": "a"}\n')}, "data": {"purpose": "batch"}}
    made = client.request("POST", "/v1/files", **form)
    file, asked = "/v1/files/{file_id}", {"endpoint": "/v1/completions", "completion_window": "24h"}
    one = made.json()["id"]
    batch = client.post("/v1/batches", {**asked, "input_file_id": one, "metadata": {"a": "b"}})
    number = batch.json()["id"]
    for method, template, answer in (
        ("POST", "/v1/files", made),
        ("GET", "/v1/files", client.get("/v1/files")),
        ("GET", file, client.get(f"/v1/files/{one}")),
        ("GET", f"{file}/content", client.get(f"/v1/files/{one}/content")),
        ("DELETE", file, client.request("DELETE", f"/v1/files/{one}")),
        ("POST", "/v1/batches", batch),
        ("GET", "/v1/batches", client.get("/v1/batches")),
        ("GET", "/v1/batches/{batch_id}", client.get(f"/v1/batches/{number}")),
        ("POST", "/v1/batches/{batch_id}/cancel", client.post(f"/v1/batches/{number}/cancel")),
    ):
        assert answer.status_code == 200, answer.text
        check(document, template, method, answer)


def test_the_page_shows_every_endpoint_and_schema_and_loads_nothing(
    client: Client, document: dict[str, Any]
) -> None:
    answer = client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for method, path, _ in operations_of(document):
        assert f"{method} {path}" in answer.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in answer.text
    assert not re.search(r"<(script|link|img|iframe)|\bsrc=|@import|url\(", answer.text)


def test_texts_of_the_document_are_texts_on_the_page() -> None:
    document = {"info": {"title": "<script>", "version": "1"}, "paths": {}, "components": {"schemas": {"<b>": {}}}}
    assert "<script" not in page(document) and "<b>" not in page(document)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_schema_is_valid_and_every_reference_leads_to_one(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names and names <= schemas.keys()
