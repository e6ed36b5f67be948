"""Encodes the answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from deployments.api.output.output_parser import ToolCallDelta
from deployments.api.output.response_encoder import (
    ChunkFraming,
    CompleteChoice,
    ResponseContext,
    encode_json,
    encode_whole,
    encoded_list,
    in_pieces,
)
from deployments.api.sampling.prompt_scores import PromptScores
from deployments.api.served.text_codec import TextCodec
from engine.values.logprobs import TokenLogprobs


class ChatResponseEncoder:
    """Encodes answers as chat completions."""

    takes_singly = False

    def __init__(
        self,
        context: ResponseContext,
        codec: TextCodec,
        logprobs: int | None,
        scores: PromptScores | None = None,
        names: TokenNames | None = None,
    ) -> None:
        """`logprobs` is the number of alternatives to report; `scores` are the prompt's; None names tokens by
        their texts.
        """
        self.context = context
        self._codec, self._names = codec, names or codec
        self.shows_reasoning = True
        """Whether answers contain the model's thoughts."""
        self.has_old_calls = False
        """Whether an answer has its call in OpenAI's older form."""
        self._num_top = logprobs
        self._scores = scores
        self._framing = ChunkFraming(context, "chat.completion.chunk")

    def opening(self, index: int, num_cached: int) -> bytes:
        """Encode the first chunk: the role, with an empty text."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.context.with_token_ids:  # next to the choices, as in vLLM
            return self._framing.first(
                encode_json(choice), {"prompt_token_ids": self.context.prompt_of(index).token_ids}
            )
        return self._framing.choice(encode_json(choice))

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Encode one delta. The finish reason gets its own chunk, as clients expect the last delta to be empty."""
        chunks = b""
        self._framing.count(len(delta.token_ids))
        if delta.reasoning and not self.shows_reasoning:
            delta = structs.replace(delta, reasoning="")
        if delta.text or delta.logprobs or delta.reasoning or delta.calls or self.context.reports_ids(delta):
            chunks = self._framing.choice(self._content_chunk(delta))
        if delta.finish_reason:
            last = {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": self._reason(delta.finish_reason),
                "stop_reason": delta.stop_reason,
            }
            chunks += self._framing.choice(encode_json(last))
        return chunks

    def _content_chunk(self, delta: ChoiceDelta) -> bytes:
        """Encode the hot path by hand, as only the text differs from chunk to chunk."""
        logprobs = b"null"
        if delta.logprobs:
            logprobs = b"".join(in_pieces(self._long_logprobs(delta.logprobs)))
        token_ids = b',"token_ids":' + encode_json(delta.token_ids) if self.context.with_token_ids else b""
        if delta.reasoning or delta.calls:
            calls = self._calls([_encoded_call_delta(call) for call in delta.calls])
            fields = encode_json(_message_fields(delta.text, delta.reasoning) | calls)
        else:
            fields = b'{"content":%b}' % encode_json(delta.text)
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (
            delta.index,
            fields,
            logprobs,
            token_ids,
        )

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the stream's end, after the usage and timings of the whole request."""
        return self._framing.end(extras)

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode a failure as the stream's last event."""
        return self._framing.failure(error, request_id)

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode a chat.completion object."""
        choices = (self._whole_choice(index, CompleteChoice.of(own)) for index, own in enumerate(deltas))
        head = self.context.head("chat.completion")
        if self.context.with_token_ids:
            head["prompt_token_ids"] = self.context.prompts[0].token_ids
        if self._scores is not None:
            scores = prompt_logprobs(self._codec, self._scores.of(0), self._scores.num_top)
            head["prompt_logprobs"] = encoded_list(scores)
        return encode_whole(head, choices, extras)

    def _whole_choice(self, index: int, whole: CompleteChoice) -> dict[str, Any]:
        fields = _message_fields("".join(whole.text), "".join(whole.reasoning) if self.shows_reasoning else "")
        fields |= self._calls([_encoded_call(call) for call in whole.calls])
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": None if whole.calls else "", "refusal": None, **fields},
            "logprobs": None if self._num_top is None else self._long_logprobs(whole.logprobs),
            "finish_reason": self._reason(whole.finish_reason),
            "stop_reason": whole.stop_reason,
        }
        if self.context.with_token_ids:
            choice["token_ids"] = whole.token_ids
        return choice

    def _calls(self, encoded: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field of a message, or of its delta, with these calls."""
        if not encoded:
            return {}
        # In the older form, an answer has one call at most.
        return {"function_call": encoded[0]["function"]} if self.has_old_calls else {"tool_calls": encoded}

    def _reason(self, reason: str) -> str:
        return "function_call" if self.has_old_calls and reason == "tool_calls" else reason

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._names, logprobs, self._num_top or 0)

    def _long_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = encoded_list(logprobs, lambda piece: self._logprobs(piece)["content"])
        return {**self._logprobs(()), "content": content}


def _message_fields(text: str, reasoning: str) -> dict[str, Any]:
    """Return the non-empty fields of a message or of its delta, besides its calls."""
    # Two names: vLLM's and OpenRouter's, and DeepSeek's, by which many clients know it.
    fields = {"content": text, "reasoning": reasoning, "reasoning_content": reasoning}
    return {part: value for part, value in fields.items() if value}


def _encoded_call(call: ToolCallDelta) -> dict[str, Any]:
    kind = "custom" if call.is_custom else "function"
    return {"id": call.id, "type": kind, **_called(call)}


def _encoded_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Encode a call's delta: the first has the id and the name, later ones only arguments."""
    begun = {"index": call.index}
    return begun | (_called(call) if call.name is None else _encoded_call(call))


def _called(call: ToolCallDelta) -> dict[str, Any]:
    """Return the parts of a call that a delta has: its name, and a piece of its arguments."""
    name = {} if call.name is None else {"name": call.name}
    if call.is_custom:
        return {"custom": {**name, "input": call.arguments}}
    return {"function": {**name, "arguments": call.arguments}}
