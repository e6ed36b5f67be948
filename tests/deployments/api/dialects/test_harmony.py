"""gpt-oss' channels: outputs as OpenAI documents them, and what may be written where an answer is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deployments.api.constraints.answer_grammar import answer_grammar
from deployments.api.dialects.dialect import dialect_of
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.harmony import parse_channels
from deployments.api.dialects.reasoning import HARMONY as MARKS
from deployments.api.dialects.segments import ParserDriver, Segment, joined
from deployments.api.output.output_parser import OutputParseSpec
from deployments.config.settings import ChatSettings
from engine.text.tokenizer import load_tokenizer
from tests.deployments.api.dialects.conftest import TOOLS, WEATHER, Talk, takes
from tests.deployments.support.chat_templates import HARMONY
from tests.deployments.support.tokenizer_families import tokenizer_of
from tests.engine.support.grammar_models import DEMO

Make = Callable[..., Talk]
THOUGHT = "<|channel|>analysis<|message|>Rain? In Oslo.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
EMPTY = CALL.partition("{")[0]
LETTER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}}}  # fmt: skip


def test_the_template_identifies_the_format(talk: Make) -> None:
    tokenizer: Any = load_tokenizer(DEMO)
    tokenizer.chat_template = HARMONY
    for reasoning in ("auto", "none"):
        found = dialect_of(tokenizer, ChatSettings(reasoning=reasoning))
        assert found.thoughts is MARKS and found.tools == FORMATS["harmony"]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("says", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}It is.<|return|>", "Rain? In Oslo.", "It is.", []),
        (f"{THOUGHT}{NEXT}{FINAL}It is.", "Rain? In Oslo.", "It is.", []),
        (f"{FINAL}It is < 3 <|x|> {{}}.", "", "It is < 3 <|x|> {}.", []),
        ("It is.", "", "It is.", []),
        ("<|channel|>analysis<|message|>Rain?", "Rain?", "", []),
        ("<|channel|>analysis", "", "", []),
        (f"{THOUGHT}{NEXT}<|channel|>fin", "Rain? In Oslo.", "", []),
        (f"{THOUGHT}{NEXT}{CALL}<|call|>", "Rain? In Oslo.", "", ['{"city": "Oslo"}']),
        (f"{THOUGHT}{NEXT}{CALL}", "Rain? In Oslo.", "", ['{"city": "Oslo"}']),
        (f"{THOUGHT.removesuffix('<|end|>')}{NEXT}{CALL}<|call|>", "Rain? In Oslo.", "", ['{"city": "Oslo"}']),
        (f"{THOUGHT.removesuffix('<|end|>')}{CALL}<|call|>", "Rain? In Oslo.", "", ['{"city": "Oslo"}']),
        (f"{CALL}{NEXT}{FINAL}It is.", "", "It is.", ['{"city": "Oslo"}']),
        (f"<|start|>{'a' * 300}{NEXT}{FINAL}b", "", f"<|start|>{'a' * 300}\n\nb", []),
        (CALL, "", "", ['{"city": "Oslo"}']),
        (f"{THOUGHT}{NEXT}{EMPTY}", "Rain? In Oslo.", "", ["{}"]),
        (f"{EMPTY} <|call|>{NEXT}{EMPTY}", "", "", ["{}", "{}"]),
        (
            f"{THOUGHT}{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{{}}<|call|>",
            "Rain? In Oslo.", "", ["{}"],
        ),
        (" to=functions.get_weather<|channel|>commentary<|message|>{}", "", "", ["{}"]),
        (
            f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>**Plan**:\n1. Ask.<|end|>{NEXT}{CALL}<|call|>",
            "Rain? In Oslo.", "**Plan**:\n1. Ask.", ['{"city": "Oslo"}'],
        ),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}Yes.", "Rain? In Oslo.\n\nRain? In Oslo.", "Yes.", []),
        (f"<|channel|>commentary to=browser.search<|message|>{{}}<|call|>{NEXT}{FINAL}Yes.", "{}", "Yes.", []),
    ],
)  # fmt: skip
def test_channels_become_reasoning_content_and_calls(
    talk: Make, says: str, reasoning: str, content: str, calls: list[str], chunk: int
) -> None:
    it = talk(HARMONY)
    it.engine.says, it.engine.chunk = says, chunk
    for answer in (it.whole(tools=TOOLS), it.streamed(tools=TOOLS)):
        message = answer.choices[0].message
        made = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        assert made == [("get_weather", arguments) for arguments in calls]
        assert (getattr(message, "reasoning", None) or "", message.content or "") == (reasoning, content)
        assert (answer.choices[0].finish_reason == "tool_calls") is bool(calls)
    if not calls:
        assert it.whole().choices[0].message.content == content


@pytest.mark.parametrize(
    "said",
    [
        "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>7<|call|>",
        "<|channel|>commentary to=functions.get_weather and<|message|>{}<|call|>",
    ],
)
def test_output_that_is_no_call_stays_text(said: str) -> None:
    driver = ParserDriver(FORMATS["harmony"].parser({"get_weather": None}))
    assert joined([*driver.push(said), *driver.finish()]) == [Segment("text", said)]


def test_any_text_is_parsed_alike_wherever_it_is_cut() -> None:
    whole = f"to={THOUGHT}<|start|> to={NEXT}{CALL}<|call|>to=x\n{FINAL}a<|end|>{'b' * 300}"

    def found(chunks: list[str]) -> list[Segment]:
        driver = ParserDriver(parse_channels())
        return joined([*(part for chunk in chunks for part in driver.push(chunk)), *driver.finish()])

    for size in (1, 2, 7, 50):
        assert found([whole[at : at + size] for at in range(0, len(whole), size)]) == found([whole])


def test_where_an_answer_is_held_its_channels_are_free(talk: Make) -> None:
    it = talk(HARMONY)
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TOOLS[1]]
    wrong = CALL.replace("Oslo", "a name too long")
    plan, before = f"<|channel|>commentary<|message|>Asking.<|end|>{NEXT}", f"{THOUGHT}{NEXT}"
    number, text = '{"a": 7}', f"{FINAL}It rains."
    table: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"tools": TOOLS, "tool_choice": "required"}, [CALL, before + CALL, before + plan + CALL], [text, wrong]),
        (
            {"tools": strict},
            [CALL, before + CALL, before + text, text, before + plan + CALL],
            [wrong, before + wrong],
        ),
        ({"response_format": LETTER}, [before + FINAL + number, FINAL + number, number], [before + text, before]),
        ({"tools": TOOLS, "response_format": LETTER}, [before + CALL, FINAL + number], [text, before + wrong]),
    ]
    for options, right, not_right in table:
        it.whole(**options)
        grammar = it.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert [said for said in right if not takes(grammar, said)] == [], options
        assert [said for said in not_right if takes(grammar, said)] == [], options


def test_marks_that_are_special_tokens_are_referred_to_by_their_ids() -> None:
    tokenizer = tokenizer_of("harmony")
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<|channel|>", "<|message|>", "<|end|>")}
    grammar = answer_grammar({"type": "object"}, None, OutputParseSpec(MARKS), lambda text: ids.get(text))
    for known in ids.values():
        assert f"<[{known}]>" in grammar.source
    assert "<|channel|>" not in grammar.source and "<|message|>" not in grammar.source
