"""Gemma 4's calls and channels: outputs as Google documents them, and what may be written where calls are held."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.segments import ParserDriver, Segment, joined
from tests.deployments.api.dialects.conftest import TOOLS, Talk, takes, tool
from tests.deployments.support.chat_templates import GEMMA

Make = Callable[..., Talk]
Q = '<|"|>'
OSLO = f"<|tool_call>call:get_weather{{city:{Q}Oslo{Q}}}<tool_call|>"
UTC = f"<|tool_call>call:clock{{zone:{Q}utc{Q}}}<tool_call|>"
THOUGHT = "<|channel>thought\nRain? In Oslo.\n<channel|>"
FIND = {"find": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}


def found(said: str) -> list[Segment]:
    """What is found in a text that comes one character at a time, which is what is found in it as a whole."""
    drivers = [ParserDriver(FORMATS["gemma4"].parser(FIND)) for _ in range(2)]
    one_by_one = joined([*(part for char in said for part in drivers[0].push(char)), *drivers[0].finish()])
    assert one_by_one == joined([*drivers[1].push(said), *drivers[1].finish()])
    return one_by_one


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("says", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{OSLO}", "Rain? In Oslo.", "", ["get_weather"]),
        (f"{THOUGHT}Let me see.\n{OSLO}{UTC}", "Rain? In Oslo.", "Let me see.", ["get_weather", "clock"]),
        (f"{THOUGHT}It is.", "Rain? In Oslo.", "It is.", []),
        (f"<|channel>thought\n<channel|>{OSLO}", "", "", ["get_weather"]),
        (f"{OSLO}It is.", "", "It is.", ["get_weather"]),
        ("<|channel>thought\nThoughtful, as a thought", "Thoughtful, as a thought", "", []),
        (f"{THOUGHT}<|tool_call>call:other{{}}<tool_call|>", "Rain? In Oslo.",
         "<|tool_call>call:other{}<tool_call|>", []),
    ],
)  # fmt: skip
def test_channels_and_calls(
    talk: Make, says: str, reasoning: str, content: str, calls: list[str], chunk: int
) -> None:
    it = talk(GEMMA)
    it.engine.says, it.engine.chunk = says, chunk
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        assert [call.function.name for call in message.tool_calls or []] == calls
        assert (getattr(message, "reasoning", None) or "", message.content or "") == (reasoning, content)
        assert (answer.choices[0].finish_reason == "tool_calls") is bool(calls)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", "{}"),
        (f'text:{Q}it\'s "so", {{}} [] a:b\n{Q}', '{"text": "it\'s \\"so\\", {} [] a:b\\n"}'),
        ("count:3,other:-1.5e3", '{"count": 3, "other": -1.5e3}'),
        ("a:true,b:False,c:null,d:None", '{"a": true, "b": false, "c": null, "d": null}'),
        (f"a:{{b:[{Q}x{Q},{{c:[]}}],d:{{}}}}", '{"a": {"b": ["x", {"c": []}], "d": {}}}'),
        (f" text : {Q}x{Q} , count : 3 ", '{"text": "x", "count": 3}'),
        (f"Basic Chain:1,{Q}a:b{Q}:2", '{"Basic Chain": 1, "a:b": 2}'),
        ('"text":"a\\n","count":3', '{"text": "a\\n", "count": 3}'),
        ("text:12345,count:many,other:two words", '{"text": "12345", "count": "many", "other": "two words"}'),
        (f"a:{{{Q}<<|{Q}:1}},text:{Q}<<tool_call|><{Q}", '{"a": {"<<|": 1}, "text": "<<tool_call|><"}'),
        (f"text:{Q}<|<|{Q}", '{"text": "<|<|"}'),
    ],
)
def test_arguments_become_json(inside: str, arguments: str) -> None:
    for said in (f"<|tool_call>call:find{{{inside}}}<tool_call|>", f"<|tool_call>call:find{{{inside}}}"):
        made = [Segment("call", "find"), Segment("arguments", arguments), Segment("end")]
        assert found(said) == made
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("inside", "arguments", "rest"),
    [
        ("te", '{"te', ""),
        (f"count:3,{Q}te", '{"count": 3, "te', ""),
        ('a:{"te', '{"a": {"te', ""),
        ("text:", '{"text": ', ""),
        ('text:"Os', '{"text": "Os', ""),
        ("text:Os", '{"text": "Os', ""),
        ("a:[tr", '{"a": ["tr', ""),
        (f"text:{Q}Os<tool_call|> So {Q}a{Q}.", '{"text": "Os', f" So {Q}a{Q}."),
        (f"text:{Q}Os", '{"text": "Os', ""),
        (f"text:{Q}Os<|", '{"text": "Os<|', ""),
        ("count:3", '{"count": 3', ""),
        ("a:{b:[1,", '{"a": {"b": [1', ""),
        (f"text:{Q}a{Q} count:3}} So.", '{"text": "a"', " count:3} So."),
        ("a:}<tool_call|>", '{"a": ', "}"),
        ("a:1]", '{"a": 1', "]"),
        ("\n:1}", "{", "\n:1}"),
    ],
)
def test_a_call_that_breaks_off_has_the_arguments_before_it(inside: str, arguments: str, rest: str) -> None:
    made = found(f"<|tool_call>call:find{{{inside}")
    assert [segment.kind for segment in made] == ["call", "arguments"] + (["text"] if rest else [])
    assert made[1].text.rstrip() == arguments.rstrip() and "".join(part.text for part in made[2:]) == rest


@pytest.mark.parametrize(
    "said",
    [
        "<|tool_call>call:other{a:1}<tool_call|>",
        "<|tool_call>find{a:1}<tool_call|>",
        "<|tool_call>call:find(a=1)<tool_call|>",
        "<|tool_call>call:find",
        "call:find{a:1}",
    ],
)
def test_output_that_is_no_call_stays_text(said: str) -> None:
    assert found(said) == [Segment("text", said)]


def test_arguments_come_while_they_are_written() -> None:
    driver = ParserDriver(FORMATS["gemma4"].parser(FIND))
    assert driver.push("Hm. <|tool_call>call:find") == [Segment("text", "Hm.")]
    assert driver.push("{text") == [Segment("call", "find"), Segment("arguments", "{")]
    assert driver.push(f":{Q}Os") == [Segment("arguments", '"text": "Os')]
    assert driver.push("lo<") == [Segment("arguments", "lo")]
    assert driver.push('|"|>,count:3') == [Segment("arguments", '", "count": ')]
    assert driver.push("}") == [Segment("arguments", "3}"), Segment("end")]
    assert driver.push("<tool_call|>") == [] == driver.finish()


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), min_size=1)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | words
    | st.sampled_from(["{}", ",", "]", "\n", "\\"]),
    lambda one: (
        st.lists(one, max_size=3) | st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9_]{0,5}\Z"), one, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"\A[a-z_]{1,8}\Z"), values, max_size=4))
def test_transformers_reads_the_same_in_the_calls_that_we_write(arguments: dict[str, Any]) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    said = FORMATS["gemma4"].spell("find", json.dumps(arguments))
    template = {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [[Q, Q]]},
                "transform": {"name": "{name}", "arguments": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    (theirs,) = chat_parsing.parse_response(said, template, prefix="")["tool_calls"]
    made = found(said)
    assert made[0].text == theirs["name"] and json.loads(made[1].text) == theirs["arguments"] == arguments


SCHEMAS: dict[str, Any] = {
    "tags": {"type": "array", "items": {"enum": ["a", "b:", 3, None]}, "minItems": 1, "maxItems": 2},
    "by": {"type": "object", "properties": {"unit": {"type": "string"}, "top": {"type": "integer", "minimum": 1}},
           "required": ["unit"]},
    "maybe": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    "free": {},
    "either": {"oneOf": [{"type": "boolean"}, {"const": "x"}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("tags", [f"[{Q}a{Q}]", f"[{Q}b:{Q},3]", "[null]"], ["[]", "[4]", "[3,3,3]", f"{Q}a{Q}"]),
        ("by", [f"{{unit:{Q}h{Q}}}", f"{{unit:{Q}{Q},top:7}}"], ["{}", "{top:7}", f"{{unit:{Q}h{Q},top:0}}"]),
        ("maybe", [f"{Q}ab{Q}", f"{Q}{Q}", "null"], [f"{Q}abc{Q}", "ab", "3"]),
        ("free", ["1", "true", "[]", f"{{a b:[{{}},{Q}x{Q}],{Q}:{Q}:null}}"], ["x", "{a}", f"{Q}x"]),
        ("either", ["true", f"{Q}x{Q}"], ["x", "null"]),
    ],
)
def test_calls_are_held_to_schemas_in_their_own_syntax(
    talk: Make, key: str, right: list[str], wrong: list[str]
) -> None:
    it = talk(GEMMA, reasoning="none")
    it.whole(tools=[tool("f", **{key: SCHEMAS[key]})], tool_choice="required")
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None

    def call(value: str) -> str:
        return f"<|tool_call>call:f{{{key}:{value}}}<tool_call|>"

    assert [value for value in right if not takes(grammar, call(value))] == []
    assert [value for value in wrong if takes(grammar, call(value))] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "(^a|^b)c$"}, "pattern"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "string"}]}, "allOf"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "oneOf"),
        ({"enum": [f"a{Q}"]}, "cannot be written"),
        ({"$ref": "#/$defs/none"}, "$defs"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(talk: Make, schema: dict[str, Any], named: str) -> None:
    error = talk(GEMMA).refused(tools=[tool("f", a=schema)], tool_choice="required")
    assert named in error["message"] and error["param"].startswith("tools")


def test_reasoning_comes_before_a_call_that_is_required(talk: Make) -> None:
    it = talk(GEMMA)
    it.whole(tools=TOOLS, tool_choice="required")
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert takes(grammar, THOUGHT + OSLO) and takes(grammar, OSLO) and takes(grammar, OSLO + UTC)
    assert not takes(grammar, f"{THOUGHT}It is.") and not takes(grammar, THOUGHT)
