"""Forced and strict calls: what the grammar lets a model write, and what a real engine writes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy
import pytest

from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.segments import ParserDriver
from deployments.api.served.text_codec import TextCodec
from deployments.config.limits import Limits
from deployments.ingress.grammar_check import GrammarCheck
from engine.grammar.compiler import compile_grammar
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.loading.load_model import load_model
from engine.text.tokenizer import load_tokenizer
from tests.deployments.api.dialects.conftest import ASK, TOOLS, WEATHER, Talk, tool
from tests.deployments.support.api_over_engines import api_over, events
from tests.deployments.support.chat_templates import (
    CODER,
    FAMILIES,
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_LIST,
    PYTHONIC,
    THINKING,
)
from tests.engine.support.grammar_models import DEMO, EOS, NUM_TOKENS, compiler, tokenizer

Make = Callable[..., Talk]
OF_FORMATS = [
    (HERMES, "hermes"),
    (LLAMA3, "llama3"),
    (CODER, "qwen3_coder"),
    (MISTRAL, "mistral"),
    (MISTRAL_LIST, "mistral_list"),
    (PYTHONIC, "pythonic"),
    (GEMMA, "gemma4"),
    (FAMILIES["olmo3"], "olmo3"),
]
NOTHING = {"type": "function", "function": {"name": "nothing"}}
TREE = tool("tree", root={"$ref": "#/$defs/node"})
TREE["function"]["parameters"]["$defs"] = {
    "node": {
        "type": "object",
        "properties": {"to": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
        "additionalProperties": False,
    }
}
NUMBERS = tool("numbers", n={"type": "integer", "minimum": 0, "maximum": 99}, is_it={"type": ["boolean", "null"]})
MANY = [*TOOLS, TREE, NUMBERS, NOTHING]
LETTER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}}}  # fmt: skip


def grammar_of(it: Talk, **options: Any) -> Grammar:
    """Return the grammar that the engine got with the request."""
    it.whole(**options)
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


def takes(grammar: Grammar, text: str, codec: Any = None, vocabulary: Vocabulary | None = None) -> bool:
    """Whether an answer may be exactly `text`."""
    compiled = compile_grammar(grammar, vocabulary.load()) if vocabulary else compiler().compile(grammar).matcher
    matcher, ids = compiled.deep_copy(), (codec or tokenizer()).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(grammar: Grammar, seed: int) -> str:
    """Draw an answer that the grammar allows, token by token, until it may end."""
    drawn, matcher, ids = random.Random(seed), compiler().compile(grammar).matcher.deep_copy(), list[int]()
    while True:
        bits = numpy.unpackbits(numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8), bitorder="little")
        allowed = numpy.flatnonzero(bits).tolist()
        if EOS in allowed and (allowed == [EOS] or drawn.random() < 0.7):
            return tokenizer().decode(ids)
        ids.append(drawn.choice([token for token in allowed if token != EOS]))
        matcher.try_consume_tokens([ids[-1]])


def check_call(name: str, arguments: str) -> None:
    (function,) = (one["function"] for one in MANY if one["function"]["name"] == name)
    value = json.loads(arguments)
    assert isinstance(value, dict)
    # The schemas are the same each time, and `jsonschema.validate` would check them each time.
    jsonschema.Draft202012Validator(function.get("parameters", {"maxProperties": 0})).validate(value)


NAMES = [one["function"]["name"] for one in MANY]


@pytest.mark.parametrize(
    ("template", "form", "choice"),
    [
        (template, form, choice)
        for number, (template, form) in enumerate([(None, "hermes"), *OF_FORMATS])
        # What is required may be each of them; each is named in several formats.
        for choice in ("required", NAMES[number % len(NAMES)], NAMES[(number + 2) % len(NAMES)])
    ],
)
def test_any_output_under_a_forced_choice_is_calls(
    talk: Make, template: str | None, form: str, choice: str
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    forced = choice if choice == "required" else named
    grammar = grammar_of(talk(template, reasoning="none"), tools=MANY, tool_choice=forced)
    names = {one["function"]["name"]: one["function"].get("parameters") for one in MANY}
    met = set()
    for seed in range(20 if choice == "required" else 3):
        driver = ParserDriver(FORMATS[form].parser(names))
        text = written(grammar, seed)
        segments = [*driver.push(text), *driver.finish()]
        kinds = [segment.kind for segment in segments]
        assert kinds == ["call", "arguments", "end"] * (len(kinds) // 3) and kinds, text
        for called, arguments in zip(segments[::3], segments[1::3], strict=True):
            check_call(called.text, arguments.text)
            met.add(called.text)
        if choice != "required":
            assert [segment.text for segment in segments[::3]] == [choice]
    assert len(met) > 2 or choice != "required"


def spelled(form: str, *calls: tuple[str, str]) -> str:
    return FORMATS[form].spell_all(calls)


OSLO, WRONG = ("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "a name too long"}')
UTC = ("clock", '{"zone":"utc"}')


@pytest.mark.parametrize(("template", "form"), OF_FORMATS)
def test_only_the_calls_that_are_asked_for_may_be_written(talk: Make, template: str, form: str) -> None:
    it, call, wrong = talk(template, reasoning="none"), spelled(form, OSLO), spelled(form, WRONG)
    both, text, answer = spelled(form, OSLO, UTC), "It rains.", '{"a": 7}'
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TOOLS[1]]
    table: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"tool_choice": "required"}, [call, both], ["", text, wrong, f"{text} {call}", call[:-2]]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call], [both]),
        ({"tool_choice": "required", "response_format": LETTER}, [call, both, answer][:2], [text, wrong]),
        ({"tools": strict}, [call, both, text, ""], [wrong]),
        ({"response_format": LETTER}, [call, both, answer], [text, wrong, '{"a": "b"}']),
        ({"response_format": {"type": "json_object"}}, [call, '{"b": []}'], [text]),
    ]
    for options, right, not_right in table:
        grammar = grammar_of(it, **{"tools": TOOLS, **options})
        assert [text for text in right if not takes(grammar, text)] == [], options
        assert [text for text in not_right if takes(grammar, text)] == [], options
    if form == "hermes":  # a call may come after text, and has to match there, too
        grammar = grammar_of(it, tools=strict)
        assert takes(grammar, f"{text}\n{call} And {both}.") and not takes(grammar, f"{text}\n{wrong}")


def test_a_request_that_forces_nothing_has_no_grammar(talk: Make) -> None:
    it = talk(HERMES)
    it.whole(tools=TOOLS)
    it.whole(tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}], tool_choice="none")
    assert [request.sampling.grammar for request in it.engine.requests] == [None, None]


@pytest.mark.parametrize(
    ("template", "thought"), [(HERMES, "<think>\nHm.\n</think>\n\n"), (THINKING, "Hm.</think>\n")]
)
def test_reasoning_comes_before_forced_calls(talk: Make, template: str, thought: str) -> None:
    it, call = talk(template), spelled("hermes", OSLO)
    forced = grammar_of(it, tools=TOOLS, tool_choice="required")
    assert takes(forced, thought + call) and not takes(forced, thought + "Yes.")
    letter = grammar_of(it, response_format=LETTER)
    assert takes(letter, thought + '{"a": 7}') and not takes(letter, thought + "Yes.")
    # Where the prompt has begun the reasoning it has to end; else there need not be any.
    assert takes(forced, call) == takes(letter, '{"a": 7}') == (template == HERMES)


def test_an_answer_that_has_another_form_has_no_reasoning_and_no_calls(talk: Make) -> None:
    it = talk(THINKING)
    it.engine.says = "yes"
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert it.whole(extra_body=form).choices[0].message.content == "yes"
    assert it.refused(tools=TOOLS, **form)["param"] == "tools"


def with_specials(talk: Make, template: str, *marks: str) -> tuple[Talk, TextCodec, Vocabulary]:
    """Return a talk with a tokenizer that has these marks as special tokens."""
    marked: Any = load_tokenizer(DEMO)
    marked.add_tokens(list(marks), special_tokens=True)
    marked.chat_template = template
    codec, size = TextCodec(marked), NUM_TOKENS + len(marks)
    it = talk(template)
    served = it.service.models["demo"]
    served = replace(served, codec=codec, card=replace(served.card, vocab_size=size))
    it = it.of(replace(it.service, models={"demo": served}))
    it.engine.codec = codec
    return it, codec, Vocabulary.of(marked, size, [EOS])


@pytest.mark.parametrize(("template", "form"), [(MISTRAL, "mistral"), (MISTRAL_LIST, "mistral_list")])
def test_marks_in_square_brackets_that_are_special_tokens(talk: Make, template: str, form: str) -> None:
    it, codec, vocabulary = with_specials(talk, template, "[TOOL_CALLS]", "[ARGS]")
    call, wrong = spelled(form, OSLO, UTC), spelled(form, WRONG)
    it.engine.says = f"Let me see.{call}"
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        assert message.content == "Let me see."
        assert [one.function.arguments for one in message.tool_calls] == [OSLO[1], UTC[1]]
    forced = grammar_of(it, tools=TOOLS, tool_choice="required")
    assert [takes(forced, text, codec, vocabulary) for text in (call, wrong, "No.")] == [True, False, False]
    free = grammar_of(it, tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TOOLS[1]])
    assert takes(free, f"Well: {call}", codec, vocabulary) and takes(free, "Well.", codec, vocabulary)
    assert not takes(free, f"Well: {wrong}", codec, vocabulary)


def test_marks_that_are_special_tokens(talk: Make) -> None:
    """Marks are special tokens, as in Hermes' own models: no text matches them, and decoding leaves them out."""
    it, codec, vocabulary = with_specials(talk, HERMES, "<tool_call>", "</tool_call>", "<think>", "</think>")
    call = spelled("hermes", OSLO)
    it.engine.says = f"<think>Hm.</think>Let me see.\n{call}"
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Let me see.")
        assert [one.function.arguments for one in message.tool_calls] == [OSLO[1]]
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    forced = grammar_of(it, tools=TOOLS, tool_choice="required")
    for text, is_right in ((call, True), (f"<think>Hm.</think>\n{call}", True), ("No.", False)):
        assert takes(forced, text, codec, vocabulary) == is_right
    free = grammar_of(it, tools=strict)
    assert takes(free, f"<think>Hm.</think>Well: {call}\n", codec, vocabulary)
    assert not takes(free, f"Well: {spelled('hermes', WRONG)}", codec, vocabulary)


