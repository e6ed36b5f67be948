"""Plans POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from deployments.api.base.errors import invalid
from deployments.api.constraints.answer_constraint import answer_constraint
from deployments.api.constraints.restrictions import never_ends, restricted
from deployments.api.constraints.structured import requested_grammar
from deployments.api.constraints.thinking_budget import ThinkingBudget, thinking_budget
from deployments.api.fields.protocol import ChatRequest
from deployments.api.generation.chat_answer import ChatResponseEncoder
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.logprobs import NumberedTokens
from deployments.api.output.response_encoder import EncodedPrompt, ResponseContext
from deployments.api.prompt.requested_tools import RequestedTools, requested_tools
from deployments.api.prompt.template_options import template_options
from deployments.api.prompt.token_ids import Truncation, check_prompt, encode_messages
from deployments.api.sampling.beams import with_beams
from deployments.api.sampling.best_of import num_candidates
from deployments.api.sampling.parameters import (
    asked_tokens,
    check_room,
    in_range,
    room,
    sampling_params,
    tokens_to_generate,
    with_grammar,
    with_max_tokens,
)
from deployments.api.sampling.prompt_scores import requested_scores, scores_of
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.sampling_params import SamplingParams


async def plan_chat(
    limits: Limits, served: ServedModel, request: ChatRequest, salt: str, *, cuts_answer: bool = False
) -> GenerationPlan:
    """Check and tokenize a request, and plan what to generate. `salt` is the cache's. Raises `ApiError`.

    With `cuts_answer`, an answer for which the context may have no room is cut there instead of refused.
    """
    model = served.card
    # All but the prompt's length is checked before the prompt is worked on.
    asked, logprobs, num_scored, sampling, candidates, budget = check_chat(limits, served, request)
    grammar = await requested_grammar(limits, served.grammars, request, served.codec.special_id)
    sampling = with_grammar(sampling, grammar)
    cut = Truncation.asked(request, model.max_model_len - (asked or 1))
    tools, ids = await encode_conversation(limits, served, request, salt, cut)
    check_prompt(model, ids, "messages")
    left = room(len(ids), model.max_model_len, "messages")
    asked = tokens_to_generate(asked, left, model)
    if cuts_answer and asked > left:
        asked = left
    check_room(len(ids), asked, model, "messages")
    scores = scores_of(request, limits, [ids], num_scored, candidates)
    options = request.stream_options
    context = ResponseContext.begin(
        "chatcmpl",
        model.id,
        [EncodedPrompt(ids)],
        num_choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        with_token_ids=bool(request.return_token_ids),
        include_timings=bool(request.include_timings),
        system_fingerprint=model.fingerprint,
    )
    names = NumberedTokens(served.codec) if request.return_tokens_as_token_ids else None
    encoder = ChatResponseEncoder(context, served.codec, logprobs, scores, names)
    encoder.shows_reasoning = request.include_reasoning is not False
    encoder.has_old_calls = bool(request.functions)
    parse_spec, grammar = await answer_constraint(limits, served, grammar, tools, ids, budget)
    grammar = await restricted(limits, served, request, grammar)
    sampling = with_grammar(with_max_tokens(sampling, asked), grammar)
    if never_ends(model, request):
        sampling = replace(sampling, min_tokens=asked)
    sampling = with_beams(sampling, request, limits, candidates)
    return GenerationPlan(
        served,
        request,
        sampling,
        encoder,
        candidates,
        parse_spec=parse_spec,
        continues_text=bool(request.continue_final_message and request.messages[-1].content),
        scores=scores,
    )


class _Checked(NamedTuple):
    """What a request asks for, besides its prompt."""

    max_tokens: int | None
    logprobs: int | None
    num_scored: int | None
    sampling: SamplingParams
    num_candidates: int
    budget: ThinkingBudget | None


def check_chat(limits: Limits, served: ServedModel, request: ChatRequest) -> _Checked:
    """Check what a request asks for, besides its prompt and its grammar. Raises `ApiError`."""
    asked, logprobs = asked_tokens(request), _asked_logprobs(request, limits.max_top_logprobs)
    num_scored = requested_scores(request, limits)
    unbounded = 2**31 - 1 if asked is None else asked
    sampling = sampling_params(
        request, limits, served.card, max_tokens=unbounded, logprobs=logprobs, prompt_logprobs=num_scored
    )
    budget = thinking_budget(served, request)
    return _Checked(asked, logprobs, num_scored, sampling, num_candidates(request, limits), budget)


async def encode_conversation(
    limits: Limits, served: ServedModel, request: ChatRequest, salt: str, cut: Truncation | None = None
) -> tuple[RequestedTools | None, list[int]]:
    """Return the tools that an answer may call, and the prompt's token ids, which show them. Raises `ApiError`."""
    options = template_options(request, limits)
    tools = await requested_tools(limits, request, served.codec.dialect.tools)
    functions = tools.offered.functions if tools else ()
    return tools, await encode_messages(
        limits, served, request.messages, functions, options=options, salt=salt, cut=cut
    )


def _asked_logprobs(request: ChatRequest, limit: int) -> int | None:
    in_range("top_logprobs", request.top_logprobs, 0, limit, "limits.max_top_logprobs")
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    return None
