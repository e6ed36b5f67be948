"""Formats that are no JSON in marks: found in templates, parsed however a text is cut, and rendered back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deployments.api.dialects.dialect import dialect_of
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.headed import DEEPSEEK_V31
from deployments.api.dialects.segments import ParserDriver, Segment, joined
from deployments.config.settings import ChatSettings
from engine.text.tokenizer import load_tokenizer
from tests.deployments.api.dialects.conftest import ASK, TOOLS, Talk, takes, tool
from tests.deployments.support.chat_templates import FAMILIES as TEMPLATES
from tests.deployments.support.tool_answers import SCHEMAS
from tests.engine.support.grammar_models import DEMO

Make = Callable[..., Talk]


def deepseek(text: str) -> str:
    """Return a text with DeepSeek's marks in place of those in square brackets."""
    for short, mark in zip(
        ("calls begin", "call begin", "sep", "call end", "calls end"), DEEPSEEK_V31.all, strict=True
    ):
        text = text.replace(f"<[{short}]>", mark)
    return text


def found(name: str, chunks: Sequence[str]) -> list[Segment]:
    driver = ParserDriver(FORMATS[name].parser(SCHEMAS))
    segments = [segment for chunk in chunks for segment in driver.push(chunk)]
    return joined(segments + driver.finish())


def calls(segments: Sequence[Segment]) -> list[tuple[str, Any]]:
    """Return the complete calls, with arguments that must be JSON."""
    made: list[tuple[str, str]] = []
    complete: list[tuple[str, Any]] = []
    for segment in segments:
        if segment.kind == "call":
            made.append((segment.text, ""))
        elif segment.kind == "arguments":
            made[-1] = (made[-1][0], made[-1][1] + segment.text)
        elif segment.kind == "end":
            complete.append((made[-1][0], json.loads(made[-1][1])))
    return complete


def text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments if segment.kind == "text")


