"""Plans POST /v1/completions, in three steps: check the fields, tokenize the prompts, build the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from deployments.api.base.field_checks import at_most, in_range
from deployments.api.base.off_loop import near_or_far
from deployments.api.constraints.restrictions import never_ends, restricted
from deployments.api.constraints.structured import requested_grammar
from deployments.api.fields.protocol import CompletionRequest
from deployments.api.generation.completion_answer import CompletionResponseEncoder
from deployments.api.generation.generation_plan import GenerationPlan, context_of
from deployments.api.output.logprobs import NumberedTokens
from deployments.api.output.response_encoder import AnswerName, EncodedPrompt
from deployments.api.prompt.token_ids import Truncation, check_prompt, encode_text
from deployments.api.sampling.beams import with_beams
from deployments.api.sampling.best_of import num_candidates
from deployments.api.sampling.parameters import COMPLETION_MAX_TOKENS, asked_tokens, sampling_params, with_grammar
from deployments.api.sampling.prompt_scores import requested_scores, scores_of
from deployments.api.served.context_room import check_room, room
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.sampling_params import SamplingParams


async def plan_completion(
    limits: Limits, served: ServedModel, request: CompletionRequest, name: AnswerName | str = "cmpl"
) -> GenerationPlan:
    """Check and tokenize a request, and plan what to generate. Raises `ApiError`."""
    checked = await _check(limits, served, request)
    prompts = await _tokenize(limits, served, request, checked)
    return _build(limits, served, request, checked, prompts, name)


# --- check: all but the lengths of the prompts, before they are worked on ----------------------------------


class _Checked(NamedTuple):
    """The checked fields of a request, besides its prompts."""

    max_tokens: int | None
    """None: by default, or fewer where the context has no room."""
    is_silent: bool
    """Whether nothing is generated: the prompts are echoed or scored."""
    num_scored: int | None
    sampling: SamplingParams
    num_candidates: int


async def _check(limits: Limits, served: ServedModel, request: CompletionRequest) -> _Checked:
    """Check a request's fields. Raises `ApiError`."""
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
        served.card,
        max_tokens=1 if is_silent else max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=num_scored,
    )
    grammar = await requested_grammar(limits, served.grammars, request, served.codec.special_id)
    grammar = await restricted(limits, served, request, grammar)
    if never_ends(served.card, request):
        sampling = replace(sampling, min_tokens=sampling.max_tokens)
    sampling = with_beams(with_grammar(sampling, grammar), request, limits, candidates)
    return _Checked(asked, is_silent, num_scored, sampling, candidates)


# --- tokenize ----------------------------------------------------------------------------------------------


async def _tokenize(
    limits: Limits, served: ServedModel, request: CompletionRequest, checked: _Checked
) -> list[EncodedPrompt]:
    """Tokenize the prompts, which leave room for their answers. Raises `ApiError`."""
    kept_free = 0 if checked.is_silent else max(checked.sampling.max_tokens, 1)
    cut = Truncation.asked(request, served.card.max_model_len - kept_free)
    check = partial(_check_fits, request, served, checked)
    return [await _prompt(limits, served, prompt, bool(request.echo), cut, check) for prompt in request.prompt]


def _check_fits(request: CompletionRequest, served: ServedModel, checked: _Checked, ids: list[int]) -> None:
    """Raise `ApiError` for a prompt that leaves no room for its answer, or is empty. The default of `max_tokens`
    is cut to the room. A prompt that is only scored or echoed may take all of the context.
    """
    check_prompt(served.card, ids, "prompt", is_continued=not checked.is_silent)
    if checked.max_tokens is None:
        left = room(len(ids), served.card.max_model_len, "prompt")
        in_range("min_tokens", request.min_tokens, 0, min(left, COMPLETION_MAX_TOKENS))
    elif not checked.is_silent:
        check_room(len(ids), checked.max_tokens, served.card, "prompt")


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


# --- build -------------------------------------------------------------------------------------------------


def _build(
    limits: Limits,
    served: ServedModel,
    request: CompletionRequest,
    checked: _Checked,
    prompts: Sequence[EncodedPrompt],
    name: AnswerName | str,
) -> GenerationPlan:
    """Plan the answers. Raises `ApiError` where they would have too many log-probabilities of prompts."""
    candidates = checked.num_candidates
    scores = scores_of(request, limits, [prompt.token_ids for prompt in prompts], checked.num_scored, candidates)
    context = context_of(name, served, request, prompts)
    names = NumberedTokens(served.codec) if request.return_tokens_as_token_ids else None
    encoder = CompletionResponseEncoder(
        context, served.codec, request.logprobs, scores, request.prompt_logprobs, names
    )
    return GenerationPlan(
        served,
        request,
        checked.sampling,
        encoder,
        candidates,
        continues_text=True,
        echoes_only=checked.is_silent and scores is None,
        scores=scores,
        scores_only=checked.is_silent and scores is not None,
        cuts_answers=checked.max_tokens is None,
    )
