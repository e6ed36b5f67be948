"""Unknown fields of the objects within requests: ignored and named as those of the request itself, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api import ApiService, create_app
from deployments.api.batches.batches import NewBatch
from deployments.api.fields import nested_fields
from deployments.api.fields.ignored import LABELS, IgnoredFields
from deployments.api.fields.protocol import ChatRequest
from deployments.api.fields.strict_model import StrictModel
from deployments.api.fields.tools import OtherTool
from deployments.api.pooling.endpoints import POOLED
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from tests.deployments.support.nested_bodies import (
    BODIES,
    CHAT,
    FLAT,
    FUNCTION,
    MESSAGES,
    RESPONSES,
    USER,
    places,
    sent,
    with_unknown,
)
from tests.deployments.support.scripted_api import Client, ScriptedEngine

IGNORED = "x-raydix-ignored-fields"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_unknown_nested_fields_are_named_wherever_they_are(
    service: ApiService, client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    body = sent(body)
    plain = client.post(path, body)
    assert plain.status_code == 200 and IGNORED not in plain.headers, plain.text
    for place in places(body):
        response = client.post(path, with_unknown(body, place, {"a": [1]}))
        assert response.status_code == 200, response.text
        assert response.headers[IGNORED] == f"{place}.unheard_of"
        assert IGNORED not in client.post(path, with_unknown(body, place, None)).headers
    assert len({tuple(request.prompt_ids) for request in engine.requests}) <= 1


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_setting_refuses_unknown_nested_fields_or_ignores_them_silently(
    service: ApiService, path: str, body: dict[str, Any]
) -> None:
    strict, silent = client_of(service, "refuse"), client_of(service, "ignore")
    body = sent(body)
    assert strict.post(path, body).status_code == 200
    for place in places(body):
        asked = with_unknown(body, place, 1)
        answer = strict.post(path, asked)
        message = str(answer.json()["error"]["message"])
        assert answer.status_code == 400 and IGNORED not in answer.headers
        assert f"'{place}.unheard_of'" in message and "limits.unknown_fields" in message
        answer = silent.post(path, asked)
        assert answer.status_code == 200 and IGNORED not in answer.headers


def client_of(service: ApiService, rule: str) -> Client:
    limits = service.limits.model_copy(update={"unknown_fields": rule})
    return Client(httpx.ASGITransport(create_app(replace(service, limits=limits))))


def test_every_model_of_an_object_is_tried(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set[type[StrictModel]]()
    names_of = nested_fields._names_of

    def spy(kind: type[StrictModel]) -> frozenset[str]:
        tried.add(kind)
        return names_of(kind)

    monkeypatch.setattr(nested_fields, "_names_of", spy)
    for path, body in BODIES:
        client.post(path, sent(body))
    bodies = [kind for kind in _subclasses(StrictModel) if (kind.__doc__ or "").startswith("Body of ")]
    assert len(bodies) > 10
    known = {kind.__name__ for kind in _within(bodies) if not issubclass(kind, OtherTool)}
    assert known - {kind.__name__ for kind in tried} == NOT_TRIED


NOT_TRIED = {"CustomGrammar", "OutputExpiry"}
"""A grammar is itself named; of batches (below)."""


def _subclasses(kind: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _within(kinds: list[type[StrictModel]]) -> set[type[StrictModel]]:
    found, left = set[type[StrictModel]](), list(kinds)
    while left:
        for models in nested_fields._objects_of(left.pop()).values():
            left += [kind for kind in models if kind not in found]
            found |= set(models)
    return found


def test_unknown_nested_fields_of_batches_are_named(service: ApiService, tmp_path: Path) -> None:
    spool = Spool(FileSettings(directory=str(tmp_path)))
    client = Client(httpx.ASGITransport(create_app(replace(service, spool=spool))))
    body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    expiry = {"anchor": "created_at", "seconds": 86_400, "unheard_of": 1}
    response = client.post("/v1/batches", body | {"output_expires_after": expiry})
    assert response.headers[IGNORED] == "output_expires_after.unheard_of"
    assert NewBatch in _subclasses(StrictModel) and response.status_code == 404  # there is no such file


def test_fields_that_clients_keep_of_answers_are_not_named_as_unknown(client: Client) -> None:
    labels: dict[str, Any] = {name: ["anything"] for name in LABELS if name != "id"}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a", **labels}], **labels, "refusal": None}
    for path, body in (
        (CHAT, {"messages": [USER, answer, USER], "tools": [FUNCTION | labels]}),
        (RESPONSES, {"input": [USER, answer, USER], "tools": [FLAT | labels]}),
        (MESSAGES, {"messages": [USER, answer, USER], "max_tokens": 9}),
    ):
        response = client.post(path, {"model": "demo", **body})
        assert response.status_code == 200 and IGNORED not in response.headers, response.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["function", "custom", "allowed_tools", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "custom", "name", "tools", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), JSON, max_size=4))
def test_known_fields_stay_whatever_their_values(fields: dict[str, Any]) -> None:
    kept = nested_fields.keep_known_within(ChatRequest, fields, IgnoredFields("ignore"))
    assert kept.keys() == fields.keys()
    again = nested_fields.keep_known_within(ChatRequest, kept, IgnoredFields("refuse"))
    assert again == kept


def test_the_only_objects_of_pooled_endpoints_are_documents() -> None:
    assert _within([kind.body for kind in POOLED.values()]) == set()
