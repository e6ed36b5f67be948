"""Encodes answers as Anthropic's messages: a whole one, or the events of a stream.

message_start, ping, { content_block_start, content_block_delta ..., content_block_stop } ...,
message_delta (why it ended, usage), message_stop
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Raw

from deployments.api.anthropic.blocks import AnswerBlocks, BlockStep
from deployments.api.base import exact_json
from deployments.api.base.errors import ApiError
from deployments.api.http.anthropic_errors import error_object
from deployments.api.http.json_size import count_names
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.output_parser import ToolCallDelta
from deployments.api.output.response_encoder import ResponseContext, encode_json

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}
_TEXT_OR_COLON = re.compile(r'"(?:[^"\\]|\\.)*"?|:', re.DOTALL)
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesEncoder:
    """Encodes one answer."""

    takes_singly = True

    def __init__(self, context: ResponseContext, *, shows_thinking: bool, is_cut_by_context: bool) -> None:
        """`is_cut_by_context` says that the context has less room than the answer may take."""
        self.context = context
        self._shows_thinking, self._is_cut = shows_thinking, is_cut_by_context
        self._blocks = AnswerBlocks()
        self._index = -1
        self._last: ChoiceDelta | None = None

    def opening(self, index: int, num_cached: int) -> bytes:
        """Encode the message without its content."""
        usage = _usage(self.context.num_prompt_tokens, num_cached, 0)
        message = self._message([], None, None) | {"usage": usage}
        return _event("message_start", {"message": message}) + _PING

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Encode the events of one delta. More text, the usual case, is encoded by hand."""
        self._last = delta
        if self._blocks.is_text_open and not delta.calls and not delta.reasoning:
            return self._text(delta.text) if delta.text else b""
        return b"".join([self._step(step) for step in self._blocks.take(delta)])

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the end of the last block, and of the message."""
        reason, sequence = self._reason(self._last)
        ended = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, **_own_extras(extras)}
        blocks = [self._step(step) for step in self._blocks.end()]
        return b"".join([*blocks, _event("message_delta", ended), _event("message_stop", {})])

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode a failure as the stream's last event."""
        return _event("error", error_object(error, request_id))

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode a message."""
        steps = [step for delta in deltas[0] for step in self._blocks.take(delta)]
        last = deltas[0][-1]
        content = self._content(steps, is_cut=last.finish_reason != "tool_calls")
        message = self._message(content, *self._reason(last))
        return [encode_json(message | _own_extras(extras))]

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self.context.id,
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _reason(self, last: ChoiceDelta | None) -> tuple[str, str | None]:
        """Return why an answer ended, and the stop sequence if that was one."""
        finish = last.finish_reason if last and last.finish_reason else "stop"
        if finish == "stop" and last is not None and last.stop_string is not None:
            return "stop_sequence", last.stop_string
        if finish == "length" and self._is_cut:
            return "model_context_window_exceeded", None
        return _REASONS[finish], None

    def _content(self, steps: Iterable[BlockStep], *, is_cut: bool) -> list[dict[str, Any]]:
        """Return the blocks of a whole answer; `is_cut`: whether its last call may not be complete."""
        content: list[dict[str, Any]] = []
        gained: list[list[str]] = []
        for step in steps:
            if step.step == "begin":
                content.append(self._block(step.kind, step.call))
                gained.append([])
            elif step.step == "gain":
                gained[-1].append(step.text)
        for block, texts in zip(content, gained, strict=True):
            text = "".join(texts)
            if block["type"] == "tool_use":
                block["input"] = _object(text, is_cut=is_cut)
            elif block["type"] == "thinking":
                block |= {"thinking": text if self._shows_thinking else "", "signature": self.context.id}
            else:
                block["text"] = text
        return content

    def _block(self, kind: str, call: ToolCallDelta | None) -> dict[str, Any]:
        """Return a block that has gained nothing yet."""
        if call is not None:
            name = (call.id or "").removeprefix("call_")
            return {"type": "tool_use", "id": f"toolu_{name}", "name": call.name, "input": {}}
        empty: dict[str, dict[str, Any]] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
        }
        return {"type": kind, **empty[kind]}

    def _step(self, step: BlockStep) -> bytes:
        """Encode a step as events."""
        if step.step == "begin":
            self._index += 1
            block = self._block(step.kind, step.call)
            return _event("content_block_start", {"index": self._index, "content_block": block})
        if step.step == "end":
            is_signed = step.kind == "thinking"
            signature = self._delta("signature_delta", "signature", self.context.id) if is_signed else b""
            return signature + _event("content_block_stop", {"index": self._index})
        if step.kind == "text":
            return self._text(step.text)
        if step.kind == "thinking" and not self._shows_thinking:
            return b""
        return self._delta(*_DELTAS[step.kind], step.text)

    def _text(self, text: str) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (
            self._index,
            b'{"type":"text_delta","text":%b}' % encode_json(text),
        )

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": {"type": kind, field: text}})


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))


def _own_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usage` as Anthropic counts it, and the other extras."""
    counted = extras["usage"]
    usage = _usage(
        counted["prompt_tokens"],
        counted["prompt_tokens_details"]["cached_tokens"],
        counted["completion_tokens"],
        counted["completion_tokens_details"]["reasoning_tokens"],
    )
    return {**extras, "usage": usage}


def _usage(num_prompt: int, num_cached: int, num_generated: int, num_thinking: int = 0) -> dict[str, Any]:
    """Return a usage object, whose `input_tokens` are those that no cache had."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_generated,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


def _object(text: str, *, is_cut: bool) -> Raw:
    """Return a tool's input. If the answer was cut off, it is the part written until then. Text that is no JSON
    object, or has a name twice, becomes the text of a field, so no text is lost.
    """
    try:
        if not is_cut:
            exact_json.parse(text)
        written = exact_json.closed(text)
    except ValueError:
        written = ""
    if written.startswith("{") and not _repeats_a_name(text):
        return Raw(written.encode())
    return Raw(encode_json({"arguments": text} if text.strip() else {}))


def _repeats_a_name(text: str) -> bool:
    """Whether an object has a name twice, in JSON that may break off. The last value may be missing."""
    ends = [found.end() for found in _TEXT_OR_COLON.finditer(text) if found[0] == ":"]
    if not ends:
        return False
    begun = f"{text[: ends[-1]]} null"
    return count_names(exact_json.closed(begun).encode()) < len(ends)
