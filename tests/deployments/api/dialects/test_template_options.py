"""How a conversation is rendered is the client's to say: variables of the template, and where the prompt ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.conversation.options import TemplateOptions
from engine.grammar.compiler import compile_grammar
from engine.grammar.vocabulary import Vocabulary
from tests.deployments.api.dialects.conftest import ASK, CLOCK, Talk
from tests.deployments.support.chat_templates import HERMES, LLAMA3, THINKING

Make = Callable[..., Talk]
KNOWING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ reasoning_effort }}|{{ enable_thinking }}|{{ verbosity }}|{{ note }}|"
    "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = KNOWING.replace("{{ m.content }}", "{{ m.content | trim }}")


def tail(it: Talk, **fields: Any) -> str:
    """What the template made of its variables."""
    response = it.client.post("/v1/chat/completions", {**ASK, **fields})
    assert response.status_code == 200, response.text
    return it.prompt().partition("<|im_end|>\n")[2].partition("<|im_start|>")[0]


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, "||||"),
        ({"chat_template_kwargs": {"enable_thinking": False, "note": "n"}}, "|False||n|"),
        ({"reasoning_effort": "high", "verbosity": "low"}, "high|True|low||"),
        ({"reasoning_effort": "none"}, "none|False|||"),
        ({"reasoning_effort": "minimal", "chat_template_kwargs": {"enable_thinking": True}}, "minimal|True|||"),
        ({"documents": [{"title": "T", "text": "x"}]}, "||||[T: x]"),
        ({"chat_template_kwargs": {"note": "<|im_end|>"}}, "|||<|im_end|>|"),
        ({"documents": None, "chat_template_kwargs": None, "reasoning_effort": None}, "||||"),
    ],
)
def test_templates_get_their_variables(talk: Make, fields: dict[str, Any], rendered: str) -> None:
    it = talk(KNOWING)
    assert tail(it, **fields) == rendered
    body = {
        "messages": ASK["messages"],
        **{k: v for k, v in fields.items() if k not in ("reasoning_effort", "verbosity")},
    }
    if "reasoning_effort" not in fields:
        tokens = it.client.post("/tokenize", body | {"return_token_strs": True}).json()
        assert tokens["tokens"] == it.engine.requests[-1].prompt_ids
        assert len(tokens["token_strs"]) == tokens["count"]


def test_their_values_never_become_control_tokens(talk: Make) -> None:
    it = talk(KNOWING)
    end = it.engine.codec.encode("<|im_end|>")[0]
    tail(it, chat_template_kwargs={"note": "<|im_end|>"}, documents=[{"title": "<|im_end|>", "text": "a"}])
    assert it.engine.requests[-1].prompt_ids.count(end) == 1


@pytest.mark.parametrize(
    "name", ["messages", "tools", "eos_token", "add_generation_prompt", "chat_template", "a b"]
)
def test_a_name_that_the_server_sets_is_refused_as_a_variable(talk: Make, name: str) -> None:
    error = talk(KNOWING).refused(chat_template_kwargs={name: "x"})
    assert error["param"] == "chat_template_kwargs" and name in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"reasoning_effort": "much"}, "reasoning_effort"), ({"verbosity": 3}, "verbosity"),
     ({"documents": [1]}, "documents.0"), ({"chat_template_kwargs": []}, "chat_template_kwargs")],
)  # fmt: skip
def test_wrong_values_are_named(talk: Make, fields: dict[str, Any], param: str) -> None:
    assert talk(KNOWING).refused(**fields)["param"] == param


# --- where the prompt ends --------------------------------------------------------------------------------------

PREFILLED = [{"role": "user", "content": "Name a module."}, {"role": "assistant", "content": "It is  "}]


@pytest.mark.parametrize("template", [None, HERMES, LLAMA3, STRIPPING])
def test_the_model_continues_the_last_message_as_in_transformers(talk: Make, template: str | None) -> None:
    it = talk(template)
    it.client.post("/v1/chat/completions", {**ASK, "messages": PREFILLED, "continue_final_message": True})
    tokenizer: Any = it.engine.codec.tokenizer
    theirs = tokenizer.apply_chat_template(PREFILLED, continue_final_message=True, tokenize=False)
    assert it.prompt() == theirs and theirs.rstrip().endswith("It is")
    asked = {"messages": PREFILLED, "continue_final_message": True}
    assert it.client.post("/tokenize", asked).json()["tokens"] == it.engine.requests[-1].prompt_ids


def test_a_message_that_is_not_shown_cannot_be_continued(talk: Make) -> None:
    it = talk("{{ messages[0].content }}")
    error = it.refused(messages=PREFILLED, continue_final_message=True)
    assert error["param"] == "messages" and "cannot be continued" in error["message"]
    assert it.refused(continue_final_message=True, add_generation_prompt=True)["param"] == "continue_final_message"


def test_a_prompt_may_end_without_an_answers_beginning(talk: Make) -> None:
    it = talk(HERMES)
    it.client.post("/v1/chat/completions", {**ASK, "add_generation_prompt": False})
    assert it.prompt().endswith("Oslo?<|im_end|>\n")


def test_the_cache_of_conversations_stays_exact(talk: Make) -> None:
    """The same messages, rendered in all ways, one after another and each by itself."""
    texts = ["<|im_start|>user " * 6 + "a", "b" * 200, "c" * 100]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    ways = [
        TemplateOptions(),
        TemplateOptions(add_generation_prompt=False),
        TemplateOptions(add_generation_prompt=False, continues=True),
        TemplateOptions(variables={"note": "<|im_end|>" * 9, "enable_thinking": False}),
    ]
    shared = talk(KNOWING).engine.codec
    for _ in range(2):
        for way in ways:
            alone = talk(KNOWING).engine.codec.render_chat(messages, options=way).encode()
            assert shared.render_chat(messages, options=way).encode() == alone


# --- reasoning --------------------------------------------------------------------------------------------------


def test_reasoning_may_be_left_out(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = "<think>Rain?</think>It is."
    body = {"include_reasoning": False}
    message = it.whole(extra_body=body).choices[0].message
    assert (getattr(message, "reasoning", None), message.content) == (None, "It is.")
    deltas = [chunk.choices[0].delta for chunk in it.chunks(extra_body=body)]
    assert "".join(delta.content or "" for delta in deltas) == "It is."
    assert not any(getattr(delta, "reasoning", None) for delta in deltas)


def thinking(talk: Make, template: str | None) -> Talk:
    """A model whose marks are tokens, as Qwen's are."""
    it = talk(template, added=("<think>", "</think>"))
    tokenizer: Any = it.engine.codec.tokenizer
    served = it.service.models["demo"]
    card = replace(served.card, vocab_size=len(tokenizer), eos_token_ids=frozenset({2}))
    return it.of(replace(it.service, models={"demo": replace(served, card=card)}))


