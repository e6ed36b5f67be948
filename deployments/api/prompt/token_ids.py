"""Turns prompts and conversations into token ids that fit the model, off the event loop if that takes long."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.api.base.errors import ApiError, invalid
from deployments.api.base.field_checks import in_vocabulary
from deployments.api.base.off_loop import near_or_far
from deployments.api.conversation.encoder import TooManyTokens, UnencodedTexts
from deployments.api.conversation.options import PLAIN_OPTIONS, TemplateOptions
from deployments.api.conversation.template import TemplateRefused, TemplateRunaway
from deployments.api.fields.protocol import Message
from deployments.api.fields.tools import Function
from deployments.api.prompt.rendering import Plain, merge_systems, messages_as_text, plain_messages, plain_tools
from deployments.api.prompt.requested_tools import check_conversation, size_of
from deployments.api.record.request_metrics import count_conversation
from deployments.api.served.context_room import check_in_context, context, context_exceeded, room
from deployments.api.served.served_model import ModelCard, ServedModel
from deployments.config.limits import Limits

logger = logging.getLogger(__name__)
_MESSAGE_CHARS = 512
"""Characters whose rendering takes about as long as the other work for each message and each call."""


class Shortened(Protocol):
    """A request that says how its prompts are shortened."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """Most tokens of a prompt; -1: as many as fit."""

    @property
    def truncation_side(self) -> str | None:
        """Where a longer prompt is cut."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt is shortened: `truncate_prompt_tokens`, `truncation_side`."""

    num_tokens: int
    """Most tokens that it keeps."""
    keeps_end: bool

    @classmethod
    def asked(cls, request: Shortened, room: int) -> Truncation | None:
        """Return how a request's prompts are shortened, where `room` tokens fit; None if they are not."""
        most = request.truncate_prompt_tokens
        return (
            None if most is None else cls(max(room, 1) if most == -1 else most, request.truncation_side != "right")
        )

    def of(self, ids: list[int]) -> list[int]:
        """Return a prompt, shortened."""
        return ids[-self.num_tokens :] if self.keeps_end else ids[: self.num_tokens]


async def encode_text(
    limits: Limits,
    served: ServedModel,
    text: str,
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
    cut: Truncation | None = None,
) -> list[int]:
    """Return the token ids of a text prompt. Raises `ApiError` when it cannot fit the model's context."""
    most = served.card.max_model_len if cut is None else limits.max_truncated_tokens
    refuse_hopeless(served, len(text), param, most)
    encode = functools.partial(served.codec.encode, text, add_special_tokens=add_special_tokens, max_tokens=most)
    try:
        ids = await near_or_far(len(text), limits.inline_text_chars, encode)
    except TooManyTokens as error:
        raise hopeless(served, error.least, param, most) from None
    return ids if cut is None else cut.of(ids)


async def encode_messages(
    limits: Limits,
    served: ServedModel,
    messages: Sequence[Message],
    functions: Sequence[Function] = (),
    *,
    options: TemplateOptions = PLAIN_OPTIONS,
    salt: str = "",
    cut: Truncation | None = None,
) -> list[int]:
    """Return the token ids of a conversation that shows `functions` to the model.

    Text that other requests with the same `salt` have sent is not tokenized again.
    """
    prepare = functools.partial(
        _rendered,
        limits,
        served,
        messages,
        functions,
        options=options,
        salt=salt,
        most=served.card.max_model_len if cut is None else limits.max_truncated_tokens,
    )
    texts = await near_or_far(
        _weight(messages) + size_of(functions) + options.size, limits.inline_body_bytes, prepare
    )
    count_conversation(served.metrics, texts.num_chars, texts.num_new_chars)
    # Text that a template omits does not count against the context: the rendered text decides.
    most = served.card.max_model_len if cut is None else limits.max_truncated_tokens
    refuse_hopeless(served, texts.num_chars, "messages", most)
    encode = functools.partial(texts.encode, most)
    try:
        ids = await near_or_far(texts.num_new_chars, limits.inline_text_chars, encode)
    except TooManyTokens as error:
        raise hopeless(served, error.least, "messages", most) from None
    return ids if cut is None else cut.of(ids)


