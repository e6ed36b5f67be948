"""Calls and reasoning are found in a text however it is cut; what is neither stays text.

The properties were searched with 20,000 examples in all, seed 20261127.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import assume, example, given, note, settings
from hypothesis import strategies as st

from deployments.api.base import exact_json
from deployments.api.dialects import gemma, harmony
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.listed import PYTHON_TAG
from deployments.api.dialects.named import Functions
from deployments.api.dialects.reasoning import HARMONY, KNOWN, THINK, Thoughts, parse_reasoning
from deployments.api.dialects.segments import Parser, ParserDriver, Segment, joined
from tests.deployments.support.tool_answers import (
    OBJECTS,
    OTHER_MEMBERS,
    VALUE_ENDS,
    Answer,
    Found,
    answers,
    cut,
    damaged,
    find,
    places,
    squeezed,
)
from tests.support.examples import examples

NAMES: Functions = {"find": None, "add-2": None}
formats = st.sampled_from(sorted(FORMATS))
WORD = "zq7"
OTHER_MEMBER = re.compile("|".join(OTHER_MEMBERS))
WRONG_KEY = re.compile(r'"(?=\w*zq7)[argumentsp7zqfcioe]*"\s*:')
IN_HEADER = re.compile(r"<\|(start|channel)\|>(?:(?!<\|message\|>).)*\Z", re.DOTALL)


def found(parser: Parser[None], chunks: Iterable[str]) -> list[Segment]:
    driver = ParserDriver(parser)
    segments = [segment for chunk in chunks for segment in driver.push(chunk)]
    return joined(segments + driver.finish())


def calls(segments: Iterable[Segment]) -> list[tuple[str, str]]:
    """Return (name, arguments) of all calls."""
    pieces: list[tuple[str, str]] = []
    for segment in segments:
        if segment.kind == "call":
            pieces.append((segment.text, ""))
        elif segment.kind == "arguments":
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + segment.text)
    return pieces


def text(segments: Iterable[Segment], kind: str = "text") -> str:
    return "".join(segment.text for segment in segments if segment.kind == kind)


def exact(answer: Answer, found: Found) -> Found:
    """What is found, with arguments in one spelling where the format has its own."""
    if FORMATS[answer.format].rules is None:  # arguments are JSON as they are written
        return found
    calls = [(name, exact_json.write(exact_json.parse(arguments))) for name, arguments in found.calls]
    return Found(found.reasoning, found.content, calls, found.is_call)


def example_of(name: str, said: str, expected: Found, thoughts: Thoughts | None = None) -> Callable[..., Any]:
    """An answer that was read wrongly once; with reasoning, the prompt has its opening mark."""
    return example(answer=Answer(name, thoughts, thoughts not in (None, HARMONY), said, expected), at=[])


CLOCK = ("clock", "{}")


@example_of("olmo3", "<function_calls>hm <function_calls>clock()", Found("", "<function_calls>hm", [CLOCK], True))
@example_of(
    "gemma4", "<|tool_call>call:hm <|tool_call>call:clock{}", Found("", "<|tool_call>call:hm", [CLOCK], True)
)
@example_of("hermes", '<tool_call>{"name": "clock"}</tool_call>', Found("", "", [CLOCK], True), THINK)
@example_of("hermes", '<tool_call>{"name": "x"</tool_call>', Found("", '<tool_call>{"name":"x"</tool_call>', []))
@example_of("phi4", 'functoolsfunctools[{"name": "clock"}]', Found("", "functools", [CLOCK], True))
@example_of(
    "harmony",
    f'{harmony.OPEN}find{harmony.MESSAGE}{{"text":"<|end|>"}}<|end|>',
    Found("", "", [("find", '{"text":"<|end|>"}')], True),
    HARMONY,
)
@settings(max_examples=examples(100))
@given(answer=formats.flatmap(answers), at=places)
def test_a_models_answer_is_parsed_the_same_wherever_its_text_is_cut(answer: Answer, at: list[int]) -> None:
    note(str(answer))
    expected = exact(answer, answer.expected)
    for pieces in ([answer.said], cut(answer.said, at), list(answer.said)):
        assert exact(answer, find(answer, pieces)) == expected


@settings(max_examples=examples(100))
@given(answer=formats.flatmap(damaged), at=places)
def test_any_text_is_parsed_alike_wherever_it_is_cut(answer: Answer, at: list[int]) -> None:
    note(str(answer))
    found = find(answer, [answer.said])
    assert found == find(answer, cut(answer.said, at)) == find(answer, list(answer.said))
    if not found.calls and answer.thoughts is None:
        assert found.content == squeezed(answer.said)


@settings(max_examples=examples(100))
@given(answer=formats.flatmap(answers), place=st.integers(0, 10_000), end=st.integers(0, 10_000), at=places)
def test_no_word_is_lost(answer: Answer, place: int, end: int, at: list[int]) -> None:
    """Wherever it is put in, and wherever the answer is cut off after it. Only two places have no part in an
    answer: a member of a call that is not its name or its arguments, and the header of a channel.
    """
    place %= len(answer.said) + 1
    said = f"{answer.said[:place]}{WORD}{answer.said[place:]}"
    assume(answer.format not in OBJECTS or not (OTHER_MEMBER.search(answer.said) or WRONG_KEY.search(said)))
    assume(answer.format != "harmony" or not IN_HEADER.search(said[:place]))
    for whole in (said, said[: place + len(WORD) + end % (len(said) - place)]):
        note(whole)
        found = find(answer._replace(said=whole), cut(whole, at))
        assert WORD in found.reasoning + found.content + str(found.calls)


@settings(max_examples=examples(100))
@given(
    name=st.sampled_from(sorted({*FORMATS} - {"pythonic"})),
    text=st.text("abHf ,.1<{[('\n\u0301é🌍"),
    has_mark=st.booleans(),
    after=st.text("abHf ,.1<{[\n\u0301é🌍", max_size=8),
    at=places,
)
def test_a_mark_after_a_text_that_is_not_closed_is_no_part_of_it(
    name: str, text: str, has_mark: bool, after: str, at: list[int]
) -> None:
    """So the calls after it are found. Where values have marks, the call is complete without its own."""
    form, text = FORMATS[name], f"{text}{WORD}"
    first, _, rest = form.spell_all([("find", exact_json.write({"text": text}))]).partition(WORD)
    marks = tuple({*form.marks} - {gemma.QUOTE, VALUE_ENDS.get(name)})
    marks_left = [rest[start:] for start in range(len(rest)) if rest.startswith(marks, start)]
    between = marks_left[0] if has_mark and marks_left else ""
    begins = {"harmony": f"{harmony.CALL}{harmony.NEXT}", "llama3": PYTHON_TAG}.get(name, "")
    said = f"{first}{WORD}{between}{begins}{form.spell_all([CLOCK])}{after}."
    answer = Answer(name, HARMONY if name == "harmony" else None, False, said, Found("", "", []))
    note(said)
    for pieces in ([said], cut(said, at), list(said)):
        result = find(answer, pieces)
        (called, arguments), *others = result.calls
        assert (called, others, result.content) == ("find", [CLOCK], squeezed(f"{after}."))
        assert exact_json.parse(exact_json.closed(arguments)) == {"text": text}
        assert result.is_call == (name in VALUE_ENDS)


@pytest.mark.parametrize("marks", KNOWN)
@pytest.mark.parametrize(
    "name", sorted(name for name, form in FORMATS.items() if form.begins and name != "harmony")
)
def test_a_closing_mark_in_a_text_of_a_call_does_not_end_reasoning(name: str, marks: Thoughts) -> None:
    """If the text is closed, and the call with it. Otherwise the call was a draft that breaks off."""
    text = f"a {marks.closes} {WORD}"
    call = FORMATS[name].spell_all([("find", exact_json.write({"text": text}))])
    unclosed = call.replace(f" {marks.closes} {WORD}", WORD).partition(WORD)[0]
    for said, reasoning, content, texts in [
        (f"Hm. {call}", "Hm.", "", [text]),
        (f"Hm. {call} {call}So.", "Hm.", "So.", [text, text]),
        (f"Hm. {call} or so {marks.closes}So.", f"Hm. {call} or so", "So.", []),
        (f"{call}{marks.closes}{call}", call, "", [text]),
        (f"Hm. {unclosed}{marks.closes}So.", f"Hm. {unclosed}", "So.", []),
        (f"Hm. {unclosed}{marks.closes}So. {call}", f"Hm. {unclosed}", "So.", [text]),
    ]:
        answer = Answer(name, marks, True, said, Found("", "", []))
        for pieces in ([said], list(said)):
            result = find(answer, pieces)
            assert (result.reasoning, result.content) == (squeezed(reasoning), content)
            assert [exact_json.parse(arguments) for _, arguments in result.calls] == [
                {"text": one} for one in texts
            ]


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", 'Let me look.\n<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>', "Let me look.",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": {"b": 2}}, "name": "find"}</tool_call>', "",
     [("find", '{"a": {"b": 2}}')]),
    ("hermes", '<tool_call>{"name": "find"}</tool_call> Done.', " Done.", [("find", "{}")]),
    # No call after all: text, to the last character.
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "find", "arguments": "a"}</tool_call>',
     '<tool_call>{"name": "find", "arguments": "a"}</tool_call>', []),
    ("hermes", '<tool_call>find(1)</tool_call>', "<tool_call>find(1)</tool_call>", []),
    ("hermes", '<tool_call>{"name": "fi', '<tool_call>{"name": "fi', []),
    ("hermes", "One < two <tool", "One < two <tool", []),
    ("hermes", "</tool_call>", "</tool_call>", []),
    # A call that the end cuts off is a call with as much of its arguments as came.
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "b', "", [("find", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}}</tool_', "", [("find", "{}")]),
    # What is wrong with one call does not touch the next.
    ("hermes", '<tool_call><tool_call>{"name": "find"}</tool_call>', "<tool_call>", [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find"}<tool_call></tool_call>', "<tool_call></tool_call>",
     [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}, !<tool_call>{"name": "add-2"}', ", !",
     [("find", "{}"), ("add-2", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}}<tool_call>{"name": "add-2"}', "",
     [("find", "{}"), ("add-2", "{}")]),
    # Arguments may have their other name, be a text, or be missing; they are never lost.
    ("hermes", '<tool_call>{"name": "find", "parameters": {"a": 1}}</tool_call>', "", [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"parameters": {"a": 1}, "name": "find"}</tool_call>', "", [("find", '{"a": 1}')]),
    ("hermes", r'<tool_call>{"name": "find", "arguments": "{\"a\": \"}\"}"}</tool_call>', "",
     [("find", '{"a": "}"}')]),
    ("hermes", r'<tool_call>{"arguments": " {\"a\": 1} ", "name": "find"}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": null}</tool_call>', "", [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": ""}</tool_call>', "", [("find", "{}")]),
    ("hermes", '<tool_call>{"id": "c", "type": "function", "name": "find", "index": 0}</tool_call>', "",
     [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}, "id": "c", "of": {"b": 2}}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}, "parameters": {"a": 1}}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"parameters": {"a": 1}, "name": "find", "arguments": null}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}, "parameters": {"a": 1}}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>',
     ', "parameters": {"b": 2}}', [("find", '{"a": 1}')]),
    *(
        ("hermes", said, said, [])
        for said in (
            '<tool_call>{"name": "find", "args": {"a": 1}}</tool_call>',
            '<tool_call>{"args": {"a": 1}, "name": "find"}</tool_call>',
            '<tool_call>{"name": "find", "arguments": {}, "input": {"a": 1}}</tool_call>',
            '<tool_call>{"name": "find", "a": 1}</tool_call>',
            '<tool_call>{"name": "find", "args": ["a"]}</tool_call>',
            '<tool_call>{"name": "find", "arguments": 7}</tool_call>',
            '<tool_call>{"function": {"function": {"name": "find", "arguments": {"a": 1}}}}</tool_call>',
            '<tool_call>```json\n{"a": 1}\n```</tool_call>',
            '<tool_call>[]</tool_call>',
        )
    ),
    # Several objects in one block, a fenced block, and an object as requests have it.
    *(
        ("hermes", f"<tool_call>\n{block}\n</tool_call>", "", [("find", '{"a": 1}'), ("add-2", "{}")])
        for first, second in [
            ('{"name": "find", "arguments": {"a": 1}}', '{"name": "add-2"}'),
            ('{"type": "function", "function": {"name": "find", "arguments": {"a": 1}}}',
             '{"function": {"name": "add-2"}, "id": "c"}'),
        ]
        for block in (f"{first}\n{second}", f"{first}, {second}", f"{first};{second}", f"[{first}, {second}]",
                      f"```json\n{first}\n{second}\n```", f"```\n[{first},{second}]```")
    ),
    ("hermes", '<tool_call>```json\n{"name": "find", "arguments": {"a": 1}</tool_call> So.', " So.",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find"}{"name": "other"}</tool_call>', '{"name": "other"}',
     [("find", "{}")]),
    ("hermes", '<tool_call>{"function": {"arguments": {"a": 1}, "name": "find"}</tool_call>', "",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "function": {"a": 1}, "arguments": {"b": 2}}</tool_call>', "",
     [("find", '{"b": 2}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}}}</tool_call>', "", [("find", '{"a": 1}')]),
    ("llama3", '<|python_tag|>```json\n{"name": "find"}\n{"name": "add-2"}\n```', "",
     [("find", "{}"), ("add-2", "{}")]),
    ("llama3", '{"type": "function", "function": {"name": "find", "parameters": {"a": 1}}}', "",
     [("find", '{"a": 1}')]),
    ("llama3", '```json\n{"name": "find"}\n```', '```json\n{"name": "find"}\n```', []),
    ("granite", '<|tool_call|>{"name": "find", "arguments": {"a": 1}}\n{"name": "add-2"}', "",
     [("find", '{"a": 1}'), ("add-2", "{}")]),
    ("mistral_list", '[TOOL_CALLS]```json\n[{"function": {"name": "find"}}]\n```', "", [("find", "{}")]),
    ("kimi", '<|tool_call_begin|>find<|tool_call_argument_begin|>```json\n{"a": 1}\n```<|tool_call_end|>', "",
     [("find", '{"a": 1}')]),
    # A mark is part of a text that is closed after it, and no part of one that is not.
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "</tool_call>\\" <tool_call>", "b": [true]}}', "",
     [("find", '{"a": "</tool_call>\\" <tool_call>", "b": [true]}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "b</tool_call>\n<tool_call>{"name": "add-2"}'
     '</tool_call>"', '"', [("find", '{"a": "b'), ("add-2", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "b</tool_call> It is 6\'2", and so on.',
     " It is 6'2\", and so on.", [("find", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "<tool_call> b"</tool_call>', "",
     [("find", '{"a": "<tool_call> b"}')]),
    ("hermes", '<tool_call>{"id": "b</tool_call><tool_call>{"name": "add-2"}', '<tool_call>{"id": "b</tool_call>',
     [("add-2", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "b</tool_call>', "", [("find", '{"a": "b')]),
    # Once a call has its arguments, it is complete without its bracket.
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}</tool_call>', "", [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}\n</tool_call> So', " So",
     [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "find"</tool_call>', "", [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": {"b": [1</tool_call>', "",
     [("find", '{"a": {"b": [1]}}')]),
    ("hermes", '<tool_call>{"name": "find"</tool_call>', "", [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}', "", [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "</tool_call>"}</tool_call>', "",
     [("find", '{"a": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1} <tool_call>{"name": "add-2"}', "",
     [("find", '{"a": 1}'), ("add-2", "{}")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1}} So </tool_call>.', " So.",
     [("find", '{"a": 1}')]),
    ("llama3", '{"name": "find", "parameters": {"a": 1}; {"name": "add-2", "arguments": {}', "",
     [("find", '{"a": 1}'), ("add-2", "{}")]),
    ("llama3", '<|python_tag|>{"name": "find", "parameters": {"a": 1<|python_tag|>{"name": "add-2"}', "",
     [("find", '{"a": 1}'), ("add-2", "{}")]),
    ("llama3", '{"name": "find", "args": {"a": 1}}', '{"name": "find", "args": {"a": 1}}', []),
    ("llama3", '{"name": "find", "parameters": {"a": "x;y"}}', "", [("find", '{"a": "x;y"}')]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "find", "parameters": {}}', "", [("find", "{}")]),
    ("llama3", 'Look. <|python_tag|>{"name": "find", "parameters": {}}', "Look.", [("find", "{}")]),
    ("llama3", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    ("llama3", 'Call {"name": "find", "parameters": {}}', 'Call {"name": "find", "parameters": {}}', []),
    ("llama3", '{"name": "find", "parameters": {}}; and more', "; and more", [("find", "{}")]),
    ("llama3", '{"name": "find", "parameters": {}}; {"name": "x"}', '; {"name": "x"}', [("find", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize("name, whole, content, made", CASES, ids=lambda value: str(value)[:50])
def test_calls_and_text_are_told_apart(name: str, whole: str, content: str, made: list[tuple[str, str]]) -> None:
    read = FORMATS[name].parser
    segments = found(read(NAMES), whole)  # one character at a time
    assert (text(segments), calls(segments)) == (content, made)
    assert found(read(NAMES), [whole]) == segments


def test_arguments_come_while_they_are_written() -> None:
    driver = ParserDriver(FORMATS["hermes"].parser(NAMES))
    assert driver.push('Hm. <tool_call>{"name": "find", "argu') == [Segment("text", "Hm.")]
    assert driver.push('ments": {"a') == [Segment("call", "find"), Segment("arguments", '{"a')]
    assert driver.push('": [1,') == [Segment("arguments", '": [1,')]
    assert driver.push("2]}") == [Segment("arguments", "2]}")]
    assert driver.push("}") == [Segment("end")]
    assert driver.push("\n</tool_call>") == [] == driver.finish()


THOUGHTS = [
    (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (True, "\n</think>Yes.", "", "Yes."),
    (False, "No </think> <think>.", "", "No </think> <think>."),
    (False, "<think>a < b </thi", "a < b </thi", ""),
    (False, "<think>Hm.</think>So <think>", "Hm.", "So <think>"),
    (False, " <thi", "", " <thi"),
    (False, "<think></think>Yes.", "", "Yes."),
]


@pytest.mark.parametrize("marks", KNOWN)
@pytest.mark.parametrize("is_open, whole, thought, content", THOUGHTS)
def test_reasoning_and_answer_are_told_apart(
    marks: Thoughts, is_open: bool, whole: str, thought: str, content: str
) -> None:
    """Between each family's marks, character by character."""
    opens, closes, label = marks.opens, marks.closes, marks.label

    def spelled(part: str) -> str:
        known = part.replace("<think>", opens + label).replace("</think>", closes)
        return known.replace("</thi", closes[:-3]).replace("<thi", opens[:-3])

    segments = found(parse_reasoning(marks, is_open=is_open), spelled(whole))
    assert (text(segments, "reasoning"), text(segments)) == (spelled(thought), spelled(content))
