"""An answer as blocks, in the order in which the model writes them: thinking, text, and uses of tools.

    deltas   think | think text | text call | arguments | call
    blocks   ╰─ thinking ─╯╰─ text ──╯╰─ tool_use ──────╯╰─ tool_use

White space by itself makes no block: it is held until text follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.output_parser import ToolCallDelta

BlockKind = Literal["thinking", "text", "tool_use"]


class BlockStep(Struct, frozen=True):
    """One step in the making of blocks: one begins, gains text, or ends."""

    kind: BlockKind
    step: Literal["begin", "gain", "end"]
    text: str = ""
    """Text that a block gains: thoughts, text, or a piece of a tool's input as JSON."""
    call: ToolCallDelta | None = None
    """The call that begins, with its id and its name."""


class AnswerBlocks:
    """The blocks of one answer while they are made."""

    def __init__(self) -> None:
        self.is_text_open = False
        """Whether more text continues the block that is open."""
        self._open: BlockKind | None = None
        self._space = ""

    def take(self, delta: ChoiceDelta) -> Iterator[BlockStep]:
        """Yield the steps that a delta makes."""
        if delta.reasoning:
            yield from self._gain("thinking", delta.reasoning)
        num_said = 0
        for call in delta.calls:
            yield from self._say(delta.text[num_said : call.num_before])
            num_said = call.num_before
            yield from self._call(call)
        yield from self._say(delta.text[num_said:])

    def end(self) -> Iterator[BlockStep]:
        """Yield the end of the block that is open, if there is one."""
        if self._open is not None:
            yield BlockStep(self._open, "end")
        self._open, self.is_text_open, self._space = None, False, ""

    def _say(self, text: str) -> Iterator[BlockStep]:
        if not self.is_text_open:
            text = self._space + text
            if not text or text.isspace():
                self._space = text
                return
        if text:
            yield from self._gain("text", text)

    def _call(self, call: ToolCallDelta) -> Iterator[BlockStep]:
        """Yield the text that a call gains; the call has begun before unless it has a name."""
        if call.name is not None:
            yield from self.end()
            self._open = "tool_use"
            yield BlockStep("tool_use", "begin", call=call)
        if call.arguments:
            yield BlockStep("tool_use", "gain", call.arguments)

    def _gain(self, kind: BlockKind, text: str) -> Iterator[BlockStep]:
        if self._open != kind:
            yield from self.end()
            self._open, self.is_text_open = kind, kind == "text"
            yield BlockStep(kind, "begin")
        yield BlockStep(kind, "gain", text)
