"""A conversation is taken as Anthropic's clients have it, with all that an answer may have brought."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.api import Limits
from tests.deployments.api.anthropic.conftest import ASK, CLOCK, Messages, alike
from tests.deployments.support.chat_templates import HERMES, THINKING

Make = Callable[..., Messages]
USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def prompt(it: Messages, messages: list[Any], **change: Any) -> str:
    it.whole(messages=messages, **change)
    return it.talk.prompt()


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_thoughts_are_a_block(ask: Make, chunk: int, display: str | None) -> None:
    it = ask(THINKING)
    it.engine.chunk = chunk
    it.engine.says = "Rain? In Oslo.\n</think>\n\nIt is."
    message = alike(it, thinking={"type": "adaptive", "display": display})
    assert message["content"] == [
        {"type": "thinking", "thinking": "" if display == "omitted" else "Rain? In Oslo."},
        {"type": "text", "text": "It is."},
    ]
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "|"),
        ({"thinking": {"type": "disabled"}}, "False|"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "True|"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, "True|medium"),
        ({"output_config": {"effort": "max"}}, "|high"),
    ],
)
def test_a_template_gets_whether_and_how_much_to_think(ask: Make, change: dict[str, Any], told: str) -> None:
    it = ask("{{ messages[0].content }} {{ enable_thinking }}|{{ reasoning_effort }}")
    assert prompt(it, [USER], **change) == f"hi {told}"
    assert it.counted(messages=[USER], **change) == len(it.engine.requests[-1].prompt_ids)


def test_a_budget_ends_thinking_where_it_can_be_ended(ask: Make) -> None:
    """Clients give one to every model, and one that no answer can reach."""
    it = ask(THINKING)

    def budget_of(num_tokens: int, **change: Any) -> str:
        it.whole(thinking={"type": "enabled", "budget_tokens": num_tokens}, **change)
        grammar = it.engine.requests[-1].sampling.grammar
        return "" if grammar is None else grammar.source

    assert budget_of(7) == ""  # this model's mark is several tokens
    it = ask(THINKING, added=("<think>", "</think>"))
    tokenizer: Any = it.engine.codec.tokenizer
    (served,) = it.talk.service.models.values()
    card = replace(served.card, vocab_size=len(tokenizer))
    it = Messages(it.talk.of(replace(it.talk.service, models={"demo": replace(served, card=card)})))
    assert "{0,7}" in budget_of(7)
    assert budget_of(300) == budget_of(32_000, max_tokens=64_000) == ""


def test_an_answer_may_be_begun(ask: Make) -> None:
    it = ask(HERMES)
    begun = [USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    it.engine.says = " raining."
    message = alike(it, messages=begun)
    assert it.talk.prompt().endswith("<|im_start|>assistant\nIt is")
    assert message["content"] == [{"type": "text", "text": " raining."}]
    assert it.counted(messages=begun) == message["usage"]["input_tokens"]


def test_an_answer_is_sent_back_unchanged(ask: Make) -> None:
    it = ask(THINKING)
    it.engine.says = 'Hm.</think>I look.<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    for answer in (it.whole(tools=[CLOCK]), it.streamed(tools=[CLOCK])):
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "12:00"}
        said = prompt(it, [
            *ASK["messages"], {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ], tools=[CLOCK])  # fmt: skip
        assert '<think>Hm.</think>I look.<tool_call>{"name": "clock"' in said
        assert "<tool_response>12:00</tool_response>" in said


def test_systems_are_text_or_blocks(ask: Make) -> None:
    it = ask(HERMES)
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
              {"type": "text", "text": "Be kind."}]  # fmt: skip
    as_blocks = prompt(it, [USER], system=blocks)
    assert as_blocks == prompt(it, [USER], system="Be brief.\nBe kind.")
    assert "system\nBe brief.\nBe kind.<|im_end|>" in as_blocks
    assert prompt(it, [USER], system=[]) == prompt(it, [USER], system="") == prompt(it, [USER])
    late = prompt(it, [USER, {"role": "system", "content": "Now be kind."}], system="Be brief.")
    assert late.index("Be brief.") < late.index("hi") < late.index("Now be kind.")


def test_the_billing_line_of_claude_code_does_not_make_prompts_differ(ask: Make) -> None:
    """It is another line in each request, and stands before all else, so nothing cached could be reused."""
    it = ask(HERMES)
    prompts = set()
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number}abc;"
        prompts.add(prompt(it, [USER], system=f"{line}\nBe brief."))
        prompts.add(prompt(it, [USER], system=[{"type": "text", "text": text} for text in (line, "Be brief.")]))
    assert prompts == {prompt(it, [USER], system="Be brief.")}


def test_turns_of_one_role_are_one_turn(ask: Make) -> None:
    it = ask(HERMES)
    assert prompt(it, [USER, MORE]) == prompt(it, [{"role": "user", "content": "hi\nmore"}])
    answer = {"role": "assistant", "content": "a"}
    assert prompt(it, [USER, answer, answer, MORE]).count("assistant") == 2


def test_results_and_text_keep_their_order(ask: Make) -> None:
    it = ask(HERMES)
    said = prompt(it, [{"role": "user", "content": [
        {**RESULT, "content": "one"}, {**RESULT, "content": "two", "is_error": True}, RESULT,
        {"type": "text", "text": "three"},
    ]}])  # fmt: skip
    assert said.startswith(
        "<|im_start|>user\n<tool_response>one</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>Error: two</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response></tool_response><|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n"
    )


def test_the_result_of_a_tool_search_is_the_names_of_the_tools(ask: Make) -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("clock", "get_weather")]
    said = prompt(ask(HERMES), [{"role": "user", "content": [{**RESULT, "content": found}]}])
    assert "<tool_response>clock\nget_weather</tool_response>" in said


@pytest.mark.parametrize(
    "answer",
    [
        [],
        "",
        [{"type": "redacted_thinking", "data": "x"}],
        [{"type": "thinking", "thinking": "", "signature": ""}],
        [{"type": "text", "text": "a", "citations": None, "cache_control": {"type": "ephemeral"}}],
        [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
         {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}],
        [{"type": "tool_use", "id": "t", "name": "a name with spaces", "input": {}, "caller": {"type": "direct"}}],
        [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "text", "text": "after"}],
    ],
)  # fmt: skip
def test_no_answer_is_refused(ask: Make, answer: Any) -> None:
    for template in (None, HERMES):
        ask(template).whole(messages=[USER, {"role": "assistant", "content": answer}, MORE])


RESULT = {"type": "tool_result", "tool_use_id": "t"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": ...}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens must be an integer"),
        ({"messages": ...}, "messages is required"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role must be one of user, assistant"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a string or an array"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content must hold blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages.0.content.0.tool_use_id is required"),
        ({"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "messages ends with a call"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "much"}}, "output_config.effort must be one of low, medium, high"),
        ({"system": ["a"]}, "system must hold blocks"),
        ({"thinking": {"type": "much"}}, "thinking.type must be one of enabled, adaptive"),
        ({"stop_sequences": [""]}, "stop_sequences must hold strings"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences has 100 strings"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"container": "c"}, "container with this value is not supported"),
        ({"fallbacks": [{}]}, "fallbacks with this value is not supported"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt is too long: "),
    ],
)  # fmt: skip
def test_an_error_names_the_field(ask: Make, change: dict[str, Any], says: str) -> None:
    assert says in ask(HERMES).refused(**change)


def test_unknown_fields_are_refused_where_the_setting_says_so(ask: Make) -> None:
    it = ask(limits=Limits(unknown_fields="refuse"))
    assert "Did you mean system?" in it.refused(sistem="Be brief.")
    it.whole(metadata={}, context_management={}, stop_sequences=[])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_messages": 3}, "limits.max_messages"),
        ({"max_content_parts": 3}, "limits.max_content_parts"),
        ({"max_tools": 3}, "limits.max_tools"),
    ],
)
def test_limits_are_named(ask: Make, change: dict[str, Any], says: str) -> None:
    it = ask(HERMES, Limits(**change))
    uses = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}] * 2
    turn = {"role": "assistant", "content": uses}
    assert says in it.refused(messages=[USER, turn, turn, MORE] if "max_content_parts" not in change else [
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 4}
    ])  # fmt: skip


def test_tokens_are_counted_as_they_are_used(ask: Make) -> None:
    it = ask(HERMES)
    for change in (
        {},
        {"system": "Be brief."},
        {"tools": [CLOCK]},
        {"tools": [CLOCK], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}},
        {"messages": [USER, {"role": "assistant", "content": "a"}, MORE], "max_tokens": 5, "stream": True},
    ):
        num_requests = len(it.engine.requests)
        count = it.counted(**change)
        assert len(it.engine.requests) == num_requests
        used = it.whole(**{name: value for name, value in change.items() if name != "stream"})["usage"]
        assert count == used["input_tokens"] == len(it.engine.requests[-1].prompt_ids)
    assert it.counted(messages=[USER, {"role": "assistant", "content": "so far"}]) > 0
