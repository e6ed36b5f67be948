"""openai for Node.js: chats, streams, its own runner of tools, parsed answers, Responses, errors."""

from __future__ import annotations

from tests.clients.support.node_program import run_node
from tests.clients.support.weather import ANSWER, CITY, I_AM

PROGRAM = "openai.mjs"


def test_a_chat_continues_after_an_answer_is_sent_back(api: str) -> None:
    assert run_node(PROGRAM, api, "chat") == [I_AM, "I have told you before."]


def test_a_stream_has_the_same_text_and_its_usage(api: str) -> None:
    seen = run_node(PROGRAM, api, "stream")
    assert seen["text"] == I_AM and seen["tokens"] > 10


def test_its_runner_of_tools_calls_and_reports_the_result(api: str) -> None:
    assert run_node(PROGRAM, api, "tools") == {"answer": ANSWER, "asked": ["Paris"]}


def test_an_answer_is_parsed_with_a_zod_schema(api: str) -> None:
    assert run_node(PROGRAM, api, "parsed") == CITY


def test_responses_stream_their_events_and_continue_by_id(api: str) -> None:
    seen = run_node(PROGRAM, api, "responses")
    assert seen == {"first": "response.created", "last": "response.completed", "answer": ANSWER}


def test_errors_have_the_class_and_the_field_that_belong_to_them(api: str) -> None:
    seen = run_node(PROGRAM, api, "errors")
    assert seen == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
