"""Plans POST /v1/messages, and counts for POST /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from deployments.api.anthropic.encoder import MessagesEncoder
from deployments.api.anthropic.translation import AskedMessage, in_own_words
from deployments.api.base.errors import ApiError
from deployments.api.dialects.reasoning import THINK
from deployments.api.fields.protocol import ChatRequest
from deployments.api.generation.chat import count_prompt, plan_chat
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.response_encoder import AnswerName
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits


async def plan_message(
    limits: Limits, served: ServedModel, asked: AskedMessage, salt: str, name: AnswerName
) -> GenerationPlan:
    """Plan what to generate as for a chat completion, to be answered as a message. Raises `ApiError`.

    Where the context has less room than `max_tokens` asks for, the answer is cut there: clients of Anthropic's API
    ask for as much as Anthropic's models can write.
    """
    chat = _with_budget(asked, served)
    try:
        plan = await plan_chat(limits, served, chat, salt, name, cuts_answer=True)
    except ApiError as error:
        raise in_own_words(error) from None
    encoder = MessagesEncoder(
        replace(plan.encoder.context, include_usage=True),
        shows_thinking=asked.shows_thinking,
        is_cut_by_context=plan.sampling.max_tokens < (chat.max_tokens or 0),
    )
    return replace(plan, encoder=encoder)


def _with_budget(asked: AskedMessage, served: ServedModel) -> ChatRequest:
    """Return a request with the budget of its thinking, where there is one that the answer could exceed and the
    model's thinking can be ended: clients of Anthropic's API give one to every model.
    """
    chat, budget = asked.chat, asked.thinking_budget
    most = min(chat.max_tokens or 0, served.card.max_model_len)
    marks = served.codec.dialect.thoughts or THINK
    if budget is None or budget >= most or served.codec.single_token(marks.closes) is None:
        return chat
    return chat.model_copy(update={"thinking_token_budget": budget})


async def count_tokens(limits: Limits, served: ServedModel, chat: ChatRequest, salt: str) -> int:
    """Return the number of tokens of a conversation's prompt. Raises `ApiError`."""
    try:
        return await count_prompt(limits, served, chat, salt)
    except ApiError as error:
        raise in_own_words(error) from None
