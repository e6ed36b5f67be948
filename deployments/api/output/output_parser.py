"""Separates reasoning, text and tool calls in an answer while its tokens arrive.

tokens ─▶ TextStream ─▶ text ─▶ parse_reasoning ─┬─▶ reasoning
          stop strings                           └─▶ text ─▶ the format's parser ─┬─▶ content
                                                                                  └─▶ calls
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from msgspec import Struct

from deployments.api.dialects.custom import InputText
from deployments.api.dialects.named import Functions
from deployments.api.dialects.reasoning import Thoughts, parse_reasoning, without_calls
from deployments.api.dialects.segments import ParserDriver, Segment
from deployments.api.dialects.tool_format import ToolFormat
from deployments.api.output.spelled_text import SpelledText
from engine.text.detokenizer import TextStream


@dataclass(frozen=True, slots=True)
class OutputParseSpec:
    """The parts to find in an answer's text."""

    thoughts: Thoughts | None = None
    """The marks of reasoning; None looks for none."""
    is_thinking: bool = False
    """Whether the prompt ends inside reasoning."""
    format: ToolFormat | None = None
    """How calls are written; None looks for none."""
    functions: Functions = field(default_factory=dict)
    """The functions that may be called."""
    customs: Collection[str] = ()
    """Those that are custom tools to the client."""
    is_single: bool = False
    """Whether the answer is over after its first call."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text, because they mark reasoning or calls."""
        return (self.thoughts.marks if self.thoughts else ()) + (self.format.marks if self.format else ())


PLAIN_TEXT = OutputParseSpec()
"""Takes the whole answer as text."""


@dataclass(slots=True)
class ToolCallDelta:
    """A stream's next piece of one tool call. The first delta of a call has its id and its name."""

    index: int
    """Position of the call among those of its choice."""
    id: str | None
    name: str | None
    arguments: str = ""
    """JSON; of a custom tool, a text."""
    num_before: int = 0
    """Number of characters that the same delta adds to the text before it."""
    is_custom: bool = False
    """Whether it calls a custom tool."""


