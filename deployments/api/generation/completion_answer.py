"""Encodes the answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.logprobs import (
    OutputOffsets,
    TokenNames,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from deployments.api.output.response_encoder import (
    ChunkFraming,
    CompleteChoice,
    ResponseContext,
    encode_json,
    encode_whole,
    encoded_list,
)
from deployments.api.sampling.prompt_scores import PromptScores
from deployments.api.served.text_codec import TextCodec
from engine.values.logprobs import TokenLogprobs


class CompletionResponseEncoder:
    """Encodes answers as text completions."""

    takes_singly = False

    def __init__(
        self,
        context: ResponseContext,
        codec: TextCodec,
        logprobs: int | None,
        scores: PromptScores | None = None,
        prompt_logprobs: int | None = None,
        names: TokenNames | None = None,
    ) -> None:
        """`logprobs` and `prompt_logprobs` are numbers of alternatives to report; `scores` are the prompts'; None
        names tokens by their texts.
        """
        self.context = context
        self._codec, self._names = codec, names or codec
        self._num_top, self._num_prompt_top = logprobs, prompt_logprobs
        self._scores = scores
        self._framing = ChunkFraming(context, "text_completion")
        self._offsets = [
            OutputOffsets(codec, len(prompt.echo or ""))
            for prompt in context.prompts
            for _ in range(context.num_choices)
        ]

    def opening(self, index: int, num_cached: int) -> bytes:
        """Encode the echoed prompt with its logprobs, if the client asked for it."""
        prompt = self.context.prompt_of(index)
        if prompt.echo is None and not self.context.with_token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.echo or "",
            "logprobs": self._echoed_logprobs(index),
            "finish_reason": None,
        }
        if self.context.with_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return self._framing.choice(encode_json(choice))

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Encode one chunk; the last one has the finish reason."""
        self._framing.count(len(delta.token_ids))
        if not delta.has_content and not self.context.reports_ids(delta):
            return b""
        offsets = self._offsets[delta.index].add(delta.text, delta.logprobs)
        logprobs = encode_json(self._logprobs(delta.logprobs, offsets)) if delta.logprobs else b"null"
        token_ids = b',"token_ids":' + encode_json(delta.token_ids) if self.context.with_token_ids else b""
        ends = b"null"
        if delta.finish_reason:
            ends = b'%b,"stop_reason":%b' % (encode_json(delta.finish_reason), encode_json(delta.stop_reason))
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            delta.index,
            encode_json(delta.text),
            logprobs,
            ends,
            token_ids,
        )
        return self._framing.choice(choice)

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the stream's end, after the usage and timings of the whole request."""
        return self._framing.end(extras)

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode a failure as the stream's last event."""
        return self._framing.failure(error, request_id)

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode a text_completion object."""
        choices = (self._whole_choice(index, own) for index, own in enumerate(deltas))
        head = self.context.head("text_completion")
        return encode_whole(head, choices, extras)

    def _whole_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        prompt, whole = self.context.prompt_of(index), CompleteChoice.of(deltas)
        logprobs: dict[str, Any] | None = None
        if self._num_top is not None:
            at = self._offsets[index]
            offsets = [offset for delta in deltas for offset in at.add(delta.text, delta.logprobs)]
            logprobs = self._logprobs(whole.logprobs, offsets)
        if logprobs is not None and (echoed := self._echoed_logprobs(index)):
            logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        if logprobs is not None:
            logprobs = {name: encoded_list(values) for name, values in logprobs.items()}
        choice: dict[str, Any] = {
            "index": index,
            "text": (prompt.echo or "") + "".join(whole.text),
            "logprobs": logprobs,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if self._scores is not None and self._num_prompt_top is not None:
            scores = self._scores.of(index)
            choice["prompt_logprobs"] = encoded_list(prompt_logprobs(self._codec, scores, self._num_prompt_top))
        if self.context.with_token_ids:
            choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": whole.token_ids}
        return choice

    def _echoed_logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the logprobs of the echoed prompt if the client asked for both."""
        prompt = self.context.prompt_of(index)
        if self._scores is None or self._num_top is None or prompt.echo is None:
            return None
        return echo_logprobs(self._names, prompt.token_ids, prompt.echo, self._scores.of(index), self._num_top)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any]:
        return completion_logprobs(self._names, logprobs, self._num_top or 0, offsets)
