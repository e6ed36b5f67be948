"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.best_of import num_candidates
from deployments.api.choices import Delta
from deployments.api.errors import at_most, invalid
from deployments.api.exchange import Plan
from deployments.api.limits import Limits
from deployments.api.prompts import check_prompt, encode_text
from deployments.api.protocol import CompletionRequest
from deployments.api.sampling import COMPLETION_MAX_TOKENS, check_room, in_range, sampling_params
from deployments.api.service import ServedModel
from deployments.api.text_codec import TextCodec
from deployments.api.wording import Answer, Frames, Prompt, Whole, encode_json, finite
from engine.plan import TokenLogprobs


async def plan_completion(limits: Limits, served: ServedModel, request: CompletionRequest) -> Plan:
    """Check everything, tokenize, and say what to generate. Raises `ApiError`."""
    model = served.card
    at_most("prompt", len(request.prompt), limits.max_prompts, "prompts")
    in_range("logprobs", request.logprobs, 0, limits.max_completion_logprobs)
    if request.echo and request.logprobs is not None:
        raise invalid("echo and logprobs cannot be combined: prompts have no logprobs here.", "logprobs")
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    echoes_only = bool(request.echo) and max_tokens == 0
    candidates = num_candidates(request, limits)
    sampling = sampling_params(
        request, limits, model, max_tokens=1 if echoes_only else max_tokens, logprobs=request.logprobs
    )
    prompts = [await _prompt(limits, served, prompt, bool(request.echo)) for prompt in request.prompt]
    for prompt in prompts:
        check_room(len(prompt.token_ids), max_tokens, model, "prompt")
    options = request.stream_options
    answer = Answer.begin(
        "cmpl",
        model.id,
        prompts,
        num_choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        with_token_ids=bool(request.return_token_ids),
        include_timings=bool(request.include_timings),
    )
    wording = CompletionWording(answer, served.codec, request.logprobs)
    return Plan(served, request, sampling, wording, candidates, echoes_only=echoes_only)


async def _prompt(limits: Limits, served: ServedModel, given: str | list[int], echo: bool) -> Prompt:
    """Ids as they are, text as the tokenizer splits it; echoed as it was given."""
    ids = await encode_text(limits, served, given) if isinstance(given, str) else given
    # Special tokens alone are no prompt: an empty text stays empty though the tokenizer adds its own.
    check_prompt(served.card, ids if given else [], "prompt")
    if not echo:
        return Prompt(ids)
    return Prompt(ids, given if isinstance(given, str) else served.codec.decode(ids))


class CompletionWording:
    """Spells answers as text completions."""

    def __init__(self, answer: Answer, codec: TextCodec, logprobs: int | None) -> None:
        self.answer = answer
        self._codec = codec
        self._num_top = logprobs
        self._frames = Frames(answer, "text_completion")
        self._offsets: dict[int, int] = {}
        """By choice: where in the text its next token's logprob entry begins."""

    def opening(self, index: int) -> bytes:
        """The echoed prompt, when one was asked for."""
        prompt = self.answer.prompt_of(index)
        if not prompt.echo and not self.answer.with_token_ids:
            return b""
        choice: dict[str, Any] = {"index": index, "text": prompt.echo, "logprobs": None, "finish_reason": None}
        if self.answer.with_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return self._frames.choice(encode_json(choice))

    def delta(self, delta: Delta) -> bytes:
        """One chunk, the last one with the finish reason."""
        if not delta.says_something:
            return b""
        logprobs = encode_json(self._logprobs(delta.index, delta.logprobs)) if delta.logprobs else b"null"
        token_ids = b',"token_ids":' + encode_json(delta.token_ids) if self.answer.with_token_ids else b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            delta.index,
            encode_json(delta.text),
            logprobs,
            encode_json(delta.finish_reason),
            token_ids,
        )
        return self._frames.choice(choice)

    def closing(self, extras: dict[str, Any]) -> bytes:
        """What is said of the whole request, with no choices."""
        return self._frames.closing(extras)

    def whole(self, deltas: Sequence[Sequence[Delta]], extras: dict[str, Any]) -> bytes:
        """A text_completion object."""
        spelled = [self._whole_choice(index, Whole.of(own)) for index, own in enumerate(deltas)]
        head = self.answer.head("text_completion")
        return encode_json({**head, "choices": spelled, **extras})

    def _whole_choice(self, index: int, whole: Whole) -> dict[str, Any]:
        prompt = self.answer.prompt_of(index)
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.echo + "".join(whole.text),
            "logprobs": None if self._num_top is None else self._logprobs(index, whole.logprobs),
            "finish_reason": whole.finish_reason,
        }
        if self.answer.with_token_ids:
            choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": whole.token_ids}
        return choice

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, offsets, tops = [], [], []
        for at in logprobs:
            key = self._codec.token_key(at.token_id)
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(self._codec.token_text(at.token_id)[0])
            tokens.append(key)
            offsets.append(offset)
            # The chosen token is always among them, so there may be one more than asked for.
            likely = at.top[: self._num_top or 0]
            top = {self._codec.token_key(token): finite(logprob) for token, logprob in likely}
            tops.append(top | {key: finite(at.logprob)})
        return {
            "tokens": tokens,
            "token_logprobs": [finite(at.logprob) for at in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
