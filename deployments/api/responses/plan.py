"""Plans POST /v1/responses: the conversation that it continues, its chat request, and its stored form."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deployments.admission.rate_limits import Ticket
from deployments.api.base import exact_json
from deployments.api.base.errors import ApiError, invalid, log_failure
from deployments.api.base.field_checks import at_most
from deployments.api.base.off_loop import near_or_far
from deployments.api.constraints.restrictions import restricted
from deployments.api.fields.protocol import ChatRequest, parse
from deployments.api.generation.chat import (
    ChatPrompt,
    build_chat,
    check_answer,
    check_chat,
    count_prompt,
    tokenize_chat,
)
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.http.access import as_tenant
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.scopes import request_id
from deployments.api.http.transport import json_in_pieces
from deployments.api.output.response_encoder import AnswerName, encode_json
from deployments.api.responses.background import ResponseJob, scope_of
from deployments.api.responses.continued import of_job, of_stored
from deployments.api.responses.conversations import Conversations, joined
from deployments.api.responses.encoder import ResponseObject, ResponsesEncoder
from deployments.api.responses.ids import response_of
from deployments.api.responses.items import Item, references, taken_items
from deployments.api.responses.kept import KeptResponses
from deployments.api.responses.protocol import InputTokensRequest, ResponsesRequest
from deployments.api.responses.record import INLINE_BYTES, ResponseKeeper
from deployments.api.responses.stored import Conversation, Shelf, StoredResponse, output_of
from deployments.api.responses.tools import ShownTool, shown_tools
from deployments.api.responses.translation import as_named_here, chat_request
from deployments.api.served.served_model import ServedModel
from deployments.api.streams.asked import AskedStream
from deployments.config.limits import Limits
from deployments.config.tenants import Tenant

_TOKEN_BYTES = 16
"""Bytes of a request, for each token of its prompt, that are not counted while its answer is made, as admission
bounds the tokens."""
logger = logging.getLogger(__name__)

_ANSWER_SHARE = 8
"""If the oldest items may be omitted, an answer without a bound has room for an eighth of the context."""


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A checked request, with the name that its response will have."""

    name: AnswerName
    request: ResponsesRequest
    items: Sequence[Item]
    """Its input; empty where it refers to items of other responses, which have to be read first."""
    packed_items: bytes
    """The same as JSON."""
    fields: bytes
    """The fields of the response object that repeat the request, as JSON."""

    @property
    def id(self) -> str:
        """The id of its response."""
        return self.name.id

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        return len(self.packed_items) + len(self.fields)

    @property
    def num_kept(self) -> int:
        """Number of bytes that are kept until it is answered."""
        is_repeated = self.request.background and self.request.stream  # the first events and the last are kept too
        items = len(self.packed_items) if self.request.is_stored else 0
        return items + len(self.fields) * (5 if is_repeated else 1)


def parse_response(
    body: dict[str, Any],
    limits: Limits,
    kind: type[ResponsesRequest] = ResponsesRequest,
    name: AnswerName | None = None,
) -> tuple[AskedResponse, Sequence[str]]:
    """Return a body as a request, and the names of ignored fields to be shown. Raises `ApiError` 400.

    Without a `name` its response has a new one.
    """
    request, ignored = parse(body, limits, kind)
    if request.background and not request.is_stored:
        raise invalid("background needs store to be true, as the response is read afterwards.", "background")
    name = name or AnswerName.new("resp_")
    is_empty = kind is InputTokensRequest and request.input == []
    items = [] if is_empty or references(request.input) else taken_items(request.input, limits, name.id)
    asked = AskedResponse(name, request, items, encode_json(items), exact_json.encode(_repeated(request, body)))
    return asked, ignored