def allowed(it: Talk, written: list[int]) -> set[int]:
    """Which tokens may follow, by the grammar of the last request."""
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None
    tokenizer: Any = it.engine.codec.tokenizer
    matcher = compile_grammar(grammar, Vocabulary.of(tokenizer, len(tokenizer), [2]).load())
    assert matcher.try_consume_tokens(written) == len(written)
    mask = matcher.compute_bitmask()
    return {token for token in range(len(tokenizer)) if mask[token // 8] >> (token % 8) & 1}


@pytest.mark.parametrize("template", [HERMES, THINKING])
@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize(
    "form", [{}, {"response_format": {"type": "json_object"}}, {"tools": [CLOCK], "tool_choice": "required"}]
)
def test_after_so_many_tokens_the_end_of_thinking_is_forced(
    talk: Make, template: str, budget: int, form: dict[str, Any]
) -> None:
    it = thinking(talk, template)
    opened, close = (it.engine.codec.encode(mark)[0] for mark in ("<think>", "</think>"))
    it.whole(extra_body={"thinking_token_budget": budget}, **form)
    begin = [] if template == THINKING else [opened]
    thought = it.engine.codec.encode("one two three four five six", add_special_tokens=False)[:budget]
    assert allowed(it, begin + thought) == {close}
    if budget:
        assert {close, *range(300, 400)} <= allowed(it, begin + thought[:-1])
        answered = allowed(it, [*begin, thought[0], close])
        assert opened not in answered
        assert (2 in answered) == (not form)
    if not form and template == HERMES:
        assert {2, opened} <= allowed(it, []) and close in allowed(it, [opened])


def test_a_thinking_budget_that_cannot_apply_is_refused_or_has_no_effect(talk: Make) -> None:
    error = talk(THINKING).refused(thinking_token_budget=5)
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_field")
    it = thinking(talk, THINKING)
    assert it.refused(thinking_token_budget=-2)["param"] == "thinking_token_budget"
    assert it.refused(thinking_token_budget=5, ignore_eos=True)["param"] == "ignore_eos"
    for template, budget in ((THINKING, -1), (None, 5)):  # no bound, and a model that does not think
        it = thinking(talk, template)
        assert it.client.post("/v1/chat/completions", {**ASK, "thinking_token_budget": budget}).status_code == 200
        assert it.engine.requests[-1].sampling.grammar is None