@pytest.mark.parametrize(
    ("name", "said", "made"),
    [
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n\nb\n</parameter></function>", {"text": "a\n\nb"}),
        ("qwen3_coder", "<tool_call><function=find><parameter=count>3</parameter></function>", {"count": 3}),
        ("qwen3_coder", "<function=find>\n<parameter=is_it>\nTrue\n</parameter>\n</function>", {"is_it": True}),
        ("qwen3_coder", "<function=find>\n<parameter=maybe>\nnull\n</parameter></function>", {"maybe": None}),
        ("qwen3_coder", "<function=find>\n<parameter=other>\nfree\n</parameter></function>", {"other": "free"}),
        ("seed_oss", "<seed:tool_call>\n<function=find>\n<parameter=text>a\nb</parameter>\n</function>\n"
         "</seed:tool_call>", {"text": "a\nb"}),
        ("seed_oss", "<function=find><parameter=count>3</parameter></function>", {"count": 3}),
        ("minimax", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">7</parameter>\n</invoke>\n'
         "</minimax:tool_call>", {"text": "7"}),
        ("minimax", '<invoke name="find"><parameter name="tags">["a"]</parameter></invoke>', {"tags": ["a"]}),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a\n\nb</arg_value>\n</tool_call>",
         {"text": "a\n\nb"}),
        ("glm", "\n<tool_call>\nfind<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>\n", {"count": 3}),
        ("glm47", "<tool_call>find<arg_key>tree</arg_key><arg_value>{}</arg_value></tool_call>", {"tree": {}}),
        ("glm47", "<tool_call>find</tool_call>", {}),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
         '{"count": 3}<|tool_call_end|><|tool_calls_section_end|>', {"count": 3}),
        ("kimi", '<|tool_call_begin|> find <|tool_call_argument_begin|> {"count": 3} <|tool_call_end|>',
         {"count": 3}),
        ("deepseek_v3", deepseek("<[calls begin]><[call begin]>function<[sep]>find\n```json\n"
         '{"count": 3}\n```<[call end]><[calls end]>'), {"count": 3}),
        ("deepseek_v31", deepseek('<[calls begin]><[call begin]>find<[sep]>{"count": 3}<[call end]><[calls end]>'),
         {"count": 3}),
        ("deepseek_v31", deepseek('<[call begin]>find<[sep]>{"count": 3}'), {"count": 3}),
        ("granite", '<|tool_call|> [{"name": "find", "arguments": {"count": 3}}]', {"count": 3}),
        ("phi4", 'functools[{"name": "find", "arguments": {"count": 3}}]', {"count": 3}),
        ("phi4", '<|tool_call|>[{"name": "find", "arguments": {"count": 3}}]<|/tool_call|>', {"count": 3}),
        ("mistral", '[TOOL_CALLS]find{"count": 3}', {"count": 3}),
        ("mistral_list", '[TOOL_CALLS][{"name": "find", "arguments": {"count": 3}}', {"count": 3}),
        ("mistral", '[TOOL_CALLS]find[CALL_ID]ab1[ARGS]{"count": 3}', {"count": 3}),
        ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"count": 3}, "id": "a"}]', {"count": 3}),
        ("mistral_list", '[TOOL_CALLS]find{"count": 3}', {"count": 3}),
        ("pythonic", "[find(text='it\\'s', tags=('a', \"b\",), )]", {"text": "it's", "tags": ["a", "b"]}),
        ("pythonic", "<|python_start|>[find(is_it=True, maybe=None)]", {"is_it": True, "maybe": None}),
        ("pythonic", "[find(count=1)]<|python_end|>", {"count": 1}),
        ("pythonic", "[find(count=-3, tree={'a': 1.5e3})]", {"count": -3, "tree": {"a": 1500.0}}),
        ("pythonic", "[find(text=\"\\ud83c\\udf0d\", is_it=true)]", {"text": "🌍", "is_it": True}),
        # A value without its closing mark ends with the next key, or with the call.
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=text>\nRom\n<parameter=count>\n3\n</parameter>\n"
         "</function>\n</tool_call>", {"text": "Rom", "count": 3}),
        ("qwen3_coder", "<function=find>\n<parameter=count>\n3\n<parameter=text>\nRom\n</function>\n</tool_call>",
         {"count": 3, "text": "Rom"}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\nRom\n</function>", {"text": "Rom"}),
        ("qwen3_coder", "<tool_call><function=find>\n<parameter=text>\nRom\n</tool_call>", {"text": "Rom"}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\nRom\n<parameter=more>\n[3]\n</function>",
         {"text": "Rom", "more": [3]}),
        ("qwen3_coder", '<function=find><parameter=tree>\n{"a": "</parameter>"}\n<parameter=text>\nb\n</function>',
         {"tree": {"a": "</parameter>"}, "text": "b"}),
        ("qwen3_coder", '<function=find>\n<parameter=tree>\n{"a": 1\n</function>', {"tree": {"a": 1}}),
        ("qwen3_coder", '<function=find>\n<parameter=tree>\n{"a\n</parameter>\n</function>', {"tree": '{"a'}),
        ("seed_oss", "<seed:tool_call>\n<function=find>\n<parameter=text>Rom\n<parameter=count>3\n</function>\n"
         "</seed:tool_call>", {"text": "Rom", "count": 3}),
        ("minimax", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">Rom\n'
         '<parameter name="count">3\n</invoke>\n</minimax:tool_call>', {"text": "Rom", "count": 3}),
        ("minimax", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">Rom</minimax:tool_call>',
         {"text": "Rom"}),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>Rom\n<arg_key>count</arg_key>\n<arg_value>3"
         "\n</tool_call>", {"text": "Rom", "count": 3}),
        ("glm47", "<tool_call>find<arg_key>text</arg_key><arg_value>Rom<arg_key>count</arg_key><arg_value>3"
         "</tool_call>", {"text": "Rom", "count": 3}),
        # But a mark is part of a value that is closed before any other.
        ("qwen3_coder", "<function=find>\n<parameter=text>\nUse </function> and\n</parameter>\n</function>",
         {"text": "Use </function> and"}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\nUse <parameter=a> and\n</parameter>\n</function>",
         {"text": "Use <parameter=a> and"}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n<parameter=text>\n</parameter>\n</function>",
         {"text": "a\n<parameter=text>"}),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a </tool_call> b</arg_value>\n</tool_call>",
         {"text": "a </tool_call> b"}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\nUse <tool_call> and </tool_call>.\n</parameter>\n"
         "</function>", {"text": "Use <tool_call> and </tool_call>."}),
        ("qwen3_coder", "<function=find>\n<parameter=text>\n</function>\n</parameter>\n</function>",
         {"text": "</function>"}),
        # So is its own, if a text comes after it, and then the same mark before any other.
        ("qwen3_coder", "<function=find>\n<parameter=text>\nUse </parameter> and </parameter>!\n</parameter>\n"
         "<parameter=count>\n3\n</parameter>\n</function>",
         {"text": "Use </parameter> and </parameter>!", "count": 3}),
        ("seed_oss", "<function=find><parameter=text></parameter>a</parameter></function>",
         {"text": "</parameter>a"}),
        ("minimax", '<invoke name="find"><parameter name="other">a </parameter> b</parameter></invoke>',
         {"other": "a </parameter> b"}),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key><arg_value></arg_value>: a mark</arg_value></tool_call>",
         {"text": "</arg_value>: a mark"}),
        # A mark that comes twice counts once, and so does a key with the same value.
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n</parameter>\n</parameter>\n</function>",
         {"text": "a"}),
        ("qwen3_coder", "<function=find><parameter=text>a</parameter><parameter=text>a</parameter></function>",
         {"text": "a"}),
        ("pythonic", "[find(count=3, count=3)]", {"count": 3}),
        # A call is complete without its last bracket, or its last mark.
        ("granite", '<|tool_call|>[{"name": "find", "arguments": {"count": 3}]', {"count": 3}),
        ("granite", '<|tool_call|>[{"name": "find", "arguments": {"count": 3}', {"count": 3}),
        ("phi4", '<|tool_call|>[{"name": "find", "arguments": {"count": 3}<|/tool_call|>', {"count": 3}),
        ("phi4", '<|tool_call|>[{"name": "find", "parameters": {"count": 3}}<|/tool_call|>', {"count": 3}),
        ("mistral_list", '[TOOL_CALLS][{"name": "find", "parameters": {"count": 3}]', {"count": 3}),
        ("kimi", '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"count": 3<|tool_call_end|>',
         {"count": 3}),
        ("deepseek_v3", deepseek("<[calls begin]><[call begin]>function<[sep]>find\n```json\n"
         '{"count": 3\n```<[call end]><[calls end]>'), {"count": 3}),
        ("deepseek_v31", deepseek('<[calls begin]><[call begin]>find<[sep]>{"tags": ["a"<[calls end]>'),
         {"tags": ["a"]}),
        ("harmony", '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"count": 3<|call|>',
         {"count": 3}),
        ("gemma4", "<|tool_call>call:find{count:3<tool_call|>", {"count": 3}),
        ("gemma4", '<|tool_call>call:find{tree:{a:[1,<|"|>b<|"|><tool_call|>', {"tree": {"a": [1, "b"]}}),
        ("pythonic", "[find(count=3)", {"count": 3}),
        ("pythonic", "<|python_start|>[find(count=3<|python_end|>", {"count": 3}),
        ("olmo3", "<function_calls>find(count=3\n</function_calls>", {"count": 3}),
        ("olmo3", "<function_calls>find(count=3)", {"count": 3}),
        # No arguments, which the next mark tells.
        ("kimi", "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|><|tool_call_end|>", {}),
        ("deepseek_v3", deepseek("<[call begin]>function<[sep]>find\n```json\n```<[call end]>"), {}),
        ("deepseek_v31", deepseek("<[calls begin]><[call begin]>find<[sep]><[call end]><[calls end]>"), {}),
        ("harmony", "<|channel|>commentary to=functions.find <|constrain|>json<|message|> <|call|>", {}),
        # Line breaks in texts of JSON, where it has only escapes.
        ("hermes", '<tool_call>{"name": "find", "arguments": {"text": "a\n\tb"}}</tool_call>', {"text": "a\n\tb"}),
        ("hermes", '<tool_call>{"arguments": {"text": "a\r\nb"}, "name": "find"}', {"text": "a\r\nb"}),
        ("kimi", '<|tool_call_begin|>find<|tool_call_argument_begin|>{\n"text": "a\nb"}<|tool_call_end|>',
         {"text": "a\nb"}),
        ("mistral", '[TOOL_CALLS]find{"text": "\n"}', {"text": "\n"}),
        ("qwen3_coder", '<function=find>\n<parameter=tree>\n{"a":\n"b\nc"}\n</parameter>\n</function>',
         {"tree": {"a": "b\nc"}}),
        # Too many closing marks, and a comma too many.
        ("hermes", '<tool_call>{"name": "find"}</tool_call>\n</tool_call></tool_call>', {}),
        ("qwen3_coder", "<function=find>\n</function>\n</function>\n</tool_call>\n</function>", {}),
        ("granite", '<|tool_call|>[{"name": "find", "arguments": {"count": 3}}, ]', {"count": 3}),
        ("pythonic", "[find(count=3), ]", {"count": 3}),
    ],
)  # fmt: skip
def test_the_ways_in_which_models_write_are_read(name: str, said: str, made: dict[str, Any]) -> None:
    segments = found(name, list(said))
    assert calls(segments) == [("find", made)] and text(segments) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call>\n<function=other>\n</function>\n</seed:tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="other">\n</invoke>\n</minimax:tool_call>'),
        ("minimax", "<minimax:tool_call>\nHm.\n</minimax:tool_call>"),
        ("glm", "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("glm", "<tool_call>find it</tool_call>"),
        ("glm", "<tool_call>find"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi", '<|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
        ("kimi", "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>7"),
        ("deepseek_v3", deepseek('<[calls begin]><[call begin]>function<[sep]>find\n{"count": 3}')),
        ("deepseek_v31", deepseek('<[calls begin]><[call begin]>other<[sep]>{"count": 3}')),
        ("granite", "<|tool_call|>[]"),
        ("phi4", "functools are a module; functools[0] is not."),
        ("mistral", '[TOOL_CALLS]other{"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "other", "arguments": {}}]'),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", '[find("positional")]'),
        ("pythonic", "[find(a=__import__('os'))]"),
        ("pythonic", "[find(count=1+2)]"),
        ("pythonic", "[find(count=1 2)]"),
        ("pythonic", "[find(tags=[1 2])]"),
        ("olmo3", "<function_calls>find(count=1+2)</function_calls>"),
        ("pythonic", "See [find(count=1)]"),
    ],
)
def test_output_that_is_no_call_stays_text(name: str, said: str) -> None:
    assert found(name, list(said)) == [Segment("text", said)]