def test_marks_of_texts_that_are_special_tokens(talk: Make) -> None:
    """Gemma 4's arguments have special tokens in them, and a label follows the one that begins a thought."""
    form, marks = FORMATS["gemma4"], ("<|channel>", "<channel|>")
    it, codec, vocabulary = with_specials(talk, GEMMA, *form.marks, *marks)
    call, wrong = spelled("gemma4", OSLO), spelled("gemma4", WRONG)
    thought = "<|channel>thought\nHm.\n<channel|>"
    it.engine.says = f"{thought}Let me see.{call}{spelled('gemma4', UTC)}"
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Let me see.")
        made = [json.loads(one.function.arguments) for one in message.tool_calls]
        assert made == [json.loads(OSLO[1]), json.loads(UTC[1])]
    forced = grammar_of(it, tools=TOOLS, tool_choice="required")
    for text, is_right in ((call, True), (thought + call, True), (wrong, False), (f"{thought}No.", False)):
        assert takes(forced, text, codec, vocabulary) == is_right
    free = grammar_of(it, tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])
    assert takes(free, f"{thought}Well: {call}", codec, vocabulary)
    assert not takes(free, f"{thought}Well: {wrong}", codec, vocabulary)
    bounded = grammar_of(it, tools=TOOLS, tool_choice="required", extra_body={"thinking_token_budget": 3})
    assert takes(bounded, call, codec, vocabulary)
    assert takes(bounded, f"<|channel>thought\n<channel|>{call}", codec, vocabulary)
    assert not takes(bounded, f"<|channel>thought\n{'a long way ' * 9}<channel|>{call}", codec, vocabulary)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarCheck]:
    limits = Limits(grammar_compile_s=1.0)
    checker = GrammarCheck(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]), limits)
    yield checker
    checker.close()


