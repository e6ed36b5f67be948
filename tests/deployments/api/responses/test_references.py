"""References to items: one that leads nowhere is a 404 that names it, wherever references are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.api.responses.conftest import ASK, RESPONSES, Responses

Make = Callable[..., Responses]
CONVERSATIONS = "/v1/conversations"
USER = {"role": "user", "content": "And now?"}
NEVER_MADE = "msg_" + "0" * 32 + "o0"
UNKNOWN: list[dict[str, Any]] = [
    {"type": "item_reference", "id": NEVER_MADE},
    {"type": "item_reference", "id": NEVER_MADE.replace("o0", "i0")},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "item_reference", "id": ""},
    {"type": "item_reference", "id": "é" * 200},
    {"type": None, "id": "resp_" + "0" * 32},
    {"id": NEVER_MADE},
]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "not stored": {"store": False},
    "in the background": {"background": True},
    "in the background, streamed": {"background": True, "stream": True},
}


def check(answer: Any, param: str, name: str) -> None:
    """Assert that a reference is a 404 in one piece, which names the field and the item."""
    assert answer.status_code == 404, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "not_found_error"
    assert error["message"].startswith(f"{param} refers to the item '{name[:64]}")
    assert "no stored response has" in error["message"]


@pytest.mark.parametrize("way", WAYS)
def test_a_response_to_an_unknown_item_is_a_404(ask: Make, way: str) -> None:
    it = ask()
    for item in UNKNOWN:
        check(it.post(input=[USER, item], **WAYS[way]), "input.1.id", item["id"])
    assert it.engine.requests == []


def test_counting_with_an_unknown_item_is_a_404(ask: Make) -> None:
    it = ask()
    for item in UNKNOWN:
        check(it.client.post(f"{RESPONSES}/input_tokens", ASK | {"input": [item, USER]}), "input.0.id", item["id"])


def test_a_conversation_with_an_unknown_item_is_a_404_and_is_not_changed(ask: Make) -> None:
    it = ask()
    made = it.client.post(CONVERSATIONS, {"items": [USER]}).json()
    path = f"{CONVERSATIONS}/{made['id']}/items"
    for item in UNKNOWN:
        for url in (CONVERSATIONS, path):
            check(it.client.post(url, {"items": [USER, item]}), "items.1.id", item["id"])
    assert len(it.client.get(path).json()["data"]) == 1


@pytest.mark.parametrize("way", WAYS)
def test_so_is_a_response_that_continues_something(ask: Make, way: str) -> None:
    it = ask()
    before = {"previous_response_id": it.whole()["id"]}
    made = {"conversation": it.client.post(CONVERSATIONS, {"items": [USER]}).json()["id"]}
    heard = len(it.engine.requests)
    for continued in (before, made):
        check(it.post(input=[{"id": NEVER_MADE}], **continued, **WAYS[way]), "input.0.id", NEVER_MADE)
        counted = ASK | {"input": [{"id": NEVER_MADE}]} | continued
        check(it.client.post(f"{RESPONSES}/input_tokens", counted), "input.0.id", NEVER_MADE)
    assert len(it.engine.requests) == heard


def test_items_of_responses_that_are_not_kept_are_unknown(ask: Make) -> None:
    it = ask()
    deleted, unkept = it.whole(), it.whole(store=False)
    assert it.client.request("DELETE", f"{RESPONSES}/{deleted['id']}").status_code == 200
    kept = it.whole()["output"][0]["id"]
    others = [kept.removesuffix("o0") + end for end in ("o1", "i9")]  # the response is there, and has no such item
    for name in (deleted["output"][0]["id"], unkept["output"][0]["id"], *others):
        reference = {"type": "item_reference", "id": name}
        check(it.post(input=[{"id": kept}, reference]), "input.1.id", name)
        check(it.client.post(CONVERSATIONS, {"items": [{"id": kept}, reference]}), "items.1.id", name)


def test_a_conversation_takes_items_of_stored_responses_by_reference(ask: Make) -> None:
    it = ask()
    said = it.whole()["output"][0]
    reference = {"type": "item_reference", "id": said["id"]}
    made = it.client.post(CONVERSATIONS, {"items": [USER, reference]}).json()
    path = f"{CONVERSATIONS}/{made['id']}/items"
    added = it.client.post(path, {"items": [{"id": said["id"]}]}).json()["data"]
    listed = it.client.get(path, params={"order": "asc"}).json()["data"]
    assert [item["content"] for item in (listed[1], listed[2], added[0])] == [said["content"]] * 3
    it.whole(conversation=made["id"])
    assert it.talk.prompt().count(said["content"][0]["text"]) == 2
