"""Plans POST /v1/chat/completions, in three steps.

request ─▶ check: fields, form, tools ─▶ tokenize: prompt, room for the answer ─▶ build: grammar, encoder ─▶ plan
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import in_range
from deployments.api.constraints.answer_constraint import answer_constraint
from deployments.api.constraints.restrictions import never_ends, restricted
from deployments.api.constraints.structured import requested_grammar
from deployments.api.constraints.thinking_budget import ThinkingBudget, thinking_budget
from deployments.api.conversation.options import TemplateOptions
from deployments.api.fields.protocol import ChatRequest
from deployments.api.generation.chat_answer import ChatResponseEncoder
from deployments.api.generation.generation_plan import GenerationPlan, context_of
from deployments.api.output.logprobs import NumberedTokens
from deployments.api.output.response_encoder import AnswerName, EncodedPrompt, ResponseContext
from deployments.api.prompt.requested_tools import RequestedTools, requested_tools
from deployments.api.prompt.template_options import template_options
from deployments.api.prompt.token_ids import Truncation, check_prompt, encode_messages
from deployments.api.sampling.beams import with_beams
from deployments.api.sampling.best_of import num_candidates
from deployments.api.sampling.parameters import (
    asked_tokens,
    sampling_params,
    tokens_to_generate,
    with_grammar,
    with_max_tokens,
)
from deployments.api.sampling.prompt_scores import PromptScores, requested_scores, scores_of
from deployments.api.served.context_room import check_room, room
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.grammar.spec import Grammar
from engine.values.sampling_params import SamplingParams


async def plan_chat(
    limits: Limits,
    served: ServedModel,
    request: ChatRequest,
    salt: str,
    name: AnswerName | str = "chatcmpl",
    *,
    cuts_answer: bool = False,
) -> GenerationPlan:
    """Check and tokenize a request, and plan what to generate. `salt` is the cache's. Raises `ApiError`.

    With `cuts_answer`, an answer for which the context may have no room is cut there instead of refused.
    """
    checked = await check_chat(limits, served, request)
    prompt = await tokenize_chat(limits, served, request, checked, salt, cuts_answer=cuts_answer)
    return await build_chat(limits, served, request, checked, prompt, name)


async def count_prompt(limits: Limits, served: ServedModel, request: ChatRequest, salt: str) -> int:
    """Return the number of tokens of a conversation's prompt. Raises `ApiError`."""
    return len(await _encoded(limits, served, request, await _shown(limits, served, request), salt))


# --- check: all but the length of the prompt, before the prompt is worked on -------------------------------


class AskedAnswer(NamedTuple):
    """The answer that a request's fields ask for."""

    max_tokens: int | None
    logprobs: int | None
    num_scored: int | None
    sampling: SamplingParams
    num_candidates: int
    budget: ThinkingBudget | None


class _Shown(NamedTuple):
    """Inputs of the model besides the messages."""

    options: TemplateOptions
    tools: RequestedTools | None


class CheckedChat(NamedTuple):
    """The checked fields of a request, besides its messages."""

    answer: AskedAnswer
    grammar: Grammar | None
    """The form of the answer."""
    shown: _Shown


async def check_chat(limits: Limits, served: ServedModel, request: ChatRequest) -> CheckedChat:
    """Check a request's fields, besides its messages. Raises `ApiError`."""
    answer = check_answer(limits, served, request)
    grammar = await requested_grammar(limits, served.grammars, request, served.codec.special_id)
    answer = answer._replace(sampling=with_grammar(answer.sampling, grammar))
    return CheckedChat(answer, grammar, await _shown(limits, served, request))


def check_answer(limits: Limits, served: ServedModel, request: ChatRequest) -> AskedAnswer:
    """Check a request's fields about its answer, except its form. Raises `ApiError`."""
    asked, logprobs = asked_tokens(request), _asked_logprobs(request, limits.max_top_logprobs)
    num_scored = requested_scores(request, limits)
    unbounded = 2**31 - 1 if asked is None else asked
    sampling = sampling_params(
        request, limits, served.card, max_tokens=unbounded, logprobs=logprobs, prompt_logprobs=num_scored
    )
    budget = thinking_budget(served, request)
    return AskedAnswer(asked, logprobs, num_scored, sampling, num_candidates(request, limits), budget)