async def plan_response(
    limits: Limits,
    served: ServedModel,
    asked: AskedResponse,
    kept: KeptResponses,
    tenant: Tenant,
    app: ASGIApp,
    room: BodyRoom,
    stream: AskedStream,
) -> GenerationPlan:
    """Plan what to generate as for a chat completion, to be answered as a response. Raises `ApiError`.

    One in the background is generated by a request to `app`, as `stream`. `room` is the body's.
    """
    request = asked.request
    if request.background and not stream.is_continued:
        kept.check_background(tenant.name)
    shelf = Shelf(kept.store, tenant.name, limits, room)
    conversations = Conversations(kept.store, tenant.name, limits, shelf)
    before, asked = await _complete(limits, asked, shelf, conversations)
    if stream.is_continued:  # It may be in its conversation already.
        before.items = [item for item in before.items if response_of(str(item.get("id"))) != asked.id]
    tools = shown_tools(request.tools)
    try:
        chat = await _chat_request(asked, before, limits, tools)
        plan = await _planned(limits, served, chat, tenant.salt(request.cache_salt or ""), asked)
    except ApiError as error:
        raise as_named_here(error, tools) from None
    encoder = _encoder(served, asked, plan, tools)
    num_held = asked.num_kept - _TOKEN_BYTES * encoder.context.num_prompt_tokens
    plan = replace(plan, encoder=encoder, held=room.another() if num_held > 0 else None, num_held=num_held)
    stored = StoredResponse(b"", asked.packed_items, before.chain, conversation=request.conversation)
    keeper = ResponseKeeper(kept.store, tenant.name, encoder, stored)
    plan = _with_end(plan, kept, asked, encoder, keeper, conversations)
    if not request.background:
        return plan
    begin = partial(begin_later, limits, kept, tenant, app, plan, encoder, keeper, stream)
    return replace(plan, later=partial(begin, is_stream=bool(request.stream)))


def _encoder(
    served: ServedModel, asked: AskedResponse, plan: GenerationPlan, tools: Sequence[ShownTool]
) -> ResponsesEncoder:
    context = replace(plan.encoder.context, include_usage=True)
    return ResponsesEncoder(
        context,
        served.codec,
        ResponseObject(context, asked.fields, _sampled(plan)),
        names={tool.name: tool.client for tool in tools if tool.client is not None},
        num_top=asked.request.top_logprobs or 0,
        is_background=bool(asked.request.background),
    )


def _with_end(
    plan: GenerationPlan,
    kept: KeptResponses,
    asked: AskedResponse,
    encoder: ResponsesEncoder,
    keeper: ResponseKeeper,
    conversations: Conversations,
) -> GenerationPlan:
    """Have a response stored, and added to its conversation, when it has ended, if the request asks for that."""
    request = asked.request
    is_stored = request.is_stored and kept.settings.max_bytes > 0
    if request.is_stored and not is_stored:
        encoder.correct([], _STORED, _NOT_STORED)

    async def end(sent: Sequence[bytes]) -> Sequence[bytes]:
        """Store the response. A failure is reported in the response, so that its text is not lost."""
        if (name := request.conversation) is not None and not await _enter(
            conversations, name, asked.packed_items, encoder
        ):
            sent = encoder.correct(sent, _field("conversation", {"id": name}), _field("conversation", None))
        if is_stored and not await keeper.try_keep():
            sent = encoder.correct(sent, _STORED, _NOT_STORED)
        return sent

    return replace(plan, on_end=end) if is_stored or request.conversation is not None else plan


async def count_input(
    limits: Limits, served: ServedModel, asked: AskedResponse, kept: KeptResponses, tenant: Tenant, room: BodyRoom
) -> int:
    """Return the number of tokens of a response's prompt. Raises `ApiError`. `room` is the body's."""
    shelf = Shelf(kept.store, tenant.name, limits, room)
    before, asked = await _complete(limits, asked, shelf, Conversations(kept.store, tenant.name, limits, shelf))
    tools = shown_tools(asked.request.tools)
    try:
        chat = await _chat_request(asked, before, limits, tools)
        check_answer(limits, served, chat)
        await restricted(limits, served, chat, None)
        return await count_prompt(limits, served, chat, tenant.salt(asked.request.cache_salt or ""))
    except ApiError as error:
        raise as_named_here(error, tools) from None