class ParsedOutput(Struct):
    """The text, reasoning and calls that some tokens added."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = []
    """One for each call that gained something."""


class OutputParser:
    """Parses one choice."""

    def __init__(
        self, text: TextStream, spec: OutputParseSpec, spelled: SpelledText | None = None, name: str = ""
    ) -> None:
        """The ids of its calls are derived from `name`, which no other choice has."""
        self._text, self._spec, self._name = text, spec, name
        self.spelled = spelled
        """Which tokens spell which text, for an answer with log-probabilities."""
        self._reasoning_parser: ParserDriver | None = None
        if spec.thoughts is not None:
            is_open, calls = spec.is_thinking, without_calls
            if spec.format and spec.format.begins:  # otherwise calls cannot be distinguished from reasoning
                calls = partial(spec.format.parser, spec.functions)
            self._reasoning_parser = ParserDriver(parse_reasoning(spec.thoughts, is_open=is_open, calls=calls))
        self._call_parser = ParserDriver(spec.format.parser(spec.functions)) if spec.format else None
        self._num_calls = self._num_complete = 0
        self._input: InputText | None = None  # of the last call, if it calls a custom tool
        self._has_thought, self._is_answering = False, False
        self._num_before_answer = self._num_before_hold = 0
        self.stopped = False
        """Whether a stop string, or the only call allowed, ended the answer; later tokens are ignored."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the answer: all that were pushed, or those up to the one that stopped it."""
        return self._text.num_tokens

    @property
    def includes_stop(self) -> bool:
        """Whether the token that ends the answer is part of its text."""
        return self._text.includes_stop

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None if it has not ended, or ended otherwise."""
        return self._text.stop_string

    @property
    def num_reasoning(self) -> int:
        """Number of reasoning tokens, including the one that completed the closing mark; but not the one that
        completed the opening mark of a call, if that ended the reasoning.
        """
        return self._num_before_answer if self._has_thought else 0

    @property
    def is_call(self) -> bool:
        """Whether the answer has calls and all of them are complete."""
        return 0 < self._num_calls == self._num_complete

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> ParsedOutput:
        """Parse more tokens. With `is_last`, these are the last, and held text is released."""
        if self._reasoning_parser is None and self._call_parser is None:
            return self._plain(token_ids, is_last)
        parsed = ParsedOutput()
        for token in token_ids:  # token by token, to find the token that ends the reasoning or the answer
            if not self.stopped:
                self._take(parsed, [token])
        if is_last and not self.stopped:
            self._add(parsed, self._segments(self._text.finish()))
            self._add(parsed, self._rest())
        if is_last:
            self._end_input(parsed)
        return parsed

    def _plain(self, token_ids: Sequence[int], is_last: bool) -> ParsedOutput:
        """Take all as text."""
        delta = self._text.push(token_ids)
        self.stopped = delta.stopped
        return ParsedOutput(delta.text + self._text.finish() if is_last else delta.text)

    def _take(self, parsed: ParsedOutput, token_ids: Sequence[int]) -> None:
        if not self._is_answering:
            self._num_before_answer += len(token_ids)
        delta = self._text.push(token_ids)
        self._add(parsed, self._segments(delta.text))
        if delta.stopped and not self.stopped:
            self._add(parsed, self._rest())
            self.stopped = True

    def _segments(self, text: str) -> Iterator[Segment]:
        """Yield the segments whose kind is certain after `text`."""
        for segment in self._reasoning_parser.push(text) if self._reasoning_parser else [Segment("text", text)]:
            yield from self._answer(segment)

    def _rest(self) -> Iterator[Segment]:
        """Yield held text, at the end of the text."""
        for segment in self._reasoning_parser.finish() if self._reasoning_parser else []:
            yield from self._answer(segment)
        yield from self._call_parser.finish() if self._call_parser else []

    def _answer(self, segment: Segment) -> Iterable[Segment]:
        """Look for calls in text; text known to be reasoning has none."""
        return self._call_parser.push(segment.text) if self._call_parser and segment.kind == "text" else [segment]

    def _add(self, parsed: ParsedOutput, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if self.stopped:
                return
            if segment.kind == "text":
                parsed.text += segment.text
            elif segment.kind == "reasoning":
                parsed.reasoning += segment.text
                self._has_thought = True
            elif segment.kind == "hold":
                self._num_before_hold = self._num_before_answer - 1
            elif segment.kind == "answer":
                self._is_answering = True
                if segment.text:
                    self._num_before_answer = self._num_before_hold
            elif segment.kind == "call":
                self._begin_call(parsed, segment.text)
            elif segment.kind == "arguments":
                self._of_last_call(parsed).arguments += (
                    self._input.push(segment.text) if self._input else segment.text
                )
            else:
                self._end_input(parsed)
                self._num_complete += 1
                self.stopped = self._spec.is_single

    def _begin_call(self, parsed: ParsedOutput, name: str) -> None:
        self._end_input(parsed)
        digest = blake2b(f"{self._name}-{self._num_calls}".encode(), digest_size=12)
        call_id, is_custom = f"call_{digest.hexdigest()}", name in self._spec.customs
        self._input = InputText() if is_custom else None
        parsed.calls.append(ToolCallDelta(self._num_calls, call_id, name, "", len(parsed.text), is_custom))
        self._num_calls += 1

    def _end_input(self, parsed: ParsedOutput) -> None:
        """Add the held part of the last call's input. Text that has no place in it becomes text of the answer."""
        if self._input is not None:
            if rest := self._input.finish():
                self._of_last_call(parsed).arguments += rest
            parsed.text += self._input.other_text()
        self._input = None

    def _of_last_call(self, parsed: ParsedOutput) -> ToolCallDelta:
        index = self._num_calls - 1
        if not parsed.calls or parsed.calls[-1].index != index:
            is_custom = self._input is not None
            parsed.calls.append(ToolCallDelta(index, None, None, "", len(parsed.text), is_custom))
        return parsed.calls[-1]
