"""AI SDK for Node.js: texts, agents over chat completions and over Responses (its default), parsed answers."""

from __future__ import annotations

from tests.clients.support.node_program import run_node
from tests.clients.support.weather import ANSWER, CITY, I_AM

PROGRAM = "ai_sdk.mjs"
THOUGHTS = ["The station knows.", "Now I know."]


def test_a_text_is_generated(api: str) -> None:
    seen = run_node(PROGRAM, api, "chat")
    assert seen["text"] == I_AM and seen["tokens"] > 10


def test_an_agent_thinks_calls_and_reports_the_result(api: str) -> None:
    assert run_node(PROGRAM, api, "agent") == {"answer": ANSWER, "asked": ["Paris"], "thoughts": THOUGHTS}


def test_an_agent_over_responses_does_the_same(api: str) -> None:
    seen = run_node(PROGRAM, api, "responses")
    assert (seen["answer"], seen["asked"]) == (ANSWER, ["Paris"])


def test_an_object_is_generated_with_a_zod_schema(api: str) -> None:
    assert run_node(PROGRAM, api, "parsed") == CITY