def test_schemas_that_nothing_can_be_held_to_name_the_tool(talk: Make, checker: GrammarCheck) -> None:
    it = talk(HERMES)
    served = replace(it.service.models["demo"], grammars=checker)
    it = it.of(replace(it.service, models={"demo": served}))
    odd = [WEATHER, tool("odd", all={"type": "array", "uniqueItems": True})]
    error = it.refused(tools=odd, tool_choice="required")
    assert error["param"] == "tools.1.function.parameters" and "uniqueItems" in error["message"]
    endless = [WEATHER, tool("endless", n={"type": "integer", "multipleOf": 99999999})]
    error = it.refused(tools=endless, tool_choice="required")
    assert error["param"] == "tools" and "too complex" in error["message"]
    it.whole(tools=odd)  # the model is on its own
    it.whole(tools=odd, tool_choice={"type": "function", "function": {"name": "get_weather"}})


def test_the_grammar_of_all_calls_together_is_bounded(talk: Make) -> None:
    it = talk(HERMES, Limits(max_grammar_bytes=400))
    it.whole(tools=TOOLS)
    assert it.refused(tools=TOOLS, tool_choice="required")["param"] == "tools"


def test_the_embedded_model_makes_the_forced_calls() -> None:
    """A model that knows nothing of tools: what it writes are valid calls because it can write nothing else."""
    asked = {**ASK, "model": "m", "tools": [TOOLS[1], NUMBERS], "parallel_tool_calls": False,
             "n": 3, "seed": 1, "max_tokens": 120, "temperature": 1.5}  # fmt: skip
    named = {"type": "function", "function": {"name": "numbers"}}

    async def ask() -> None:
        async with api_over(1, load=load_model, model="demo", kv_pages=256, page_size=16) as api:
            for choice, names in (("required", {"clock", "numbers"}), (named, {"numbers"})):
                body = {**asked, "tool_choice": choice}
                answer = (await api.http.post("/v1/chat/completions", json=body)).json()
                assert len(answer["choices"]) == 3, answer
                for given in answer["choices"]:
                    (call,) = given["message"]["tool_calls"]
                    check_call(call["function"]["name"], call["function"]["arguments"])
                    assert call["function"]["name"] in names
                    assert (given["message"]["content"], given["finish_reason"]) == (None, "tool_calls")
                stream = await api.http.post("/v1/chat/completions", json={**body, "n": 1, "stream": True})
                deltas = [event["choices"][0]["delta"] for event in events(stream)]
                calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
                whole = answer["choices"][0]["message"]["tool_calls"][0]["function"]
                assert "".join(call["arguments"] for call in calls) == whole["arguments"]

    asyncio.run(ask())
