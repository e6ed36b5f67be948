"""Calls and reasoning are found in a text however it comes in pieces; what is neither stays text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.output.reasoning import read_thoughts
from deployments.api.tools.hermes import read_hermes
from deployments.api.tools.llama3 import read_llama3
from deployments.api.tools.segments import Piece, Reader, Reading, joined

NAMES = frozenset({"find", "add-2"})
Read = Callable[[Collection[str]], Reading[None]]
WRITES: dict[Read, tuple[str, str, str]] = {
    read_hermes: ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>\n"),
    read_llama3: ('{"name": ', ', "parameters": ', "}; "),
}


def found(reading: Reading[None], chunks: Iterable[str]) -> list[Piece]:
    reader = Reader(reading)
    pieces = [piece for chunk in chunks for piece in reader.push(chunk)]
    return joined(pieces + reader.finish())


def calls(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """(name, arguments) of all calls."""
    told: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            told.append((piece.text, ""))
        elif piece.kind == "arguments":
            told[-1] = (told[-1][0], told[-1][1] + piece.text)
    return told


def text(pieces: Iterable[Piece], kind: str = "text") -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


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
    pieces = found(read(NAMES), cut(whole, at))
    assert calls(pieces) == spelled
    assert text(pieces) == ""
    assert [piece.kind for piece in pieces] == ["call", "arguments", "end"] * len(made)


@pytest.mark.parametrize("read", WRITES)
@settings(max_examples=300)
@given(whole=scraps | st.text(), at=places)
def test_any_text_reads_the_same_in_pieces_and_nothing_is_lost(read: Read, whole: str, at: list[int]) -> None:
    pieces = found(read(NAMES), [whole])
    assert found(read(NAMES), cut(whole, at)) == pieces
    if not calls(pieces):
        assert text(pieces) == whole
    rest = whole
    for piece in pieces:  # all in its order, and between it marks, punctuation and names of calls
        if piece.kind in ("text", "arguments") and piece.text != "{}":
            _, met, rest = rest.partition(piece.text)
            assert met, (piece, rest)


@settings(max_examples=300)
@given(whole=scraps | st.text(), at=places, is_open=st.booleans())
def test_any_reasoning_reads_the_same_in_pieces(whole: str, at: list[int], is_open: bool) -> None:
    pieces = found(read_thoughts(is_open=is_open), [whole])
    assert found(read_thoughts(is_open=is_open), cut(whole, at)) == pieces
    thought = text(pieces, "reasoning")
    assert thought in whole and text(pieces) in whole
    if not is_open and not whole.lstrip().startswith("<think>"):
        assert text(pieces) == whole


CASES: list[tuple[Read, str, str, list[tuple[str, str]]]] = [
    (read_hermes, "Just text.", "Just text.", []),
    (read_hermes, 'Let me look.\n<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>', "Let me look.",
     [("find", '{"a": 1}')]),
    (read_hermes, '<tool_call>{"arguments": {"a": {"b": 2}}, "name": "find"}</tool_call>', "",
     [("find", '{"a": {"b": 2}}')]),
    (read_hermes, '<tool_call>{"name": "find"}</tool_call> Done.', " Done.", [("find", "{}")]),
    # No call after all: text, to the last character.
    (read_hermes, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    (read_hermes, '<tool_call>{"name": "find", "arguments": "a"}</tool_call>',
     '<tool_call>{"name": "find", "arguments": "a"}</tool_call>', []),
    (read_hermes, '<tool_call>find(1)</tool_call>', "<tool_call>find(1)</tool_call>", []),
    (read_hermes, '<tool_call>{"name": "fi', '<tool_call>{"name": "fi', []),
    (read_hermes, "One < two <tool", "One < two <tool", []),
    (read_hermes, "</tool_call>", "</tool_call>", []),
    # A call that the end cuts off is a call with as much of its arguments as came.
    (read_hermes, '<tool_call>{"name": "find", "arguments": {"a": "b', "", [("find", '{"a": "b')]),
    (read_hermes, '<tool_call>{"name": "find", "arguments": {}}</tool_', "", [("find", "{}")]),
    # What is wrong with one call does not touch the next.
    (read_hermes, '<tool_call><tool_call>{"name": "find"}</tool_call>', "<tool_call>", [("find", "{}")]),
    (read_hermes, '<tool_call>{"name": "find"}<tool_call></tool_call>', "<tool_call></tool_call>",
     [("find", "{}")]),
    (read_hermes, '<tool_call>{"name": "find", "arguments": {}, !<tool_call>{"name": "add-2"}', ", !",
     [("find", "{}"), ("add-2", "{}")]),
    (read_hermes, '<tool_call>{"name": "find", "arguments": {}}<tool_call>{"name": "add-2"}', "",
     [("find", "{}"), ("add-2", "{}")]),
    (read_llama3, '{"name": "find", "parameters": {"a": "x;y"}}', "", [("find", '{"a": "x;y"}')]),
    (read_llama3, '<|python_tag|>{"type": "function", "name": "find", "parameters": {}}', "", [("find", "{}")]),
    (read_llama3, 'Look. <|python_tag|>{"name": "find", "parameters": {}}', "Look.", [("find", "{}")]),
    (read_llama3, '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    (read_llama3, 'Call {"name": "find", "parameters": {}}', 'Call {"name": "find", "parameters": {}}', []),
    (read_llama3, '{"name": "find", "parameters": {}}; and more', "; and more", [("find", "{}")]),
    (read_llama3, '{"name": "find", "parameters": {}}; {"name": "x"}', '; {"name": "x"}', [("find", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(
    "read, whole, content, made", CASES, ids=lambda value: getattr(value, "__name__", str(value))[:50]
)
def test_what_is_a_call_and_what_is_text(
    read: Read, whole: str, content: str, made: list[tuple[str, str]]
) -> None:
    pieces = found(read(NAMES), whole)  # one character at a time
    assert (text(pieces), calls(pieces)) == (content, made)
    assert found(read(NAMES), [whole]) == pieces


def test_arguments_come_while_they_are_written() -> None:
    reader = Reader(read_hermes(NAMES))
    assert reader.push('Hm. <tool_call>{"name": "find", "argu') == [Piece("text", "Hm.")]
    assert reader.push('ments": {"a') == [Piece("call", "find"), Piece("arguments", '{"a')]
    assert reader.push('": [1,') == [Piece("arguments", '": [1,')]
    assert reader.push("2]}") == [Piece("arguments", "2]}")]
    assert reader.push("}") == [Piece("end")]
    assert reader.push("\n</tool_call>") == [] == reader.finish()


THOUGHTS = [
    (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (True, "\n</think>Yes.", "", "Yes."),
    (False, "No </think> <think>.", "", "No </think> <think>."),
    (False, "<think>a < b </thi", "a < b </thi", ""),
    (False, "<think>Hm.</think>So <think>", "Hm.", "So <think>"),
    (False, " <thi", "", " <thi"),
]


@pytest.mark.parametrize("is_open, whole, thought, content", THOUGHTS)
def test_what_is_thought_and_what_is_said(is_open: bool, whole: str, thought: str, content: str) -> None:
    pieces = found(read_thoughts(is_open=is_open), whole)
    assert (text(pieces, "reasoning"), text(pieces)) == (thought, content)
