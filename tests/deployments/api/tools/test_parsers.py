"""Calls and reasoning are found in a text however it is cut; what is neither stays text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.output.reasoning import KNOWN, Thoughts, parse_reasoning
from deployments.api.tools.hermes import parse_hermes
from deployments.api.tools.llama3 import parse_llama3
from deployments.api.tools.segments import Parser, ParserDriver, Segment, joined
from tests.support.examples import examples

NAMES = frozenset({"find", "add-2"})
Read = Callable[[Collection[str]], Parser[None]]
WRITES: dict[Read, tuple[str, str, str]] = {
    parse_hermes: ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>\n"),
    parse_llama3: ('{"name": ', ', "parameters": ', "}; "),
}


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


def cut(whole: str, places: Iterable[int]) -> list[str]:
    ends = sorted({place % (len(whole) + 1) for place in places} | {0, len(whole)})
    return [whole[start:end] for start, end in pairwise(ends)]


nasty = st.text() | st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "}",
        '{"a": "',
        "\\",
        '"',
        "\\u00e9 🌍",
        "<|python_tag|>",
        "</think>",
        "\n",
        ";",
    ]
)
objects = st.dictionaries(
    nasty,
    st.recursive(
        st.none() | st.booleans() | st.integers() | nasty,
        lambda value: st.lists(value, max_size=3) | st.dictionaries(nasty, value, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
places = st.lists(st.integers(0, 10_000), max_size=12)
_SCRAPS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<", "</", "hm", " ", "\n", ";", ",",
    '{"name": "find"', '{"name":"x"', ', "arguments": {', ', "parameters": {', '"arguments": "no"', '"a": "\\"',
    '{"arguments": {"b": [1, "}"]}, "name": "find"}', "{", "}", "}}", ":", '"', "\\",
]  # fmt: skip
scraps = st.lists(st.sampled_from(_SCRAPS), max_size=14).map("".join)


@pytest.mark.parametrize("read", WRITES)
@given(made=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), objects), min_size=1, max_size=3),
       at=places, is_ascii=st.booleans())  # fmt: skip
def test_what_a_model_calls_is_found_wherever_its_text_is_cut(
    read: Read, made: list[tuple[str, Any]], at: list[int], is_ascii: bool
) -> None:
    before, between, after = WRITES[read]
    spelled = [(name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in made]
    whole = "".join(f"{before}{json.dumps(name)}{between}{arguments}{after}" for name, arguments in spelled)
    segments = found(read(NAMES), cut(whole, at))
    assert calls(segments) == spelled
    assert text(segments) == ""
    assert [segment.kind for segment in segments] == ["call", "arguments", "end"] * len(made)


@pytest.mark.parametrize("read", WRITES)
@settings(max_examples=examples(100))
@given(whole=scraps | st.text(), at=places)
def test_any_text_reads_the_same_in_pieces_and_nothing_is_lost(read: Read, whole: str, at: list[int]) -> None:
    segments = found(read(NAMES), [whole])
    assert found(read(NAMES), cut(whole, at)) == segments
    if not calls(segments):
        assert text(segments) == whole
    rest = whole
    for segment in segments:  # all in its order, and between it marks, punctuation and names of calls
        if segment.kind in ("text", "arguments") and segment.text != "{}":
            _, met, rest = rest.partition(segment.text)
            assert met, (segment, rest)


@settings(max_examples=examples(100))
@given(whole=scraps | st.text(), at=places, is_open=st.booleans())
def test_any_reasoning_reads_the_same_in_pieces(whole: str, at: list[int], is_open: bool) -> None:
    segments = found(parse_reasoning(is_open=is_open), [whole])
    assert found(parse_reasoning(is_open=is_open), cut(whole, at)) == segments
    thought = text(segments, "reasoning")
    assert thought in whole and text(segments) in whole
    if not is_open and not whole.lstrip().startswith("<think>"):
        assert text(segments) == whole


CASES: list[tuple[Read, str, str, list[tuple[str, str]]]] = [
    (parse_hermes, "Just text.", "Just text.", []),
    (parse_hermes, 'Let me look.\n<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>', "Let me look.",
     [("find", '{"a": 1}')]),
    (parse_hermes, '<tool_call>{"arguments": {"a": {"b": 2}}, "name": "find"}</tool_call>', "",
     [("find", '{"a": {"b": 2}}')]),
    (parse_hermes, '<tool_call>{"name": "find"}</tool_call> Done.', " Done.", [("find", "{}")]),
    # No call after all: text, to the last character.
    (parse_hermes, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    (parse_hermes, '<tool_call>{"name": "find", "arguments": "a"}</tool_call>',
     '<tool_call>{"name": "find", "arguments": "a"}</tool_call>', []),
    (parse_hermes, '<tool_call>find(1)</tool_call>', "<tool_call>find(1)</tool_call>", []),
    (parse_hermes, '<tool_call>{"name": "fi', '<tool_call>{"name": "fi', []),
    (parse_hermes, "One < two <tool", "One < two <tool", []),
    (parse_hermes, "</tool_call>", "</tool_call>", []),
    # A call that the end cuts off is a call with as much of its arguments as came.
    (parse_hermes, '<tool_call>{"name": "find", "arguments": {"a": "b', "", [("find", '{"a": "b')]),
    (parse_hermes, '<tool_call>{"name": "find", "arguments": {}}</tool_', "", [("find", "{}")]),
    # What is wrong with one call does not touch the next.
    (parse_hermes, '<tool_call><tool_call>{"name": "find"}</tool_call>', "<tool_call>", [("find", "{}")]),
    (parse_hermes, '<tool_call>{"name": "find"}<tool_call></tool_call>', "<tool_call></tool_call>",
     [("find", "{}")]),
    (parse_hermes, '<tool_call>{"name": "find", "arguments": {}, !<tool_call>{"name": "add-2"}', ", !",
     [("find", "{}"), ("add-2", "{}")]),
    (parse_hermes, '<tool_call>{"name": "find", "arguments": {}}<tool_call>{"name": "add-2"}', "",
     [("find", "{}"), ("add-2", "{}")]),
    (parse_llama3, '{"name": "find", "parameters": {"a": "x;y"}}', "", [("find", '{"a": "x;y"}')]),
    (parse_llama3, '<|python_tag|>{"type": "function", "name": "find", "parameters": {}}', "", [("find", "{}")]),
    (parse_llama3, 'Look. <|python_tag|>{"name": "find", "parameters": {}}', "Look.", [("find", "{}")]),
    (parse_llama3, '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    (parse_llama3, 'Call {"name": "find", "parameters": {}}', 'Call {"name": "find", "parameters": {}}', []),
    (parse_llama3, '{"name": "find", "parameters": {}}; and more', "; and more", [("find", "{}")]),
    (parse_llama3, '{"name": "find", "parameters": {}}; {"name": "x"}', '; {"name": "x"}', [("find", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(
    "read, whole, content, made", CASES, ids=lambda value: getattr(value, "__name__", str(value))[:50]
)
def test_what_is_a_call_and_what_is_text(
    read: Read, whole: str, content: str, made: list[tuple[str, str]]
) -> None:
    segments = found(read(NAMES), whole)  # one character at a time
    assert (text(segments), calls(segments)) == (content, made)
    assert found(read(NAMES), [whole]) == segments


def test_arguments_come_while_they_are_written() -> None:
    driver = ParserDriver(parse_hermes(NAMES))
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
def test_what_is_thought_and_what_is_said(
    marks: Thoughts, is_open: bool, whole: str, thought: str, content: str
) -> None:
    """Between each family's marks, character by character."""
    opens, closes, label = marks.opens, marks.closes, marks.label

    def spelled(part: str) -> str:
        known = part.replace("<think>", opens + label).replace("</think>", closes)
        return known.replace("</thi", closes[:-3]).replace("<thi", opens[:-3])

    segments = found(parse_reasoning(marks, is_open=is_open), spelled(whole))
    assert (text(segments, "reasoning"), text(segments)) == (spelled(thought), spelled(content))
