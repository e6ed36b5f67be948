"""The format of a model's calls, and whether it thinks, are read from its chat template."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.api.dialects.dialect import dialect_of
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.reasoning import THINK, Thoughts
from deployments.config.settings import ChatSettings
from tests.deployments.support.chat_templates import HERMES, LLAMA3, THINKING


class Tokenizer:
    """A tokenizer with this template and these words."""

    def __init__(self, template: str | None, *words: str) -> None:
        self.template, self.words = template, words

    def get_chat_template(self, tools: Any = None) -> str:
        if self.template is None:
            raise ValueError("none")
        return self.template

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


PLAIN = "{{ messages[0].content }}"
IN_JINJA = (
    r"""{% if tools %}{{ "<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call>" }}{% endif %}"""
)
XML = r"{% if tools %}{{ '<tool_call>\n<function=NAME>\n<parameter=' ~ '\"arguments\"' }}{% endif %}"
KEYS = r"{% if tools %}<tool_call>NAME\n<arg_key>KEY</arg_key>{{ call['arguments'] }}{% endif %}"
LLAMA4 = r"""{% if tools %}<|header_start|>{{ '{"name": function name, "parameters": dictionary}' }}{% endif %}"""
DEEPSEEK = "{% for tool in message['tool_calls'] %}{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + tool.name }}"
OLMO = "{% if tools %}Output any function calls within <function_calls></function_calls> XML tags.{% endif %}"
OTHER = r"""{% if tools %}<|start_header_id|>{{ '<TOOLCALL>[{"name": N, "arguments": {"parameters": 1}}]' }}"""


@pytest.mark.parametrize(
    ("template", "tools", "has_place"),
    [
        (HERMES, "hermes", True),
        (IN_JINJA, "hermes", True),
        (LLAMA3, "llama3", True),
        (PLAIN, "hermes", False),
        (None, None, False),
        (XML, "qwen3_coder", True),
        (KEYS, "glm", True),
        (OTHER, None, True),
        (LLAMA4, "llama3", True),
        (DEEPSEEK, "deepseek_v31", False),
        (OLMO, "olmo3", True),
    ],
)
def test_the_format_of_calls(template: str | None, tools: str | None, has_place: bool) -> None:
    found = dialect_of(Tokenizer(template), ChatSettings())
    assert found.tools == (FORMATS[tools] if tools else None) and found.has_place_for_tools == has_place
    for said in FORMATS:
        found = dialect_of(Tokenizer(template), ChatSettings.model_validate({"tools": said}))
        assert found.tools == FORMATS[said] and found.has_place_for_tools == has_place
    assert dialect_of(Tokenizer(template), ChatSettings(tools="none")).tools is None


SEED, MISTRAL = Thoughts("<seed:think>", "</seed:think>"), Thoughts("[THINK]", "[/THINK]")
GEMMA = Thoughts("<|channel>", "<channel|>", "thought\n")
GRANITE_33 = Thoughts("<think>", "</think>", around_answer=("<response>", "</response>"))
GRANITE_32 = Thoughts("Here is my thought process:", "Here is my response:")


@pytest.mark.parametrize(
    ("template", "words", "thoughts"),
    [
        (THINKING, (), THINK),
        (PLAIN, (), None),
        (PLAIN, ("<think>", "</think>"), THINK),
        (PLAIN, ("<think>",), None),
        (None, ("<think>", "</think>"), THINK),
        (PLAIN, MISTRAL.marks, MISTRAL),
        (f"{PLAIN} {''.join(MISTRAL.marks)}", (), MISTRAL),
        (f"{PLAIN} {''.join(SEED.marks)}", (), SEED),
        (None, SEED.marks, SEED),
        (PLAIN, GEMMA.marks, GEMMA),
        ("{{ '<|channel>thought\\n<channel|>' }}", (), GEMMA),
        ("{{ 'between <think></think>, and your response between <response></response>' }}", (), GRANITE_33),
        (
            "{{ 'after Here is my thought process:, and your response after Here is my response:' }}",
            (),
            GRANITE_32,
        ),
    ],
)
def test_whether_it_thinks_and_between_which_marks(
    template: str | None, words: tuple[str, ...], thoughts: Thoughts | None
) -> None:
    tokenizer = Tokenizer(template, *words)
    assert dialect_of(tokenizer, ChatSettings()).thoughts == thoughts
    assert dialect_of(tokenizer, ChatSettings(reasoning="think")).thoughts == (thoughts or THINK)
    assert dialect_of(tokenizer, ChatSettings(reasoning="none")).thoughts is None
