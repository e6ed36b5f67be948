"""Plans and encodes POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.api.base.errors import ApiError, at_most
from deployments.api.base.off_loop import near_or_far
from deployments.api.constraints.restrictions import never_ends, restricted
from deployments.api.constraints.structured import requested_grammar
from deployments.api.fields.protocol import CompletionRequest
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.logprobs import (
    NumberedTokens,
    OutputOffsets,
    TokenNames,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from deployments.api.output.response_encoder import (
    ChunkFraming,
    CompleteChoice,
    EncodedPrompt,
    ResponseContext,
    encode_json,
    encode_whole,
    encoded_list,
)
from deployments.api.prompt.token_ids import Truncation, check_prompt, encode_text
from deployments.api.sampling.beams import with_beams
from deployments.api.sampling.best_of import num_candidates
from deployments.api.sampling.parameters import (
    COMPLETION_MAX_TOKENS,
    asked_tokens,
    check_room,
    in_range,
    room,
    sampling_params,
    with_grammar,
)
from deployments.api.sampling.prompt_scores import PromptScores, requested_scores, scores_of
from deployments.api.served.served_model import ServedModel
from deployments.api.served.text_codec import TextCodec
from deployments.config.limits import Limits
from engine.values.logprobs import TokenLogprobs


async def plan_completion(limits: Limits, served: ServedModel, request: CompletionRequest) -> GenerationPlan:
    """Check and tokenize a request, and plan what to generate. Raises `ApiError`."""
    model = served.card
    at_most(limits, "max_prompts", "prompt", len(request.prompt), "prompts")
    in_range("logprobs", request.logprobs, 0, limits.max_completion_logprobs, "limits.max_completion_logprobs")
    num_scored = requested_scores(request, limits, echoed=request.logprobs if request.echo else None)
    asked = asked_tokens(request)
    max_tokens = COMPLETION_MAX_TOKENS if asked is None else asked
    is_silent = max_tokens == 0 and (bool(request.echo) or num_scored is not None)
    candidates = num_candidates(request, limits)
    sampling = sampling_params(
        request,
        limits,
        model,
        max_tokens=1 if is_silent else max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=num_scored,
    )
    grammar = await requested_grammar(limits, served.grammars, request, served.codec.special_id)
    grammar = await restricted(limits, served, request, grammar)
    if never_ends(model, request):
        sampling = replace(sampling, min_tokens=sampling.max_tokens)
    sampling = with_beams(with_grammar(sampling, grammar), request, limits, candidates)
    cut = Truncation.asked(request, model.max_model_len - max(max_tokens, 0 if is_silent else 1))
    check = partial(_check_fits, request, served, asked, is_silent=is_silent)
    prompts = [await _prompt(limits, served, prompt, bool(request.echo), cut, check) for prompt in request.prompt]
    options = request.stream_options
    context = ResponseContext.begin(
        "cmpl",
        model.id,
        prompts,
        num_choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        with_token_ids=bool(request.return_token_ids),
        include_timings=bool(request.include_timings),
        system_fingerprint=model.fingerprint,
    )
    scores = scores_of(request, limits, [prompt.token_ids for prompt in prompts], num_scored, candidates)
    names = NumberedTokens(served.codec) if request.return_tokens_as_token_ids else None
    encoder = CompletionResponseEncoder(
        context, served.codec, request.logprobs, scores, request.prompt_logprobs, names
    )
    return GenerationPlan(
        served,
        request,
        sampling,
        encoder,
        candidates,
        continues_text=True,
        echoes_only=is_silent and scores is None,
        scores=scores,
        scores_only=is_silent and scores is not None,
        cuts_answers=asked is None,
    )


def _check_fits(
    request: CompletionRequest, served: ServedModel, asked: int | None, ids: list[int], *, is_silent: bool
) -> None:
    """Raise `ApiError` for a prompt that leaves no room for its answer, or is none. The default of `max_tokens` is
    cut to what fits. A prompt that is only scored or echoed may take all of the context.
    """
    check_prompt(served.card, ids, "prompt", is_continued=not is_silent)
    if asked is None:
        left = room(len(ids), served.card.max_model_len, "prompt")
        in_range("min_tokens", request.min_tokens, 0, min(left, COMPLETION_MAX_TOKENS))
    elif not is_silent:
        check_room(len(ids), asked, served.card, "prompt")


async def _prompt(
    limits: Limits,
    served: ServedModel,
    given: str | list[int],
    echo: bool,
    cut: Truncation | None,
    check: Callable[[list[int]], None],
) -> EncodedPrompt:
    """Return a prompt's token ids, and its text as it was given if it is echoed. `check` raises `ApiError`."""
    if isinstance(given, str):
        ids = await encode_text(limits, served, given, cut=cut)
    else:
        ids = given if cut is None else cut.of(given)
    # An empty text counts as an empty prompt, although the tokenizer adds special tokens to it.
    await near_or_far(len(ids), limits.inline_text_chars, partial(check, ids if given else []))
    if not echo or (isinstance(given, str) and cut is None):
        return EncodedPrompt(ids, given if echo and isinstance(given, str) else None)
    return EncodedPrompt(
        ids, await near_or_far(len(ids), limits.inline_text_chars, partial(served.codec.decode, ids))
    )


class CompletionResponseEncoder:
    """Encodes answers as text completions."""

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
