"""Answers of models in every format of calls: what they say, and what is to be found in it.

thought      closed, with drafts of calls; unclosed before a call; or none
text calls   in turns; calls spelled as their format has it, or as models write it; closed, unclosed, or late
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from deployments.api.base import exact_json
from deployments.api.dialects import gemma, harmony, headed, keyed
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.reasoning import HARMONY, KNOWN, Thoughts
from deployments.api.output.output_parser import OutputParser, OutputParseSpec
from engine.text.detokenizer import TextStream

SCHEMAS: dict[str, dict[str, Any] | None] = {
    "find": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "größe": {"type": "number"},
            "is_it": {"type": "boolean"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/tree"},
        },
        "$defs": {"tag": {"type": "string"}, "tree": {"type": "object"}},
    },
    "clock": None,
    "get-it_2": None,
}
OTHER_MEMBERS = ('"id": "call_1"', '"type": "function"', '"index": 0', '"unknown": null')
"""Members of a call that have no place in an answer."""
NUMBERS = ("9007199254740993", "0.10000000000000000001", "42.0", "1e400", "-0", "1E5", "-0.0", "2.50", "7" * 400)
"""Numbers that floats, or integers, would write in another way."""
ENDINGS: dict[str, tuple[str, ...]] = {
    "hermes": ("</tool_call>", "}"),
    "llama3": ("}",),
    "granite": ("]", "}"),
    "phi4": ("]", "}"),
    "mistral_list": ("]", "}"),
    "pythonic": ("]",),
    "olmo3": ("</function_calls>",),
    "gemma4": (gemma.CLOSE,),
    "seed_oss": (keyed.SEED.closes,),
    "qwen3_coder": (keyed.QWEN3_CODER.closes,),
    "minimax": (keyed.MINIMAX.closes,),
    "kimi": (headed.KIMI.closes, *reversed(headed.KIMI.ends)),
    "deepseek_v3": (headed.DEEPSEEK_V3.closes, *reversed(headed.DEEPSEEK_V3.ends)),
    "deepseek_v31": (headed.DEEPSEEK_V31.closes, *reversed(headed.DEEPSEEK_V31.ends)),
}
"""What an answer with calls ends with and may lack, from the last on."""
OBJECTS = ("hermes", "llama3", "granite", "phi4", "mistral_list")
"""Formats in which a whole call is an object of JSON."""
VALUE_ENDS = {
    "seed_oss": keyed.SEED.ends_value,
    "qwen3_coder": keyed.QWEN3_CODER.ends_value,
    "minimax": keyed.MINIMAX.ends_value,
    "glm": keyed.GLM.ends_value,
    "glm47": keyed.GLM_47.ends_value,
}
"""Marks that end values, which may lack them."""
PYTHONIC = ("pythonic", "olmo3")
MARKS = sorted(
    {mark for form in FORMATS.values() for mark in (*form.marks, form.begins) if mark}
    | {mark for thoughts in KNOWN for mark in thoughts.marks}
)
_SCRAPS = [
    *MARKS, *SCHEMAS, ">", '">', "\n", " ", "[", "]", "{", "}", "(", ")", ",", ";", ":", "'", '"', "\\",
    '{"name": "find"', ', "arguments": {', ', "parameters": {"a": 1}', '"arguments": "no"', '{"a": 1}', "a=",
    "text", "count", "1", "1e400", "-", "True", "hm ", "f", "H", "é", "e\u0301", "🌍", ":0", "functions.", "call:",
    "function", "json", "to=", "<", "</", "```",
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What is found in an answer. White space is left out of reasoning and content: it may be dropped at marks."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    """Names, and arguments as JSON."""
    is_call: bool = False
    """Whether there are calls, and all are complete."""


class Answer(NamedTuple):
    """What a model of a format says, with which marks of reasoning, and what is to be found in it."""

    format: str
    thoughts: Thoughts | None
    is_open: bool
    said: str
    expected: Found


class Call(NamedTuple):
    """A call in an answer."""

    name: str
    arguments: str
    """As JSON."""
    aside: str = ""
    """What its arguments have no place for, which becomes text."""
    spelled: str = ""
    """That, as the format has it."""


class _Pieces:
    """A decoder whose tokens are pieces of a text."""

    has_begun, is_open = True, False

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def shown(self, token_ids: Iterable[int]) -> Iterator[int]:
        """Implement `TokenDecoder`."""
        return iter(token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Implement `TokenDecoder`."""
        return "".join(self._pieces[token] for token in token_ids)

    def rest(self) -> str:
        """Implement `TokenDecoder`."""
        return ""