@pytest.mark.parametrize(
    ("name", "said", "arguments", "rest"),
    [
        # The first value of a key stays, because it has been sent when the second comes.
        ("qwen3_coder", "<function=find><parameter=text>a</parameter><parameter=text>b</parameter></function>",
         '{"text": "a"}', "b"),
        ("glm47", "<tool_call>find<arg_key>tree</arg_key><arg_value>{}</arg_value><arg_key>tree</arg_key>"
         '<arg_value>{"a": 1}</arg_value><arg_key>text</arg_key><arg_value>c</arg_value></tool_call>',
         '{"tree": {}, "text": "c"}', '{"a": 1}'),
        ("pythonic", "[find(text='a', count=1, text='b')]", '{"text": "a", "count": 1}', '"b"'),
        ("olmo3", "<function_calls>find(count=1, count=2)</function_calls>", '{"count": 1}', "2"),
        # What stands between arguments is text after the call.
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n</parameter> so\n<parameter=\n <parameter=count>\n3"
         "\n</parameter> on</function>", '{"text": "a", "count": 3}', "so\n<parameter=\non"),
        # A call that the end, or a mark, cuts off has what came of it.
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n</parameter>\n<parameter=cou",
         '{"text": "a", "cou', ""),
        ("minimax", '<invoke name="find"><parameter name="te', '{"te', ""),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_va", '{"text', ""),
        ("qwen3_coder", "<function=find>\n<parameter=text>\na\n</parameter> so", '{"text": "a"', " so"),
        ("pythonic", "[find(count=3, te", '{"count": 3, "te', ""),
        ("pythonic", "[find(count=3, text='a\\'b", '{"count": 3, "text": "a\'b', ""),
        ("pythonic", "[find(text=", '{"text": ', ""),
        ("pythonic", "[find(text='a\\u00", '{"text": "a', ""),
        ("pythonic", "[find(tree={'a': [1, Tr", '{"tree": {"a":[1,tr', ""),
        ("pythonic", "[find(count=1, count=2, count=-", '{"count": 1', "2"),
        ("olmo3", "<function_calls>find(text='a</function_calls> It's", '{"text": "a', " It's"),
        ("kimi", "<|tool_call_begin|>find<|tool_call_argument_begin|>", "", ""),
        ("kimi", '<|tool_call_begin|>find<|tool_call_argument_begin|>{"text": "a<|tool_call_end|>So',
         '{"text": "a', "So"),
    ],
)  # fmt: skip
def test_text_that_arguments_have_no_place_for_is_no_part_of_them(
    name: str, said: str, arguments: str, rest: str
) -> None:
    for segments in (found(name, [said]), found(name, list(said))):
        made = [segment.text for segment in segments if segment.kind == "arguments"]
        assert ("".join(made), text(segments)) == (arguments, rest)


