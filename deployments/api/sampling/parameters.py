"""Turns a request's fields into `SamplingParams`, applying the API's defaults, its limits and the context size."""

from __future__ import annotations

from dataclasses import replace
from secrets import randbelow
from typing import Protocol

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import at_most, in_range, in_vocabulary
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.served.served_model import ModelCard
from deployments.config.limits import Limits
from engine.grammar.spec import Grammar
from engine.values.sampling_params import MAX_SEED, InvalidSamplingParams, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Default of `max_tokens` for /v1/completions, as in OpenAI's API."""


def sampling_params(
    request: ChatRequest | CompletionRequest,
    limits: Limits,
    model: ModelCard,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters of the first choice. Raises `ApiError` 400 that names the field."""
    _check_limits(request, limits, model)
    given = {name: value for name in _PASSED if (value := getattr(request, name)) is not None}
    is_renamed = request.repetition_penalty is None
    if (penalty := request.repeat_penalty) is not None and given.setdefault(
        "repetition_penalty", penalty
    ) != penalty:
        raise invalid("repetition_penalty and repeat_penalty differ; give one of them.", "repeat_penalty")
    if given.get("top_k") == -1:  # vLLM's and SGLang's spelling of "all"
        given["top_k"] = 0
    if model.sampling_defaults and not request.use_beam_search:
        given = {name: value for name, value in model.sampling_defaults.items() if name != "max_tokens"} | given
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            logit_bias=request.logit_bias,
            seed=randbelow(MAX_SEED) if request.seed is None else request.seed,
            **given,
        )
    except InvalidSamplingParams as error:
        name = "repeat_penalty" if is_renamed and error.param == "repetition_penalty" else error.param
        raise invalid(f"{error}.".replace(error.param, name, 1), name) from None


_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def tokens_to_generate(asked: int | None, left: int, model: ModelCard) -> int:
    """Return how many tokens a chat may generate where `left` fit: as asked, or by the model's default."""
    return min(int(model.sampling_defaults.get("max_tokens", left)), left) if asked is None else asked


def with_max_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """Set `max_tokens`. Raises `ApiError` when `min_tokens` is larger."""
    if max_tokens == sampling.max_tokens:
        return sampling
    try:
        return replace(sampling, max_tokens=max_tokens)
    except InvalidSamplingParams as error:
        raise invalid(f"{error}.", error.param) from None


def at_most_tokens(sampling: SamplingParams, most: int) -> SamplingParams:
    """Return the parameters of an answer that has at most so many tokens."""
    if sampling.max_tokens <= most:
        return sampling
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def with_grammar(sampling: SamplingParams, grammar: Grammar | None) -> SamplingParams:
    """Set the grammar that the answer must match. Raises `ApiError` when another parameter excludes it."""
    if grammar == sampling.grammar:
        return sampling
    try:
        return replace(sampling, grammar=grammar)
    except InvalidSamplingParams as error:
        if error.param == "grammar":
            raise invalid(
                "use_beam_search cannot be combined with a format that the answer must match; leave one out.",
                "use_beam_search",
            ) from None
        raise invalid(f"{error}.", error.param) from None


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of another choice of a prompt, with other noise. Only the first scores the prompt."""
    assert sampling.seed is not None
    if choice == 0:
        return sampling
    seed = sampling.seed + choice
    return replace(sampling, seed=seed if seed <= MAX_SEED else seed - 2 * MAX_SEED, prompt_logprobs=None)


def _check_limits(request: ChatRequest | CompletionRequest, limits: Limits, model: ModelCard) -> None:
    """Check the limits in which the server's settings are stricter than the engine, before anything is copied."""
    at_most(limits, "max_stop_strings", "stop", len(request.stop), "strings")
    for text in request.stop:
        if not 0 < len(text) <= limits.max_stop_string_chars:
            bound = f"1 to {limits.max_stop_string_chars} characters (limits.max_stop_string_chars)"
            raise invalid(f"stop must hold strings of {bound}.", "stop")
    ids, bias = request.stop_token_ids, request.logit_bias
    at_most(limits, "max_stop_token_ids", "stop_token_ids", len(ids), "ids")
    at_most(limits, "max_logit_bias", "logit_bias", len(bias), "entries")
    in_vocabulary("stop_token_ids", ids, model.vocab_size)
    in_vocabulary("logit_bias", bias, model.vocab_size)
    check_hints(request, limits, model)
    in_range("n", request.n, 1, limits.max_choices, "limits.max_choices")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed when stream is true.", "stream_options")


class Hinted(Protocol):
    """A request with hints on how to compute it."""

    priority: int | None
    truncate_prompt_tokens: int | None
    cache_salt: str | None
    prompt_cache_key: str | None


def check_hints(request: Hinted, limits: Limits, model: ModelCard) -> None:
    """Raise `ApiError` 400 for a hint that is out of its bounds."""
    in_range("priority", request.priority, -limits.max_priority, limits.max_priority, "limits.max_priority")
    if request.truncate_prompt_tokens != -1:
        in_range("truncate_prompt_tokens", request.truncate_prompt_tokens, 1, model.max_model_len)
    for name in ("cache_salt", "prompt_cache_key"):
        at_most(limits, "max_hint_chars", name, len(getattr(request, name) or ""), "characters")


def asked_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    """Return the output limit from its newer or older field; None if there is neither."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    in_range("max_completion_tokens", new, 1, 2**31 - 1)
    return old if new is None else new