async def _complete(
    limits: Limits, asked: AskedResponse, shelf: Shelf, conversations: Conversations
) -> tuple[Conversation, AskedResponse]:
    """Return the conversation that a response continues, and the request with the items that it references. Raises
    `ApiError`."""
    before = await _before(asked.request, shelf, conversations)
    if names := references(asked.request.input):
        at_most(limits, "max_messages", "input", len(asked.request.input), "items")
        known, num_bytes = await shelf.named(names)
        work = partial(_with_known, asked, known, limits)
        asked = await near_or_far(num_bytes, limits.inline_body_bytes, work)
    return before, asked


async def _before(request: ResponsesRequest, shelf: Shelf, conversations: Conversations) -> Conversation:
    """Return the conversation that a response continues. Raises `ApiError` 400, 404 or 429."""
    if request.conversation is None:
        return await shelf.conversation(request.previous_response_id)
    if request.previous_response_id is not None:
        raise invalid("Give either conversation or previous_response_id, not both.", "conversation")
    return await conversations.read(request.conversation, "conversation")


async def _enter(conversations: Conversations, name: str, items: bytes, encoder: ResponsesEncoder) -> bool:
    """Add a response's input and output to its conversation. Return whether they are there."""
    final = encoder.final
    assert final is not None
    size = len(items) + sum(map(len, final))
    try:
        added = await near_or_far(size, INLINE_BYTES, lambda: joined(items, output_of(b"".join(final))))
        await conversations.add(name, added, encoder.context.id)
    except ApiError as error:  # The conversation was deleted meanwhile, or is full.
        logger.warning("response %s is not in its conversation: %s", encoder.context.id, error.message)
    except OSError as error:
        log_failure(error, f"adding the response {encoder.context.id} to its conversation")
    else:
        return True
    return False


def _with_known(asked: AskedResponse, known: Mapping[str, Item], limits: Limits) -> AskedResponse:
    items = taken_items(asked.request.input, limits, asked.id, known)
    return replace(asked, items=items, packed_items=encode_json(items))


async def begin_later(
    limits: Limits,
    kept: KeptResponses,
    tenant: Tenant,
    app: ASGIApp,
    plan: GenerationPlan,
    encoder: ResponsesEncoder,
    keeper: ResponseKeeper,
    stream: AskedStream,
    request: Request,
    ticket: Ticket,
    *,
    is_stream: bool,
) -> Response:
    """Admit a response, begin it in the background, and answer with its present state. Raises RateLimited.

    A stream that is continued moves here, unless it is here, or has ended and is stored.
    """
    name, timeout_s = encoder.context.id, limits.slow_reader_timeout_s
    if stream.is_continued:
        if (running := kept.background.find(tenant.name, name)) is not None:
            return await of_job(running, stream, timeout_s, ticket.headers())
        if (stored := await _ended(kept, tenant, name)) is not None:
            return of_stored(stored.events, stream, timeout_s)
    whole = replace(stream, position=None)  # The job has all events, its readers only those that follow theirs.
    job = ResponseJob(encoder, plan, ticket, keeper, whole, keeps_events=is_stream)
    scope = as_tenant(scope_of(job, request.scope, request_id(request.scope)), tenant)
    background, telling = kept.background, None
    background.add(tenant.name, name, job)

    def remove() -> None:
        background.remove(tenant.name, name)
        if telling is not None:
            telling.cancel()

    try:
        ticket.admit(1, encoder.context.num_prompt_tokens, is_charged=not stream.is_continued)
        await keeper.keep()
        job.start(app, scope, remove)
        if kept.store.is_shared:
            telling = asyncio.create_task(keeper.tell(job))
    except BaseException:
        ticket.close()
        remove()
        raise
    if is_stream:
        return await of_job(job, stream, timeout_s, ticket.headers())
    return json_in_pieces(job.now(), ticket.headers())


