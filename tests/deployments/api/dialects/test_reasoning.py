"""Reasoning, which a model writes before its answer, is separated from the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from deployments.api.constraints.answer_grammar import answer_grammar
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.reasoning import KNOWN, Thoughts
from deployments.api.output.output_parser import OutputParseSpec
from tests.deployments.api.dialects.conftest import ASK, TOOLS, Talk
from tests.deployments.support.chat_templates import HERMES, LLAMA3, THINKING
from tests.engine.support.grammar_models import compiler, ids
from tests.support.metric_values import snapshot_of

Make = Callable[..., Talk]
THOUGHT = "<think>\nRain? In Oslo.\n</think>\n\n"


def streamed(it: Talk, **options: Any) -> tuple[str, str]:
    """Return (reasoning, content) of a stream."""
    deltas = [chunk.choices[0].delta for chunk in it.chunks(**options)]
    return "".join(getattr(d, "reasoning", None) or "" for d in deltas), "".join(d.content or "" for d in deltas)


@pytest.mark.parametrize("template, says", [(HERMES, f"{THOUGHT}It is."), (THINKING, f"{THOUGHT[8:]}It is.")])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_reasoning_is_no_content(talk: Make, template: str, says: str, chunk: int) -> None:
    it = talk(template)
    it.engine.says, it.engine.chunk = says, chunk
    answer = it.whole()
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Rain? In Oslo.", "It is.") == streamed(it)
    thinking = len(it.engine.codec.encode(says.partition("</think>")[0] + "</think>"))
    assert abs(answer.usage.completion_tokens_details.reasoning_tokens - thinking) <= 1  # tokens cross the border
    counted = snapshot_of(it.metrics).values["reasoning_tokens_total"]
    assert counted == [((), 2 * answer.usage.completion_tokens_details.reasoning_tokens)]


@pytest.mark.parametrize("marks", KNOWN)
def test_the_marks_are_those_of_the_template(talk: Make, marks: Thoughts) -> None:
    """Character by character, also where the answer has to be JSON."""
    it = talk(f"{LLAMA3}{{# {' '.join(marks.marks)} #}}")
    opens, (before, after) = marks.opens + marks.label, marks.around_answer or ("", "")
    it.engine.says, it.engine.chunk = f"{opens}Rain?{marks.closes}{before}It is.{after}", 1
    message = it.whole().choices[0].message
    assert (message.reasoning, message.content) == ("Rain?", "It is.") == streamed(it)
    grammar = answer_grammar({"type": "object"}, None, OutputParseSpec(marks), lambda text: None)
    for said, is_allowed in ((f'{opens}[a] / b{marks.closes}{{"a": 1}}', True), (f"{opens}a", False)):
        matcher = compiler().compile(grammar).matcher.deep_copy()
        assert matcher.try_consume_tokens(ids(said)) == len(ids(said))
        assert matcher.is_accepting() is is_allowed


@pytest.mark.parametrize(
    ("says", "content"),
    [
        ("<response>\nIt is.\n</response>\n", "It is."),
        ("\n<response> It is.", "It is."),
        ("\n<resp> is no mark", "<resp> is no mark"),
        ("<res", "<res"),
        ("It is. <response>", "It is. <response>"),
        ("<response></response>", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("chunk", [1, 100])
def test_marks_around_an_answer_are_no_part_of_it(talk: Make, says: str, content: str, chunk: int) -> None:
    it = talk(f"{LLAMA3}{{# <think></think> <response></response> #}}")
    it.engine.says, it.engine.chunk = f"<think>Rain?</think>{says}", chunk
    message = it.whole().choices[0].message
    assert (message.reasoning, message.content) == ("Rain?", content) == streamed(it)


def test_how_many_tokens_are_reasoning_does_not_depend_on_how_they_come(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = f"{THOUGHT}It is."
    counts = set()
    for it.engine.chunk in (1, 3, 7, 100):
        counts.add(it.whole().usage.completion_tokens_details.reasoning_tokens)
    assert len(counts) == 1 and counts.pop() > 8


def test_calls_come_after_reasoning_and_none_are_found_in_it(talk: Make) -> None:
    it = talk(HERMES)
    call = '<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    it.engine.says = f"<think>I could say {call}.</think>{call}"
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        choice = answer.choices[0]
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"zone": "utc"}']
        assert (choice.message.reasoning, choice.finish_reason) == (f"I could say {call}.", "tool_calls")


WITH_MARKS = [name for name, form in FORMATS.items() if form.begins and name != "harmony"]
SAID = [
    # reasoning, what follows it, the content, the number of calls
    ("look\n", "CALL", "", 1),
    ("", "CALL", "", 1),
    ("look\n", "CALL CALL", "", 2),
    ("look ", "CALL So.", " So.", 1),
    ("BEGIN is a mark. ", "CALL", "", 1),
    ("I could say CALL or CALL. ", "</think>So.", "So.", 0),
    ("I could say BEGIN ", "</think>CALL", "", 1),
    ("I could say CUT ", "</think>CALL", "", 1),
    ("BEGIN is a mark.", "", "", 0),
    ("look", "", "", 0),
]


@pytest.mark.parametrize(("name", "marks"), list(zip(WITH_MARKS, cycle(KNOWN))))
def test_a_call_ends_reasoning_that_nothing_closes(talk: Make, name: str, marks: Thoughts) -> None:
    """In every format with a mark before calls. If a closing mark comes, calls before it are drafts."""
    form, it = FORMATS[name], talk(f"{LLAMA3}{{# {' '.join(marks.marks)} #}}", tools=name)
    call = form.spell_all([("clock", '{"zone": "utc"}')])
    places = {"CALL": call, "BEGIN": form.begins, "CUT": call[: len(call) // 2], "</think>": marks.closes}
    for thought, rest, content, num_calls in SAID:
        for place, text in places.items():
            thought, rest = thought.replace(place, text), rest.replace(place, text)
        it.engine.says = f"{marks.opens}{marks.label}{thought}{rest}"
        counts = set()
        for chunk, ask in ((1, it.whole), (3, it.streamed), (1000, it.whole)):
            it.engine.chunk = chunk
            answer = ask(tools=TOOLS)
            if answer.usage is not None:
                counts.add(answer.usage.completion_tokens_details.reasoning_tokens)
            choice = answer.choices[0]
            made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
            assert [(name, json.loads(arguments)) for name, arguments in made] == [
                ("clock", {"zone": "utc"})
            ] * num_calls
            assert (getattr(choice.message, "reasoning", None) or "").strip() == thought.strip()
            assert (choice.message.content or "").strip() == content.strip()
            assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
        assert len(counts) == 1


def test_reasoning_that_a_call_ends_has_only_the_tokens_before_it(talk: Make) -> None:
    it = talk(THINKING)
    call = '<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    it.engine.says = f"Rain? {call}"
    counted = it.whole(tools=TOOLS).usage.completion_tokens_details.reasoning_tokens
    assert len(it.engine.codec.encode("Rain?")) <= counted < len(it.engine.codec.encode("Rain? <tool_call>"))
    it.engine.says = f"Rain? {call} or so </think>"
    usage = it.whole(tools=TOOLS).usage
    assert usage.completion_tokens_details.reasoning_tokens >= len(it.engine.codec.encode(it.engine.says)) - 1


def test_without_tools_a_call_is_reasoning(talk: Make) -> None:
    it = talk(THINKING)
    it.engine.says = 'Rain? <tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = it.whole(**options).choices[0].message
        assert (message.reasoning, message.content, message.tool_calls) == (it.engine.says, "", None)


def test_a_call_in_reasoning_that_max_tokens_cuts_off_has_the_part_that_came(talk: Make) -> None:
    it = talk(THINKING)
    it.engine.says = 'Rain? <tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    head = len(it.engine.codec.encode(it.engine.says.partition("utc")[0]))
    for answer in (it.whole(tools=TOOLS, max_tokens=head), it.streamed(tools=TOOLS, max_tokens=head)):
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.reasoning) == ("length", "Rain?")
        assert '{"zone": "utc"}'.startswith(choice.message.tool_calls[0].function.arguments)


def test_an_unfinished_thought_is_reasoning(talk: Make) -> None:
    it = talk(THINKING)
    it.engine.says = "Hm, let me see </thi"
    answer = it.whole()
    assert answer.choices[0].message.reasoning == it.engine.says and answer.choices[0].message.content == ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(it.engine.codec.encode(it.engine.says))


@pytest.mark.parametrize("options", [{"template": LLAMA3}, {"template": HERMES, "reasoning": "none"}, {}])
def test_a_model_that_does_not_think_may_write_the_marks(talk: Make, options: dict[str, str]) -> None:
    it = talk(**options)
    it.engine.says = f"{THOUGHT}It is."
    answer = it.whole()
    assert answer.choices[0].message.content == it.engine.says
    assert not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_can_be_configured_for_any_model(talk: Make) -> None:
    it = talk(reasoning="think")
    it.engine.says = f"{THOUGHT}It is."
    assert it.whole().choices[0].message.content == "It is."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_that_is_sent_back_goes_to_the_template(talk: Make, name: str) -> None:
    it = talk(HERMES)
    said = {"role": "assistant", "content": "It is.", name: "Rain?"}
    it.whole(messages=[*ASK["messages"], said, *ASK["messages"]])
    assert "<think>Rain?</think>It is.<|im_end|>" in it.prompt()
