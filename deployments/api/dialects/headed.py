"""Parses calls with the function's name in a head of marks, and the arguments as JSON after it.

Kimi K2    <|tool_calls_section_begin|>
           <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
           <|tool_calls_section_end|>

DeepSeek's marks have wide bars, and lower blocks for spaces:

V3.1       <|tool calls begin|><|tool call begin|>NAME<|tool sep|>{...}<|tool call end|><|tool calls end|>
V3, R1     the same, with `function<|tool sep|>` before a name, and arguments in a fenced block of JSON
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from deployments.api.dialects.json_calls import parse_arguments
from deployments.api.dialects.marked import expect, parse_marked
from deployments.api.dialects.named import Functions
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser

_ENDS_NAME = "<`{[( \n"
_AROUND_NAME = re.compile(r"^functions\.|:\d+$")


@dataclass(frozen=True, slots=True)
class HeadedMarks:
    """OPENS (BEFORE name AFTER {...} ENDS)* CLOSES, with white space between marks where the model likes it."""

    opens: str
    """Begins all calls of an answer; it may be missing."""
    before: tuple[str, ...]
    """Marks before a name. The name itself may have `functions.` before it and a number after it."""
    after: tuple[str, ...]
    """Marks between a name and the arguments."""
    ends: tuple[str, ...]
    """Marks that end a call."""
    closes: str
    name: str = "NAME"
    """How the model writes a name: NAME stands for it, and NUMBER for the call's number."""
    layout: str = ""
    """White space that the model writes between names, arguments and marks."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        return (self.opens, *self.before, *self.after, *self.ends, self.closes)

    @property
    def head(self) -> str:
        """The beginning of a call, up to its arguments."""
        return f"{''.join(self.before)}{self.name}{self.layout}{''.join(self.after)}{self.layout}"

    @property
    def tail(self) -> str:
        """The end of a call, after its arguments."""
        return self.layout + "".join(self.ends)


def _deepseek(name: str) -> str:
    """Return one of DeepSeek's marks."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


KIMI = HeadedMarks(
    opens="<|tool_calls_section_begin|>",
    before=("<|tool_call_begin|>",),
    name="functions.NAME:NUMBER",
    after=("<|tool_call_argument_begin|>",),
    ends=("<|tool_call_end|>",),
    closes="<|tool_calls_section_end|>",
)
DEEPSEEK_V31 = HeadedMarks(
    opens=_deepseek("tool calls begin"),
    before=(_deepseek("tool call begin"),),
    after=(_deepseek("tool sep"),),
    ends=(_deepseek("tool call end"),),
    closes=_deepseek("tool calls end"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    before=(*DEEPSEEK_V31.before, "function", *DEEPSEEK_V31.after),
    after=("```json",),
    ends=("```", *DEEPSEEK_V31.ends),
    layout="\n",
)


def parse_headed(marks: HeadedMarks, functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def call(at: Scanner, opening: str) -> Parser[None]:
        yield from expect(at, marks.before if opening == marks.opens else marks.before[1:])
        yield from at.spaces()
        word = ""
        while (char := (yield from at.look())) and char not in _ENDS_NAME:
            at.take()
            word += char
        name = _AROUND_NAME.sub("", word)
        if name not in functions:
            raise Malformed
        yield from expect(at, marks.after)
        yield from parse_arguments(at, name)

    return parse_marked((marks.opens, marks.before[0]), (*marks.ends, marks.closes), call, until=until)
