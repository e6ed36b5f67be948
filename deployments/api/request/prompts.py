"""Turns what a client sent into token ids that fit the model, in a thread where that takes long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from deployments.api.conversation.template import TemplateRefused
from deployments.api.errors import invalid
from deployments.api.request.protocol import Message
from deployments.api.request.sampling import context_exceeded, in_vocabulary, room
from deployments.api.request_metrics import count_conversation
from deployments.api.service import ModelCard, ServedModel
from deployments.api.tools.protocol import Function
from deployments.api.tools.rendering import messages_as_text, plain_messages, plain_tools
from deployments.api.tools.requested import check_conversation, size_of
from deployments.config.limits import Limits

_Result = TypeVar("_Result")


async def encode_text(
    limits: Limits, served: ServedModel, text: str, *, param: str = "prompt", add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text prompt."""
    _refuse_hopeless(served, len(text), param)
    encode = functools.partial(served.codec.encode, text, add_special_tokens=add_special_tokens)
    return await _near_or_far(len(text), limits.inline_text_chars, encode)


async def encode_messages(
    limits: Limits,
    served: ServedModel,
    messages: Sequence[Message],
    functions: Sequence[Function] = (),
    *,
    add_generation_prompt: bool = True,
    salt: str = "",
) -> list[int]:
    """Return the token ids of a conversation that shows `functions` to the model.

    What other requests with the same `salt` have sent already is not tokenized again.
    """
    check_conversation(limits, messages)
    calls = (len(call.function.arguments) for message in messages for call in message.tool_calls)
    size = sum(len(message.content) for message in messages) + sum(calls)
    _refuse_hopeless(served, size, "messages")
    dialect, tools = served.codec.dialect, plain_tools(functions)
    if dialect.tools is None or dialect.has_place_for_tools:
        plain = plain_messages(messages)
    else:
        plain, tools = messages_as_text(messages, functions, dialect.tools), []
    render = functools.partial(
        served.codec.render_chat, plain, tools, add_generation_prompt=add_generation_prompt, salt=salt
    )
    try:
        texts = await _near_or_far(size + size_of(functions), limits.inline_body_bytes, render)
    except TemplateRefused as error:
        raise invalid(str(error), "messages") from None
    count_conversation(served.metrics, texts.num_chars, texts.num_new_chars)
    return await _near_or_far(texts.num_new_chars, limits.inline_text_chars, texts.encode)


def check_prompt(model: ModelCard, ids: list[int], param: str) -> None:
    """Raise `ApiError` for a prompt that is empty, too long or has ids outside the vocabulary."""
    if not ids:
        raise invalid(f"{param} is empty; it needs at least one token.", param)
    room(len(ids), model.max_model_len, param)
    in_vocabulary(param, ids, model.vocab_size)


def _refuse_hopeless(served: ServedModel, chars: int, param: str) -> None:
    """Refuse text that cannot fit whatever its tokens are, without spending seconds on tokenizing it."""
    least = chars // served.codec.max_token_chars
    if least >= served.card.max_model_len:
        raise context_exceeded(
            f"This model's context is {served.card.max_model_len} tokens, but the prompt has at least {least}.",
            param,
        )


async def _near_or_far(size: int, inline: int, work: Callable[[], _Result]) -> _Result:
    """Do work at once if it is at most as large as `inline`, and in a thread if it is larger."""
    return work() if size <= inline else await asyncio.to_thread(work)