@pytest.fixture(scope="module")
def own_tokenizer() -> Any:
    """The embedded model's, which gets a template from each test."""
    return load_tokenizer(DEMO)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_read_from_the_template(own_tokenizer: Any, name: str) -> None:
    own_tokenizer.chat_template = TEMPLATES[name]
    found = dialect_of(own_tokenizer, ChatSettings())
    assert found.tools == FORMATS[name] and found.has_place_for_tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_with_calls_is_taken_back_and_shown_as_the_model_wrote_it(talk: Make, name: str) -> None:
    it = talk(TEMPLATES[name], reasoning="none")
    said = FORMATS[name].spell_all([("get_weather", '{"city": "Oslo"}'), ("clock", '{"zone": "utc"}')])
    it.engine.says = said
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert made == [("get_weather", {"city": "Oslo"}), ("clock", {"zone": "utc"})]
        assert answer.choices[0].finish_reason == "tool_calls" and not message.content
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
        it.whole(tools=TOOLS, messages=[*ASK["messages"], message, *results])
        assert "Oslo" in it.prompt() and "utc" in it.prompt() and "7" in it.prompt()
        if name in ("qwen3_coder", "mistral"):
            assert said.replace("</tool_call>\n<tool_call>", "</tool_call><tool_call>") in it.prompt()


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_a_schema_that_cannot_be_enforced_is_refused(talk: Make, name: str) -> None:
    bound = tool("f", a={"type": "string"})
    bound["function"]["parameters"]["minProperties"] = 1
    error = talk(TEMPLATES[name]).refused(tools=[bound], tool_choice="required")
    assert "minProperties" in error["message"] and error["param"].startswith("tools")
    named = tool("f", **{"a b>": {"type": "string"}})
    error = talk(TEMPLATES[name]).refused(tools=[named], tool_choice="required")
    assert "a b>" in error["message"]


def test_optional_arguments_may_be_left_out(talk: Make) -> None:
    optional = tool("f", a={"type": "integer"}, b={"enum": ["x", "y"]})
    optional["function"]["parameters"]["required"] = ["b"]
    for name in ("qwen3_coder", "pythonic"):
        it = talk(TEMPLATES[name], reasoning="none")
        it.whole(tools=[optional], tool_choice="required")
        grammar = it.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert takes(grammar, FORMATS[name].spell_all([("f", '{"b": "x"}')]))
        assert takes(grammar, FORMATS[name].spell_all([("f", '{"a": 1, "b": "y"}')]))
        assert not takes(grammar, FORMATS[name].spell_all([("f", '{"a": 1}')]))