def _rendered(
    limits: Limits,
    served: ServedModel,
    messages: Sequence[Message],
    functions: Sequence[Function],
    *,
    options: TemplateOptions,
    salt: str,
    most: int,
) -> UnencodedTexts:
    """Check a conversation and return its texts. Raises `ApiError`."""
    check_conversation(limits, messages)
    calls = (len(call.function.arguments) for message in messages for call in message.tool_calls)
    refuse_hopeless(served, sum(len(message.content) for message in messages) + sum(calls), "messages", most)
    dialect = served.codec.dialect
    form = None if dialect.has_place_for_tools else dialect.tools
    show = functools.partial(
        plain_messages,
        messages,
        limits.max_json_depth,
        short_ids=dialect.tools is not None and dialect.tools.has_short_ids,
        spells=None if dialect.has_place_for_calls else dialect.tools,
    )
    if form is None:
        plain, tools = show(), plain_tools(functions)
    else:
        plain, tools = messages_as_text(messages, functions, form), []
    try:
        return _texts(served, plain, tools, options, salt)
    except TemplateRunaway as error:
        logger.warning("%s", error)
        headers = {"x-should-retry": "false"}
        raise ApiError(500, str(error), code="chat_template_error", headers=headers) from None
    except TemplateRefused as error:
        if form is None and any(_has_text_as_arguments(message) for message in plain):
            plain = show(wraps_text=True)
            with contextlib.suppress(TemplateRefused):
                return _texts(served, plain, tools, options, salt)
        raise invalid(str(error), "messages") from None


def _texts(
    served: ServedModel, plain: list[Plain], tools: list[Plain], options: TemplateOptions, salt: str
) -> UnencodedTexts:
    if served.codec.dialect.merges_systems and any(message["role"] == "system" for message in plain[1:]):
        plain = merge_systems(plain)
    return served.codec.render_chat(plain, tools, options=options, salt=salt)


def _has_text_as_arguments(message: Plain) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", ()))


def _weight(messages: Sequence[Message]) -> int:
    """Return how much work a conversation is, in characters of all fields, which the template may show or not."""
    weight = 0
    for message in messages:
        weight += _MESSAGE_CHARS + len(message.content) + len(message.reasoning or "") + len(message.name or "")
        weight += len(message.tool_call_id or "")
        for call in message.tool_calls:
            weight += _MESSAGE_CHARS + len(call.id or "") + len(call.function.arguments)
    return weight


def check_prompt(model: ModelCard, ids: list[int], param: str, *, is_continued: bool = True) -> None:
    """Raise `ApiError` for a prompt that is empty, too long or has ids outside the vocabulary. One that is not
    continued may take all of the context.
    """
    if not ids:
        raise invalid(f"{param} is empty; it needs at least one token.", param)
    if is_continued:
        room(len(ids), model.max_model_len, param)
    check_in_context(len(ids), model, param)
    in_vocabulary(param, ids, model.vocab_size)


def refuse_hopeless(served: ServedModel, chars: int, param: str, most: int) -> None:
    """Refuse text that must have more than `most` tokens, without spending seconds on tokenizing it."""
    least = chars // served.codec.max_token_chars
    if least > most:
        raise hopeless(served, least, param, most)


def hopeless(served: ServedModel, least: int, param: str, most: int) -> ApiError:
    """Create the 400 for text that has `least` tokens or more, and so more than `most`."""
    if most != served.card.max_model_len:
        return context_exceeded(
            f"{param} has at least {least} tokens, but at most {most} can be truncated "
            "(limits.max_truncated_tokens).",
            param,
        )
    return context_exceeded(
        f"{context(served.card.max_model_len)}, but the prompt has at least {least}. Shorten the prompt.", param
    )