def find(answer: Answer, pieces: Sequence[str]) -> Found:
    """Return what is found in an answer that comes in pieces."""
    spec = OutputParseSpec(answer.thoughts, answer.is_open, FORMATS[answer.format], SCHEMAS)
    parser = OutputParser(TextStream(_Pieces(pieces)), spec)
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for token in range(len(pieces) + 1):
        is_last = token == len(pieces)
        parsed = parser.push([] if is_last else [token], is_last=is_last)
        content, reasoning = content + parsed.text, reasoning + parsed.reasoning
        for call in parsed.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return Found(squeezed(reasoning), squeezed(content), calls, parser.is_call)


def squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def cut(whole: str, places: Sequence[int]) -> list[str]:
    """Return a text in pieces."""
    ends = sorted({place % (len(whole) + 1) for place in places} | {0, len(whole)})
    return [whole[start:end] for start, end in pairwise(ends)]


places = st.lists(st.integers(0, 10_000), max_size=12)
scraps = st.lists(st.sampled_from(_SCRAPS), max_size=16).map("".join)
words = st.text("abHf ,.1<{[\"'\n\u0301é🌍", max_size=8)
"""Text without marks."""
_last_words = words.map(lambda text: f"{text}.")
"""Text that no mark can begin with: at the end, the beginning of one after a call is dropped."""
_characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_nasty = st.tuples(words, st.sampled_from(["", *MARKS, "}", "]", ")", "\\", ", a=", ":"]), words).map("".join)
_texts = _characters | _nasty
_numbers = (
    st.sampled_from(NUMBERS).map(exact_json.parse)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
_nested = st.recursive(
    st.none() | st.booleans() | _numbers | _texts,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(_texts, one, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(_texts, _nested, max_size=3)
_values: dict[str, st.SearchStrategy[Any]] = {
    "text": _texts,
    "count": _numbers,
    "größe": _numbers,
    "is_it": st.booleans(),
    "tags": st.lists(_texts, max_size=3),
    "maybe": st.none() | _texts.filter(lambda text: text.strip() not in ("null", "None")),
    "tree": _objects,
    "数": _objects | st.lists(_nested, max_size=3) | _numbers,
}
_arguments = st.lists(st.sampled_from(sorted(_values)), unique=True, max_size=4).flatmap(
    lambda keys: st.fixed_dictionaries({key: _values[key] for key in keys})
)


def _can_write(name: str, arguments: dict[str, Any]) -> bool:
    """Whether a format can write arguments so that they can be read again: nothing tells a text that has the mark
    of texts from two, nor one with the mark that ends it before another mark or at its end.
    """
    if name == "gemma4":
        return gemma.QUOTE not in exact_json.write(arguments, ensure_ascii=False).replace('\\"', '"')
    ends = re.escape(VALUE_ENDS.get(name, gemma.QUOTE))
    texts = [arguments.get("text"), arguments.get("maybe")]
    return not any(text and re.search(rf"{ends}\s*(\Z|[<fH\[])", text) for text in texts)


@st.composite
def _aside(draw: st.DrawFn, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """A second value of a key, or a text between arguments: what becomes of it, and how it is spelled."""
    is_keyed, text = name in VALUE_ENDS, draw(words).lstrip(" \n[{")  # a bracket that is not closed is closed
    if not arguments or not (is_keyed or name in PYTHONIC) or draw(st.booleans()):
        return "", ""
    if is_keyed and draw(st.booleans()):
        return text, text
    key = draw(st.sampled_from(sorted(arguments)))
    spelled, given = (FORMATS[name].write(exact_json.write({key: value})) for value in (text, arguments[key]))
    aside = text if is_keyed else exact_json.write(text, ensure_ascii=False)
    return aside if spelled != given else "", spelled if is_keyed else f", {spelled}"


@st.composite
def _call(draw: st.DrawFn, name: str) -> Call:
    """A call in a format."""
    called = draw(st.sampled_from(sorted(SCHEMAS)))
    if called != "find":
        return Call(called, "{}")
    arguments = draw(_arguments.filter(lambda one: _can_write(name, one)))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    written = exact_json.write(arguments, ensure_ascii=draw(st.booleans()), separators=separators)
    return Call(called, written, *draw(_aside(name, arguments)))


def _may_lack_marks(name: str, arguments: str) -> bool:
    """Whether each value ends where it did without its closing mark: white space before the next one is no part of
    it, and a key that the schema does not name is on a new line.
    """
    values = exact_json.parse(arguments)
    is_trimmed = all(value == value.rstrip(" \t\r\n") for value in values.values() if isinstance(value, str))
    return is_trimmed and "<" not in arguments and (name != "glm47" or "数" not in values)


@st.composite
def _object(draw: st.DrawFn, call: Call) -> str:
    """A call as an object, as models write it: members in any order, with an id, arguments as a text, the function
    in an object of its own.
    """
    given = draw(st.sampled_from([call.arguments, exact_json.write(call.arguments)]))
    members = [f'"name": "{call.name}"', f'"{draw(st.sampled_from(["arguments", "parameters"]))}": {given}']
    if draw(st.booleans()):
        members = [f'"function": {{{", ".join(draw(st.permutations(members)))}}}']
    members += draw(st.lists(st.sampled_from(OTHER_MEMBERS), unique=True))
    return f"{{{', '.join(draw(st.permutations(members)))}}}"


@st.composite
def _block(draw: st.DrawFn, calls: list[Call]) -> str:
    """Calls as objects in one block, as models write them."""
    whole = draw(st.sampled_from([" ", "\n", ",", "; "])).join([draw(_object(call)) for call in calls])
    whole = draw(st.sampled_from([whole, f"[{whole}]"]))
    return draw(st.sampled_from([whole, f"```json\n{whole}\n```", f"```\n{whole}```"]))


@st.composite
def _spelled(draw: st.DrawFn, name: str, calls: list[Call]) -> str:
    """Calls as their format has them, or as models write them."""
    form = FORMATS[name]
    is_plain: bool = draw(st.booleans())
    if any(call.spelled for call in calls):
        heads = [str(number).join(form.heads(call.name)) for number, call in enumerate(calls)]
        spelled = [
            f"{head}{form.write(call.arguments)}{call.spelled}{form.tail}"
            for head, call in zip(heads, calls, strict=True)
        ]
        return form.opens + form.separator.join(spelled) + form.closes
    if name in VALUE_ENDS and not is_plain and all(_may_lack_marks(name, call.arguments) for call in calls):
        first, *others = form.spell_all([call[:2] for call in calls]).split(VALUE_ENDS[name])
        return first + "".join(draw(st.sampled_from([VALUE_ENDS[name], ""])) + other for other in others)
    if is_plain or name not in OBJECTS:
        return form.spell_all([call[:2] for call in calls])
    before, after = form.head.split("{")[0], form.tail.removeprefix("}")
    if name != "llama3" and draw(st.booleans()):
        return f"{form.begins}{draw(_block(calls))}{after or form.closes.removeprefix(']')}"
    objects = [f"{before}{draw(_object(call))}{after}" for call in calls]
    return form.opens + form.separator.join(objects) + form.closes


@st.composite
def _ended(draw: st.DrawFn, name: str, said: str) -> tuple[str, str]:
    """Calls without some of what they end with, or with a text before their last mark; and that text."""
    ends: list[str] = []
    for end in ENDINGS.get(name, ()):
        if said.endswith(end):
            said = said.removesuffix(end).rstrip()
            ends.append(end)
    kept = [end for end in ends if draw(st.booleans())]
    late = draw(words) if ends and kept == ends and len(ends[0]) > 1 else ""
    return said + "".join(reversed(kept[1:])) + late + "".join(kept[:1]), late


@st.composite
def _turns(draw: st.DrawFn, name: str) -> tuple[str, Found]:
    """Texts and calls in turns, and what is to be found in them."""
    form = FORMATS[name]
    said, content, calls = "", "", list[tuple[str, str]]()
    for _ in range(draw(st.integers(0, 2 if form.begins else 1))):
        text = draw(words) if form.begins else ""
        made = draw(st.lists(_call(name), min_size=1, max_size=3))
        said += text + draw(_spelled(name, made))
        content += text + "".join(call.aside for call in made)
        calls += [call[:2] for call in made]
    is_at_end: bool = draw(st.booleans())
    if calls and is_at_end:
        said, late = draw(_ended(name, said))
        return said, Found("", squeezed(content + late), calls, is_call=True)
    text = draw(_last_words)
    return said + text, Found("", squeezed(content + text), calls, is_call=bool(calls))


@st.composite
def _closed_thought(draw: st.DrawFn, name: str, thoughts: Thoughts) -> str:
    """Reasoning with drafts of calls, which may be cut off."""
    said = draw(words)
    for draft in draw(st.lists(_call(name), max_size=2)):
        spelled = FORMATS[name].spell_all([draft[:2]])
        end = draw(st.just(len(spelled)) | st.integers(0, len(spelled)))
        assume(end == len(spelled) or thoughts.closes not in spelled[:end])  # it ends reasoning where no call does
        said += spelled[:end] + draw(words)
    return said


@st.composite
def answers(draw: st.DrawFn, name: str) -> Answer:
    """An answer in which every call is to be found."""
    if name == "harmony":
        return draw(_in_channels())
    thoughts, begins = draw(st.sampled_from([None, *KNOWN])), FORMATS[name].begins
    said, found = draw(_turns(name))
    how = draw(st.sampled_from(["none", "closed", "unclosed", "up to a call"]))
    if thoughts is None or how == "none":
        return Answer(name, thoughts, False, said, found)
    is_open = draw(st.booleans())
    thought, closes = draw(words), ""
    if how == "closed":
        thought, closes = draw(_closed_thought(name, thoughts)), thoughts.closes
    elif how == "unclosed" or not said.startswith(begins) or not begins:
        said, found = "", Found("", "", [])
    elif draw(st.booleans()):
        thought += f"{begins} hm "
    opens = "" if is_open else thoughts.opens + thoughts.label
    return Answer(
        name, thoughts, is_open, opens + thought + closes + said, replace(found, reasoning=squeezed(thought))
    )


@st.composite
def damaged(draw: st.DrawFn, name: str) -> Answer:
    """An answer that is cut off, lacks something, has something too much, or is nothing but scraps."""
    answer = draw(answers(name))
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(answer.said))] * 2)))
    said = draw(
        st.sampled_from([answer.said[:start], answer.said[:start] + answer.said[end:]])
        | scraps.map(lambda scrap: answer.said[:start] + scrap + answer.said[start:])
        | scraps
    )
    return answer._replace(said=said)


@st.composite
def _in_channels(draw: st.DrawFn) -> Answer:
    """An answer of gpt-oss, whose messages may lack the mark that ends them before another."""
    messages, reasoning, content, calls = [], "", "", list[tuple[str, str]]()
    if draw(st.booleans()):
        reasoning = draw(words)
        messages.append(f"{HARMONY.opens}{reasoning}")
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()):
            text = draw(words)
            messages.append(f"{harmony.CHANNEL}commentary{harmony.MESSAGE}{text}")
            content += text
        call = draw(_call("harmony"))
        messages.append(FORMATS["harmony"].spell(*call[:2]))
        calls.append(call[:2])
    if draw(st.booleans()):
        text = draw(_last_words)
        messages.append(f"{harmony.CHANNEL}final{harmony.MESSAGE}{text}")
        content += text
    ends = [draw(st.sampled_from([harmony.END, ""])) for _ in messages]
    said = harmony.NEXT.join(f"{message}{end}" for message, end in zip(messages, ends, strict=True))
    return Answer(
        "harmony", HARMONY, False, said, Found(squeezed(reasoning), squeezed(content), calls, bool(calls))
    )
