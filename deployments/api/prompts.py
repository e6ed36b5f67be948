"""From what a client sent to token ids that fit the model: off the event loop when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deployments.api.errors import invalid
from deployments.api.limits import Limits
from deployments.api.protocol import Message
from deployments.api.sampling import context_exceeded, in_vocabulary, room
from deployments.api.service import ModelCard, ServedModel
from deployments.api.text_codec import TemplateRefused


async def encode_text(
    limits: Limits, served: ServedModel, text: str, *, param: str = "prompt", add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text prompt."""
    _refuse_hopeless(served, len(text), param)
    ids = await _near_or_far(
        limits,
        len(text),
        lambda: served.codec.encode(text, add_special_tokens=add_special_tokens),
    )
    return ids


async def encode_messages(
    limits: Limits, served: ServedModel, messages: list[Message], *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation."""
    size = sum(len(message.content) for message in messages)
    _refuse_hopeless(served, size, "messages")
    plain = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return await _near_or_far(
            limits,
            size,
            lambda: served.codec.encode_chat(plain, add_generation_prompt=add_generation_prompt),
        )
    except TemplateRefused as error:
        raise invalid(str(error), "messages") from None


def check_prompt(model: ModelCard, ids: list[int], param: str) -> None:
    """Raise `ApiError` for a prompt that is empty, too long or not of this model's tokens."""
    if not ids:
        raise invalid(f"{param} is empty: it needs at least one token.", param)
    room(len(ids), model.max_model_len, param)
    in_vocabulary(param, ids, model.vocab_size)


def _refuse_hopeless(served: ServedModel, chars: int, param: str) -> None:
    """Megabytes of text cannot fit whatever their tokens are: do not spend seconds on finding out."""
    least = chars // served.codec.max_token_chars
    if least >= served.card.max_model_len:
        raise context_exceeded(
            f"This model's context is {served.card.max_model_len} tokens, but the prompt has at least {least}.",
            param,
        )


async def _near_or_far(limits: Limits, size: int, encode: Callable[[], list[int]]) -> list[int]:
    if size <= limits.inline_text_chars:
        return encode()
    return await asyncio.to_thread(encode)
