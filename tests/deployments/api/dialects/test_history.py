"""No conversation is refused for what clients keep of answers, or other servers put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deployments.api.dialects.conftest import ASK, TOOLS, Talk
from tests.deployments.support.chat_templates import FAMILIES, HERMES, LLAMA3, THINKING
from tests.support.examples import examples

Make = Callable[..., Talk]

USER = ASK["messages"][0]
PARTS = [{"type": "text", "text": "It rains."}]
OSLO = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": OSLO}
THOUGHT = [{"type": "reasoning.text", "text": "Look it up.", "format": None, "index": 0}]
RAINS = {"role": "assistant", "content": "It rains."}


def called(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **fields}}]}


@pytest.mark.parametrize(
    "message",
    [
        {**RAINS, "parsed": {"a": 1}, "index": 0, "refusal": None, "annotations": [], "audio": None, "id": "m-1"},
        {**RAINS, "provider_specific_fields": {"a": None}, "images": [], "thinking_blocks": []},
        {**RAINS, "name": "weatherman", "finish_reason": "stop", "tool_calls": None, "reasoning": None},
        {**RAINS, "refusal": "not that one", "tool_call_id": "c", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "refusal": "It rains."},
        {"role": "assistant", "content": [{**PARTS[0], "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "It rains."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "?", "signature": "s"}, *PARTS]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *PARTS]},
        {"role": "user", "content": "It rains.", "name": "Ann", "tool_calls": [CALL], "reasoning": "?"},
        {"role": "system", "content": "It rains.", "name": "weather"},
        {"role": "developer", "content": [{"type": "input_text", "text": "It rains."}]},
        {"role": "tool", "content": "It rains.", "tool_call_id": "gone", "name": "get_weather"},
        {"role": "tool", "content": "It rains."},
        {"role": "function", "content": "It rains.", "name": "get_weather"},
    ],
    ids=lambda message: str(message)[:60],
)  # fmt: skip
def test_content_for_the_model_is_in_the_prompt_and_all_else_is_left_out(
    talk: Make, message: dict[str, Any]
) -> None:
    for template in (HERMES, LLAMA3, None):
        it = talk(template)
        it.whole(messages=[USER, message, USER])
        assert it.prompt().count("It rains.") == 1 and it.prompt().count("ephemeral") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "Look it up."},
        {"reasoning_content": "Look it up."},
        {"reasoning_details": THOUGHT},
        {"reasoning_content": None, "reasoning_details": [*THOUGHT, {"type": "reasoning.encrypted", "data": "x"}]},
        {"content": [{"type": "thinking", "thinking": "Look it up."}, *PARTS]},
    ],
    ids=str,
)
def test_reasoning_has_many_names(talk: Make, fields: dict[str, Any]) -> None:
    it = talk(HERMES)
    it.whole(messages=[USER, {**RAINS, **fields}, USER])
    assert "<think>Look it up.</think>It rains." in it.prompt()


def test_a_message_of_the_assistant_may_be_empty(talk: Make) -> None:
    nothing: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}, {"tool_calls": []}]
    for empty in nothing:
        it = talk(HERMES)
        it.whole(messages=[USER, {"role": "assistant", **empty}, USER])
        assert "assistant\n<|im_end|>" in it.prompt()


@pytest.mark.parametrize("template", [HERMES, LLAMA3, None])
@pytest.mark.parametrize(
    "arguments", ["{", '{"city": "Os', "[]", "7", "Oslo", '{"a": NaN}', '{"a":' * 70 + "1" + "}" * 70]
)
def test_arguments_that_are_no_object_are_shown_as_they_are(
    talk: Make, template: str | None, arguments: str
) -> None:
    it = talk(template)
    it.whole(messages=[USER, called(arguments=arguments), {"role": "tool", "tool_call_id": "c", "content": "?"}])
    assert arguments in it.prompt().replace('\\"', '"')


@pytest.mark.parametrize("arguments", [None, "", {}, {"city": "Oslo"}])
def test_arguments_may_be_none_or_an_object(talk: Make, arguments: Any) -> None:
    it = talk(HERMES)
    it.whole(messages=[USER, called(arguments=arguments)])
    assert f'"arguments": {"{}" if not arguments else CALL["function"]["arguments"]}' in it.prompt()


def test_a_template_that_takes_only_objects_gets_text_in_one(talk: Make) -> None:
    picky = HERMES.replace("call.function.arguments | tojson", "(call.function.arguments | items | list)")
    it = talk(picky)
    it.whole(messages=[USER, called(arguments='{"city": "Os')])
    assert """[('arguments', '{"city": "Os')]""" in it.prompt()


def test_calls_may_lack_all_but_their_function(talk: Make) -> None:
    for template in (HERMES, LLAMA3, None):
        it = talk(template)
        calls = [
            {"index": 0, "id": None, "type": None, "function": {"name": 'say "it"', "arguments": "{}", "x": 1}}
        ]
        it.whole(messages=[USER, {"role": "assistant", "tool_calls": calls}])
        assert "say" in it.prompt()
        it.whole(messages=[USER, {"role": "assistant", "content": None, "function_call": CALL["function"]}])
        assert "Oslo" in it.prompt()


LATER = [
    {"role": "system", "content": "Be brief."},
    USER,
    RAINS,
    {"role": "system", "content": "In French."},
    USER,
]
FIRST_ONLY = r"""
{%- for message in messages %}{% if message.role != 'system' or loop.first %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
REFUSES = FIRST_ONLY.replace(
    "{% endif %}{% endfor %}", "{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)


def test_later_system_messages_stay_in_place_where_the_template_shows_them(talk: Make) -> None:
    it = talk(HERMES)
    it.whole(messages=LATER)
    assert it.prompt().index("It rains.") < it.prompt().index("In French.")


@pytest.mark.parametrize("template", [FIRST_ONLY, REFUSES])
def test_a_later_system_message_is_merged_into_the_first_where_the_template_does_not_show_it(
    talk: Make, template: str
) -> None:
    it = talk(template)
    it.whole(messages=LATER)
    assert "system\nBe brief.\n\nIn French.<|im_end|>" in it.prompt()
    it.whole(messages=LATER[1:])
    assert it.prompt().startswith("<|im_start|>system\nIn French.<|im_end|>")


def test_a_setting_decides_the_place_of_later_system_messages(talk: Make) -> None:
    it = talk(HERMES, late_system="merge")
    it.whole(messages=LATER)
    assert "Be brief.\n\nIn French." in it.prompt()
    assert talk(REFUSES, late_system="keep").refused(messages=LATER)["param"] == "messages"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
ANSWERS = st.lists(
    TEXTS
    | st.sampled_from(
        [
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            '<tool_call>{"name": "clock", "arguments": {"zone": ',
            '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
            "<think>",
            "</think>",
            '{"name": "clock", "parameters": {"zone": 7}}',
            "<|im_end|>",
        ]
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("template", [HERMES, THINKING, LLAMA3, None], ids=["hermes", "thinking", "llama3", "own"])
def test_an_answer_of_this_server_is_accepted_as_history(talk: Make, template: str | None) -> None:
    """As the client prints it, as the client library keeps it, and as a naive reader of the stream collects it."""
    it = talk(template, reasoning="think")

    @settings(max_examples=examples(10), deadline=None)
    @given(says=ANSWERS, is_cut=st.booleans())
    def is_taken_back(says: str, is_cut: bool) -> None:
        it.engine.says = says
        options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 5 if is_cut else 200}
        whole = it.whole(**options).choices[0].message
        deltas = [choice.delta for chunk in it.chunks(**options) for choice in chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or () if call.function.name is not None]
        streamed = {
            "role": "assistant",
            "content": "".join(delta.content or "" for delta in deltas),
            "tool_calls": [call.model_dump() for call in calls],
        }
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in whole.tool_calls or ()]
        for message in (whole, whole.model_dump(exclude_none=True), streamed):
            it.whole(messages=[USER, message, *results, USER], tools=TOOLS)

    is_taken_back()


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        (FAMILIES["granite"], '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'),
    ],
)
def test_calls_are_shown_by_templates_that_show_only_contents(talk: Make, template: str, call: str) -> None:
    """As those of Granite 3 and SmolLM3, which have a place for tools, and for results."""
    before, _, rest = template.partition("{{- message.content }}")
    it = talk(before + "{{- message.content }}" + rest[rest.index("{{ '<|im_end|>") :])
    result = {"role": "tool", "tool_call_id": "c", "content": "7 degrees"}
    it.whole(tools=TOOLS, messages=[USER, called(), result])
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in it.prompt() and "7 degrees" in it.prompt()
    it.whole(tools=TOOLS, messages=[USER, {**called(), "content": "Let me see."}, result])
    assert f"<|im_start|>assistant\nLet me see.\n{call}<|im_end|>" in it.prompt()
