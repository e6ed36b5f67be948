"""Each family's answers as its makers document them: a thought, text and calls, whole and in small pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.segments import ParserDriver, Segment, joined
from tests.deployments.api.dialects.conftest import TOOLS, Talk
from tests.deployments.support.chat_templates import FAMILIES, HERMES, LLAMA3

Make = Callable[..., Talk]
MADE = [("get_weather", {"city": "Oslo"}), ("clock", {"zone": "utc"})]


class Family(NamedTuple):
    """How a family's answer reads: THOUGHT text CALLS, where TEXT may be no part of it."""

    format: str
    calls: str
    thought: str = "<think>\nRain? In Oslo.\n</think>\n\n"
    text: str = "Let me see.\n"
    template: str | None = None


def bars(text: str) -> str:
    """Return a text with DeepSeek's wide bars and low blocks."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


SEED_THINKS = FAMILIES["seed_oss"].replace("think>", "seed:think>")
MISTRAL_THINKS, LIST_THINKS = (FAMILIES[name] + "{# [THINK] [/THINK] #}" for name in ("mistral", "mistral_list"))
GRANITE_32_THINKS = "{# after 'Here is my thought process:' and your response after 'Here is my response:' #}"
OSLO = '{"city": "Oslo"}'
DOCUMENTED = {
    "gpt-oss": Family(
        "harmony",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{OSLO}<|call|><|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>"
        '{"zone": "utc"}<|call|>',
        "<|channel|>analysis<|message|>Rain? In Oslo.<|end|>",
        "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>",
    ),
    "Qwen3": Family(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>',
        template=HERMES,
    ),
    "SmolLM3": Family(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>',
        "<think>\nRain? In Oslo.\n</think>\n",
        template=HERMES,
    ),
    "Granite 4": Family(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>',
        "",
        "",
        HERMES,
    ),
    "Qwen3-Coder": Family(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n<parameter=zone>\nutc\n</parameter>\n</function>\n</tool_call>",
    ),
    "Seed-OSS": Family(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=clock>\n<parameter=zone>utc</parameter>\n</function>\n</seed:tool_call>",
        "<seed:think>\nRain? In Oslo.</seed:think>\n",
        template=SEED_THINKS,
    ),
    "MiniMax-M2": Family(
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="clock">\n<parameter name="zone">utc</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "GLM-4.5": Family(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>utc</arg_value>\n</tool_call>",
        "\n<think>Rain? In Oslo.</think>\n",
    ),
    "GLM-4.7": Family(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
        "<tool_call>clock<arg_key>zone</arg_key><arg_value>utc</arg_value></tool_call>",
        "<think>Rain? In Oslo.</think>",
    ),
    "Kimi-K2": Family(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{OSLO}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>"
        '{"zone": "utc"}<|tool_call_end|><|tool_calls_section_end|>',
        "<think>Rain? In Oslo.</think>",
    ),
    "DeepSeek-V3, R1": Family(
        "deepseek_v3",
        bars("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME\n```json\n")
        .replace("NAME", "get_weather")
        + f"{OSLO}\n```"
        + bars("<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>clock\n```json\n")
        + '{"zone": "utc"}\n```'
        + bars("<|tool_call_end|><|tool_calls_end|>"),
    ),
    "DeepSeek-V3.1": Family(
        "deepseek_v31",
        bars("<|tool_calls_begin|><|tool_call_begin|>") + "get_weather" + bars("<|tool_sep|>") + OSLO
        + bars("<|tool_call_end|><|tool_call_begin|>clock<|tool_sep|>") + '{"zone": "utc"}'
        + bars("<|tool_call_end|><|tool_calls_end|>"),
    ),
    "Gemma 4": Family(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
        '<|tool_call>call:clock{zone:<|"|>utc<|"|>}<tool_call|>',
        "<|channel>thought\nRain? In Oslo.\n<channel|>",
    ),
    "Granite 3": Family(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}, '
        '{"name": "clock", "arguments": {"zone": "utc"}}]',
        "<think>Rain? In Oslo.</think>",
    ),
    "Granite 3.3": Family(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}, '
        '{"name": "clock", "arguments": {"zone": "utc"}}]',
        "<think>Rain? In Oslo.</think>",
        "<response>Let me see.</response>",
        template=FAMILIES["granite"] + "{# Write your response between <response></response> #}",
    ),
    "Granite 3.2": Family(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}, '
        '{"name": "clock", "arguments": {"zone": "utc"}}]',
        "Here is my thought process:\nRain? In Oslo.\n\nHere is my response:\n",
        template=FAMILIES["granite"].replace("think>", "thought>") + GRANITE_32_THINKS,
    ),
    "Phi-4-mini": Family(
        "phi4",
        f'functools[{{"name": "get_weather", "arguments": {OSLO}}},'
        '{"name": "clock", "arguments": {"zone": "utc"}}]',
        "",
        "",
    ),
    "Mistral Small 3.2, Magistral": Family(
        "mistral",
        f'[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]clock[ARGS]{{"zone": "utc"}}',
        "[THINK]Rain? In Oslo.[/THINK]",
        template=MISTRAL_THINKS,
    ),
    "Mistral Nemo, Small 3": Family(
        "mistral_list",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}, '
        '{"name": "clock", "arguments": {"zone": "utc"}}]',
        "[THINK]Rain? In Oslo.[/THINK]",
        template=LIST_THINKS,
    ),
    "Llama 3.1": Family(
        "llama3",
        f'{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "clock", "parameters": {{"zone": "utc"}}}}',
        "",
        "",
        LLAMA3,
    ),
    "Llama 4": Family(
        "pythonic", '[get_weather(city="Oslo"), clock(zone="utc")]', "", ""
    ),
    "Llama 4 with marks": Family(
        "pythonic", '<|python_start|>[get_weather(city="Oslo"), clock(zone="utc")]<|python_end|>', "", ""
    ),
    "OLMo 3": Family(
        "olmo3", "<function_calls>get_weather(city=\"Oslo\")\nclock(zone='utc')</function_calls>"
    ),
}  # fmt: skip


def test_no_format_is_left_out() -> None:
    assert {family.format for family in DOCUMENTED.values()} == set(FORMATS)


@pytest.mark.parametrize("family", DOCUMENTED.values(), ids=DOCUMENTED)
def test_an_answer_is_taken_apart(talk: Make, family: Family) -> None:
    it = talk(family.template or FAMILIES[family.format])
    for number, chunk in enumerate((1, 5, 1000)):
        # All pairs of a chunk's size, whether there is a text, and how the answer is sent.
        texts = ("", family.text) if number % 2 else (family.text, "")
        for ask, text in zip((it.whole, it.streamed), texts, strict=True):
            it.engine.says, it.engine.chunk = family.thought + text + family.calls, chunk
            answer = ask(tools=TOOLS)
            message = answer.choices[0].message
            made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
            assert made == MADE and answer.choices[0].finish_reason == "tool_calls"
            assert (message.content or "") == ("Let me see." if text else "")
            assert getattr(message, "reasoning", None) == ("Rain? In Oslo." if family.thought else None)


@pytest.mark.parametrize("family", DOCUMENTED.values(), ids=DOCUMENTED)
def test_a_call_that_is_cut_off_has_the_part_that_was_written(family: Family) -> None:
    """Wherever its text ends: it is text as long as it may be none, and its syntax is no text afterwards."""
    schemas: dict[str, Any] = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    whole = FORMATS[family.format].spell_all([("get_weather", OSLO)])
    names = set[str]()
    for end in range(len(whole)):
        driver = ParserDriver(FORMATS[family.format].parser(schemas))
        found = joined([*(part for char in whole[:end] for part in driver.push(char)), *driver.finish()])
        if not any(segment.kind == "call" for segment in found):
            assert found == ([Segment("text", whole[:end])] if end else [])
            continue
        names.add(found[0].text)
        assert [segment.kind for segment in found] in (
            ["call"],
            ["call", "arguments"],
            ["call", "arguments", "end"],
        )
        written = "".join(segment.text for segment in found if segment.kind == "arguments")
        # What may be the beginning of the mark after a text is still part of the text.
        # The mark that ends harmony's calls ends the answer, too, and is no part of it.
        is_empty = family.format == "harmony" and written == "{}"
        assert OSLO.startswith(written) or written.startswith(OSLO.removesuffix('"}')) or is_empty
    assert names == {"get_weather"}