async def _ended(kept: KeptResponses, tenant: Tenant, name: str) -> StoredResponse | None:
    """Return a stored response that has ended with a stream."""
    (packed,) = await kept.store.get(tenant.name, [name])
    stored = None if packed is None else StoredResponse.unpacked(packed)
    return stored if stored is not None and stored.events else None


async def _chat_request(
    asked: AskedResponse, before: Conversation, limits: Limits, tools: Sequence[ShownTool]
) -> ChatRequest:
    work = partial(chat_request, asked.request, [*before.items, *asked.items], limits, tools)
    return await near_or_far(before.num_bytes + asked.num_bytes, limits.inline_body_bytes, work)


async def _planned(
    limits: Limits, served: ServedModel, chat: ChatRequest, salt: str, asked: AskedResponse
) -> GenerationPlan:
    """Plan a chat request; if the client allows it, omit as few of the oldest messages as necessary."""
    checked = await check_chat(limits, served, chat)
    tokenize = partial(tokenize_chat, limits, served, checked=checked, salt=salt)
    if asked.request.truncation == "auto":
        chat, prompt = await _shortened(chat, tokenize, _least_room(served, asked.request))
    else:
        prompt = await tokenize(chat)
    return await build_chat(limits, served, chat, checked, prompt, asked.name)


async def _shortened(
    chat: ChatRequest, tokenize: Callable[[ChatRequest], Awaitable[ChatPrompt]], least_room: int
) -> tuple[ChatRequest, ChatPrompt]:
    """Omit only as many of the oldest messages as an answer of `least_room` tokens needs. If no number of them
    makes enough room, omit none. Raises `ApiError`.
    """

    async def with_room(shorter: ChatRequest) -> ChatPrompt | None:
        try:
            prompt = await tokenize(shorter)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if prompt.max_tokens >= least_room else None

    if whole := await with_room(chat):
        return chat, whole
    starts = _turns(chat)
    low, high, best = 0, len(starts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        shorter = chat.model_copy(update={"messages": [*_systems(chat), *chat.messages[starts[middle] :]]})
        if prompt := await with_room(shorter):
            best, high = (shorter, prompt), middle - 1
        else:
            low = middle + 1
    return best or (chat, await tokenize(chat))


def _least_room(served: ServedModel, request: ResponsesRequest) -> int:
    """Return the tokens that the context must leave for an answer; 0 if the request itself bounds it."""
    return 0 if request.max_output_tokens is not None else math.ceil(served.card.max_model_len / _ANSWER_SHARE)


def _systems(chat: ChatRequest) -> list[Any]:
    """Return the system message before the conversation."""
    first = next((at for at, message in enumerate(chat.messages) if message.role != "system"), len(chat.messages))
    return list(chat.messages[:first])


def _turns(chat: ChatRequest) -> list[int]:
    """Return the starts of the user's later turns. Calls and their results are omitted together."""
    begins = [at for at, message in enumerate(chat.messages) if message.role == "user"]
    return [at for at in begins if at > len(_systems(chat))]


def _repeated(request: ResponsesRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response object that repeat its request, with the tools as `body` gives them."""
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    reasoning = request.reasoning.model_dump(exclude_none=True) if request.reasoning else {}
    return {
        "background": bool(request.background),
        "conversation": None if request.conversation is None else {"id": request.conversation},
        "include": request.include,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or "default",
        "store": request.is_stored,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": request.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.get("tools") or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _shown_tool(given: dict[str, Any]) -> dict[str, Any]:
    if given["type"] != "function":
        return given
    return {"description": None, "parameters": None} | given | {"strict": bool(given.get("strict"))}


def _field(name: str, value: object) -> bytes:
    return encode_json({name: value})[1:-1]


_STORED, _NOT_STORED = _field("store", True), _field("store", False)


def _sampled(plan: GenerationPlan) -> dict[str, Any]:
    return {"temperature": plan.sampling.temperature, "top_p": plan.sampling.top_p}
