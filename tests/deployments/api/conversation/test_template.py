"""Rendering: the compiled template gives what `apply_chat_template` gives, and refuses what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deployments.demo_model
from deployments.api.conversation.template import ChatTemplate, TemplateRefused
from engine.text.tokenizer import load_tokenizer
from tests.deployments.support.chat_templates import HERMES, LLAMA3, THINKING
from tests.deployments.support.tokenizer_families import FAMILIES

CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "clock", "arguments": {"zone": "utc", "at": [1, None]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "clock", "description": "é <b>", "parameters": {"type": "object"}}}
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": ""}],
    [
        {"role": "user", "content": "Which time is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "I need a clock.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12:00 <&>", "tool_call_id": "call-1", "name": "clock"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks {{ messages }} {% if %}"},
    ],
]
OWN = """
{%- macro say(message) %}{{ message.thinking }}|{{ message['reasoning_content'] }}{% endmacro %}
{%- for message in messages %}{% if loop.index0 == 9 %}{% break %}{% endif %}
{%- generation %}{{ say(message) }}{{ message.content | tojson }}{% endgeneration %}
{% endfor %}{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ documents }}
{%- set found = namespace(count=0) %}
{%- for message in messages %}{% set found.count = found.count + 1 %}{% endfor %}{{ found.count }}
{{- tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}"""
TEMPLATES = {
    **{name: family.template for name, family in FAMILIES.items()},
    "hermes": HERMES,
    "llama-3 with tools": LLAMA3,
    "thinking": THINKING,
    "embedded": None,
    "all that templates can use": OWN,
}


def tokenizer(template: Any) -> Any:
    loaded: Any = load_tokenizer(Path(deployments.demo_model.__file__).parent)
    if template is not None:
        loaded.chat_template = template
    return loaded


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_it_renders_the_same_as_transformers(name: str, tools: Any, prompt: bool) -> None:
    loaded = tokenizer(TEMPLATES[name])
    template, num_rendered = ChatTemplate(loaded), 0
    for messages in CONVERSATIONS:
        try:
            theirs = loaded.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception:
            with pytest.raises(TemplateRefused):
                template.render(messages, tools, add_generation_prompt=prompt)
            continue
        assert template.render(messages, tools, add_generation_prompt=prompt) == theirs
        num_rendered += 1
    assert num_rendered >= 2


def test_a_dictionarys_methods_come_before_its_fields() -> None:
    shown = "{% for name, value in tools[0].items() %}{{ name }}={{ value }} {% endfor %}{{ tools[0].type }}"
    template = ChatTemplate(tokenizer(shown))
    tools = [{"type": "array", "items": "int"}]
    rendered = template.render([{"role": "user", "content": ""}], tools, add_generation_prompt=True)
    assert rendered == "type=array items=int array"


def test_a_template_for_tools_is_used_where_there_are_tools() -> None:
    template = ChatTemplate(tokenizer({"default": "plain", "tool_use": "with tools"}))
    assert template.render([{"role": "user", "content": ""}], None, add_generation_prompt=True) == "plain"
    assert template.render([{"role": "user", "content": ""}], TOOLS, add_generation_prompt=True) == "with tools"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('no poems') }}", "refuses these messages: no poems."),
        ("{{ messages[0].content.missing.more }}", "cannot render these messages."),
        ("{% if %}", "cannot render these messages."),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("", "has no chat template; use /v1/completions."),
    ],
)
def test_a_template_that_fails_or_is_missing_is_refused_with_the_reason(source: str, told: str) -> None:
    loaded = tokenizer(source)
    if not source:
        loaded.chat_template = None
    with pytest.raises(TemplateRefused, match=told.replace(".", r"\.")):
        ChatTemplate(loaded).render(CONVERSATIONS[0], None, add_generation_prompt=True)