def _asked_logprobs(request: ChatRequest, limit: int) -> int | None:
    in_range("top_logprobs", request.top_logprobs, 0, limit, "limits.max_top_logprobs")
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    return None


async def _shown(limits: Limits, served: ServedModel, request: ChatRequest) -> _Shown:
    options = template_options(request, limits)
    return _Shown(options, await requested_tools(limits, request, served.codec.dialect.tools))


# --- tokenize ----------------------------------------------------------------------------------------------


class ChatPrompt(NamedTuple):
    """A prompt that leaves room for its answer."""

    token_ids: list[int]
    max_tokens: int
    """Most tokens of the answer."""


async def tokenize_chat(
    limits: Limits,
    served: ServedModel,
    request: ChatRequest,
    checked: CheckedChat,
    salt: str,
    *,
    cuts_answer: bool = False,
) -> ChatPrompt:
    """Tokenize a conversation, and find out how long its answer may be. Raises `ApiError`."""
    model, asked = served.card, checked.answer.max_tokens
    cut = Truncation.asked(request, model.max_model_len - (asked or 1))
    ids = await _encoded(limits, served, request, checked.shown, salt, cut)
    check_prompt(model, ids, "messages")
    left = room(len(ids), model.max_model_len, "messages")
    max_tokens = tokens_to_generate(asked, left, model)
    if cuts_answer and max_tokens > left:
        max_tokens = left
    check_room(len(ids), max_tokens, model, "messages")
    return ChatPrompt(ids, max_tokens)


async def _encoded(
    limits: Limits,
    served: ServedModel,
    request: ChatRequest,
    shown: _Shown,
    salt: str,
    cut: Truncation | None = None,
) -> list[int]:
    functions = shown.tools.offered.functions if shown.tools else ()
    return await encode_messages(
        limits, served, request.messages, functions, options=shown.options, salt=salt, cut=cut
    )


# --- build -------------------------------------------------------------------------------------------------


async def build_chat(
    limits: Limits,
    served: ServedModel,
    request: ChatRequest,
    checked: CheckedChat,
    prompt: ChatPrompt,
    name: AnswerName | str,
) -> GenerationPlan:
    """Plan an answer, with the one grammar that it must match. Raises `ApiError` where constraints exclude
    each other.
    """
    answer = checked.answer
    scores = scores_of(request, limits, [prompt.token_ids], answer.num_scored, answer.num_candidates)
    context = context_of(name, served, request, [EncodedPrompt(prompt.token_ids)])
    encoder = _encoder(served, request, context, answer, scores)
    parse_spec, grammar = await answer_constraint(
        limits, served, checked.grammar, checked.shown.tools, prompt.token_ids, answer.budget
    )
    grammar = await restricted(limits, served, request, grammar)
    sampling = with_grammar(with_max_tokens(answer.sampling, prompt.max_tokens), grammar)
    if never_ends(served.card, request):
        sampling = replace(sampling, min_tokens=prompt.max_tokens)
    return GenerationPlan(
        served,
        request,
        with_beams(sampling, request, limits, answer.num_candidates),
        encoder,
        answer.num_candidates,
        parse_spec=parse_spec,
        continues_text=bool(request.continue_final_message and request.messages[-1].content),
        scores=scores,
    )


def _encoder(
    served: ServedModel,
    request: ChatRequest,
    context: ResponseContext,
    answer: AskedAnswer,
    scores: PromptScores | None,
) -> ChatResponseEncoder:
    names = NumberedTokens(served.codec) if request.return_tokens_as_token_ids else None
    encoder = ChatResponseEncoder(context, served.codec, answer.logprobs, scores, names)
    encoder.shows_reasoning = request.include_reasoning is not False
    encoder.has_old_calls = bool(request.functions)
    return encoder
