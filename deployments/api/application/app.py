"""The endpoints, and the layers around them. Failures become error objects of the path's API.

Spelling ─▶ Observation ─▶ Envelope ─▶ Origins ─▶ Gate ─▶ Readers ─▶ Bounded ─▶ HotPaths
     HotPaths ─▶ endpoints that generate
         └─────▶ Starlette's router ─▶ others, /openapi.json

A layer sees the head of each answer. The events of a stream pass none: they go to the server's own `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deployments.admission.rate_limits import RateLimited, Ticket
from deployments.api.anthropic.plan import count_tokens, plan_message
from deployments.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from deployments.api.anthropic.translation import parse_count, parse_messages
from deployments.api.base.errors import ApiError, from_client, invalid, quoted, unexpected
from deployments.api.base.field_checks import at_most, in_vocabulary
from deployments.api.base.off_loop import near_or_far, off_loop, take_share
from deployments.api.document.page import add_document_routes
from deployments.api.fields.openapi import body_of
from deployments.api.fields.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from deployments.api.fields.strict_model import StrictModel
from deployments.api.generation.chat import plan_chat
from deployments.api.generation.completions import plan_completion
from deployments.api.generation.exchange import Caller, Exchange
from deployments.api.generation.generation_plan import GenerationPlan, Hints, is_resumable
from deployments.api.http.access import Gate, tenant_of
from deployments.api.http.anthropic_errors import PATH as MESSAGES
from deployments.api.http.anthropic_errors import named
from deployments.api.http.body import ClientGone, read_json
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.bounded import Bounded
from deployments.api.http.error_response import error_response
from deployments.api.http.hot_paths import Endpoint, HotPaths
from deployments.api.http.origins import Origins
from deployments.api.http.route_table import RouteTable
from deployments.api.http.scopes import address_of, header, is_deferrable, request_id
from deployments.api.http.spelling import Spelling
from deployments.api.http.transport import Envelope, json_response, name_ignored, name_version, until_disconnect
from deployments.api.http.unread import Readers
from deployments.api.http.wrong_path import on_http_error
from deployments.api.pooling.endpoints import POOLED, PooledKind
from deployments.api.prompt.requested_tools import offered_tools
from deployments.api.prompt.template_options import template_options
from deployments.api.prompt.token_ids import encode_messages, encode_text
from deployments.api.record.observation import Observation, record_of
from deployments.api.record.request_lines import RequestLines
from deployments.api.record.request_metrics import RequestMetrics
from deployments.api.record.request_record import RequestRecord
from deployments.api.responses.background import job_of
from deployments.api.responses.plan import count_input, parse_response, plan_response
from deployments.api.responses.protocol import InputTokensRequest, ResponsesRequest
from deployments.api.routes.cluster import add_cluster_routes
from deployments.api.routes.kept import add_kept_routes
from deployments.api.routes.lifecycle import add_model_routes
from deployments.api.routes.rollouts import add_rollout_routes
from deployments.api.routes.router import add_router_routes
from deployments.api.routes.server import add_server_routes
from deployments.api.routes.streams import add_stream_routes
from deployments.api.routes.tokenizer import add_tokenizer_route
from deployments.api.served.context_room import check_in_context
from deployments.api.served.served_model import ServedModel
from deployments.api.service.api_service import ApiService
from deployments.api.service.session_version import version_for
from deployments.api.service.workroom import Workroom
from deployments.api.streams.asked import AskedStream, asked_stream
from deployments.api.streams.position import wrong_id
from deployments.config.limits import Limits

_Planner = Callable[[AskedStream], Awaitable[GenerationPlan]]
T = TypeVar("T")
_Parser = Callable[[dict[str, Any], Limits], tuple[T, Sequence[str]]]
"""Reads a body: returns a request, and the names of ignored fields to be shown."""


def create_app(service: ApiService, *, is_eager: bool = False, room: Workroom | None = None) -> ASGIApp:
    """Create the HTTP API of one service: the endpoints, and the layers around them.

    The router is created for the first request that needs it; with `is_eager` now, so that no request waits.
    `room` is shared with the API that this one replaces; None: with none.
    """
    room = room or Workroom(service)
    endpoints = _Endpoints(service, room)
    hot = {
        "/v1/chat/completions": endpoints.chat,
        "/v1/completions": endpoints.completions,
        MESSAGES: endpoints.messages,
        f"{MESSAGES}/count_tokens": endpoints.count_tokens,
        "/v1/responses": endpoints.responses,
        "/v1/responses/input_tokens": endpoints.input_tokens,
        **{path: endpoints.pooled(kind) for path, kind in POOLED.items()},
    }
    rest = HotPaths(partial(_router, service, endpoints), hot)
    if is_eager:
        rest.make()
    app: ASGIApp = rest
    if service.max_open is not None:
        app = Bounded(app, service.max_open, num_tenants=len(service.access.weights), counts=room.open)
    app = Readers(app, room.unread, has_tenants=bool(service.access.weights))
    app = Gate(app, service.access, service.metrics)
    if service.allowed_hosts is not None or service.cors_origins:
        app = Origins(app, service.allowed_hosts, service.cors_origins)
    app = Envelope(app, service.limits, names_answers=not service.is_named_outside, on_named=service.on_named)
    app = Observation(app, service.metrics, service.listeners)
    if service.write_line is not None:
        app = RequestLines(app, service.write_line)
    endpoints.app = Spelling(app)
    return endpoints.app


def route_table(service: ApiService) -> RouteTable:
    """Return all endpoints of the API."""
    return _route_table(service, _Endpoints(service, Workroom(service)))


def _router(service: ApiService, endpoints: _Endpoints) -> ASGIApp:
    handlers = {ApiError: _on_api_error, HTTPException: on_http_error, Exception: _on_defect}
    return _route_table(service, endpoints).app(handlers)


def _route_table(service: ApiService, endpoints: _Endpoints) -> RouteTable:
    table = RouteTable()
    post: list[tuple[str, Callable[..., Any], type[StrictModel]]] = [
        ("/v1/chat/completions", endpoints.chat, ChatRequest),
        ("/v1/completions", endpoints.completions, CompletionRequest),
        (MESSAGES, endpoints.messages, MessagesRequest),
        (f"{MESSAGES}/count_tokens", endpoints.count_tokens, CountTokensRequest),
        ("/v1/responses", endpoints.responses, ResponsesRequest),
        ("/v1/responses/input_tokens", endpoints.input_tokens, InputTokensRequest),
        *((path, endpoints.pooled(kind), kind.body) for path, kind in POOLED.items()),
        ("/tokenize", endpoints.tokenize, TokenizeRequest),
        ("/detokenize", endpoints.detokenize, DetokenizeRequest),
    ]
    for path, endpoint, body in post:
        table.add("POST", path, endpoint, body=partial(body_of, body))
    add_kept_routes(table, service, endpoints.read, endpoints.room_for, lambda: endpoints.app)
    add_stream_routes(table, service, lambda: endpoints.app)
    add_model_routes(table, service)
    add_router_routes(table, service)
    add_server_routes(table, service)
    if service.shows_tokenizer:
        add_tokenizer_route(table, service)
    if service.cluster is not None:
        add_cluster_routes(table, service.cluster, service.admin_key_hash, service.version)
    if service.rollouts is not None:
        add_rollout_routes(table, service, service.rollouts)
    add_document_routes(table, service)
    return table


class _Endpoints:
    """The endpoints and the service that they share."""

    app: ASGIApp
    """The whole API, for requests that it sends itself."""

    def __init__(self, service: ApiService, room: Workroom) -> None:
        self._service, self._room = service, room

    async def chat(self, request: Request) -> Response:
        """Create a chat completion."""
        record = self._record(request)

        async def plan(stream: AskedStream) -> GenerationPlan:
            with self.room_for(request) as room:
                parse_chat = partial(parse, kind=ChatRequest)
                served, asked = await self._parsed(request, parse_chat, room, record, stream)
                salt = tenant_of(request).salt(asked.cache_salt or "")
                return await plan_chat(self._service.limits, served, asked, salt, stream.name)

        return await self._generate(request, record, plan)

    async def completions(self, request: Request) -> Response:
        """Create a text completion."""
        record = self._record(request)

        async def plan(stream: AskedStream) -> GenerationPlan:
            with self.room_for(request) as room:
                parse_completion = partial(parse, kind=CompletionRequest)
                served, asked = await self._parsed(request, parse_completion, room, record, stream)
                return await plan_completion(self._service.limits, served, asked, stream.name)

        return await self._generate(request, record, plan)

    async def messages(self, request: Request) -> Response:
        """Create a message, as Anthropic's API does."""
        record = self._record(request)

        async def plan(stream: AskedStream) -> GenerationPlan:
            with self.room_for(request) as room:
                served, asked = await self._parsed(request, parse_messages, room, record, stream)
                salt = tenant_of(request).salt(asked.chat.cache_salt or "")
                return await plan_message(self._service.limits, served, asked, salt, stream.name)

        return named(await self._generate(request, record, plan), request)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens that the prompt of a message would have."""
        with self.room_for(request) as room:
            served, chat = await self._parsed(request, parse_count, room)
            num_tokens = await count_tokens(self._service.limits, served, chat, tenant_of(request).salt(""))
        return named(json_response({"input_tokens": num_tokens}), request)

    async def responses(self, request: Request) -> Response:
        """Create a response, as OpenAI's Responses API does, or generate one that was begun in the background."""
        record, kept = self._record(request), self._service.responses

        async def plan(stream: AskedStream) -> GenerationPlan:
            with self.room_for(request) as room:
                parse_named = partial(parse_response, name=stream.name)
                served, asked = await self._parsed(request, parse_named, room, record, stream)
                tenant = tenant_of(request)
                return await plan_response(
                    self._service.limits, served, asked, kept, tenant, self.app, room, stream
                )

        job = job_of(request.scope)
        if job is None:
            return await self._generate(request, record, plan)
        record.metrics.count_to(job.plan.served.metrics)
        record.model = job.plan.served.name
        name_version(request.scope, job.plan.served.version)
        return await self._generate(request, record, job.planned, job.ticket, job.stream)

    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens that the prompt of a response would have."""
        parse = partial(parse_response, kind=InputTokensRequest)
        with self.room_for(request) as room:
            served, asked = await self._parsed(request, parse, room)
            kept, tenant = self._service.responses, tenant_of(request)
            num_tokens = await count_input(self._service.limits, served, asked, kept, tenant, room)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    def pooled(self, kind: PooledKind) -> Endpoint:
        """Return an endpoint that generates nothing."""

        async def endpoint(request: Request) -> Response:
            record = self._record(request)

            async def plan(_: AskedStream) -> GenerationPlan:
                with self.room_for(request) as room:
                    served, asked = await self._parsed(request, kind.parse, room, record)
                    return await kind.plan(self._service.limits, served, asked)

            return await self._generate(request, record, plan)

        endpoint.__name__, endpoint.__doc__ = kind.name, kind.purpose
        return endpoint

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        with self.room_for(request) as room:
            served, asked = await self._parsed(request, partial(parse, kind=TokenizeRequest), room)
            return await self._tokenized(served, asked, tenant_of(request).salt(""))

    async def _tokenized(self, served: ServedModel, asked: TokenizeRequest, salt: str) -> Response:
        if (asked.prompt is None) == (not asked.messages):
            raise invalid("Give either prompt or messages.", "prompt")
        options = template_options(asked, self._service.limits)
        if asked.messages:
            if asked.add_special_tokens:
                raise invalid("add_special_tokens is not supported for messages.", "add_special_tokens")
            functions = (await offered_tools(self._service.limits, asked.tools)).functions
            ids = await encode_messages(
                self._service.limits,
                served,
                asked.messages,
                functions,
                options=options,
                salt=salt,
            )
        else:
            special = asked.add_special_tokens is not False
            ids = await encode_text(self._service.limits, served, asked.prompt or "", add_special_tokens=special)
        strings = {"token_strs": served.codec.token_strings(ids)} if asked.return_token_strs else {}
        counts = {"count": len(ids), "max_model_len": served.card.max_model_len}
        return json_response({"tokens": ids, **counts, **strings})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        with self.room_for(request) as room:
            served, asked = await self._parsed(request, partial(parse, kind=DetokenizeRequest), room)
            check_in_context(len(asked.tokens), served.card, "tokens")
            in_vocabulary("tokens", asked.tokens, served.card.vocab_size)
            decode = partial(served.codec.decode, asked.tokens)
            text = await near_or_far(len(asked.tokens), self._service.limits.inline_text_chars, decode)
            return json_response({"prompt": text})

    def room_for(self, request: Request) -> BodyRoom:
        """Begin to work on a request for its tenant; return the room for its body."""
        take_share(self._room.threads, tenant_of(request).name)
        return self._bodies(request)

    def _bodies(self, request: Request) -> BodyRoom:
        by_tenant = bool(self._service.access.weights)
        return self._room.bodies.open(tenant_of(request).name if by_tenant else address_of(request.scope))

    def _record(self, request: Request) -> RequestRecord:
        record, tenant = record_of(request), tenant_of(request).name
        record.metrics = RequestMetrics(self._service.metrics, record.endpoint, tenant, self._service.slo)
        return record

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the body, a JSON object, of a request that generates nothing. Raises `ApiError`."""
        with self.room_for(request) as room:
            return (await read_json(request, self._service.limits, room)).fields

    async def _parsed(
        self,
        request: Request,
        parse: _Parser[T],
        room: BodyRoom,
        record: RequestRecord | None = None,
        stream: AskedStream | None = None,
    ) -> tuple[ServedModel, T]:
        """Return the model that the body names, and the body as `parse` reads it, which takes `room`. `stream`
        notes the request, where its answer may be one.
        """
        settings = self._service.streams
        body = await read_json(request, self._service.limits, room, settings.max_record_bytes if stream else 0)
        if stream is not None:
            stream.note(request.scope, body, settings)
        served = await version_for(self._service, request, body.fields, stream)
        name_version(request.scope, served.version)
        if record is not None:
            record.metrics.count_to(served.metrics)
            record.model = served.name
        work = partial(parse, body.fields, self._service.limits)
        asked_for, ignored = await off_loop(work) if body.is_large else work()
        if ignored:
            name_ignored(request.scope, ignored)
            if record is not None:
                record.ignored_fields = ignored
        return served, asked_for

    async def _generate(
        self,
        request: Request,
        record: RequestRecord,
        plan: _Planner,
        ticket: Ticket | None = None,
        stream: AskedStream | None = None,
    ) -> Response:
        """Answer a request by its plan. A `ticket` that was taken before, and a `stream`, are used."""
        tenant, name = tenant_of(request), request_id(request.scope)
        try:
            stream = stream or asked_stream(request.scope, self._service.streams)
            ticket = ticket or self._service.access.start(tenant, is_charged=not stream.is_continued)
            hints = _hints(request, self._service.limits, is_open=self._service.access.is_open)
            if hints.explains:
                self._service.access.check_may_explain(tenant)
            caller = Caller(tenant, ticket)
            made = await plan(stream)
            if made.later is not None:
                answer = await made.later(request, ticket)
                record.is_handed_over = True
                return answer
            resumable = stream if stream.is_asked and is_resumable(made) else None
            if resumable is not None:
                made = self._holding(request, made, resumable)
            elif stream.is_continued:
                raise wrong_id("Last-Event-ID is given, but the answer to this request is not a stream.")
            exchange = Exchange(
                self._service.limits,
                made,
                record,
                name,
                hints,
                caller,
                self._room.pace,
                resumable,
            )
            del made  # The body has the request's texts: free it now, not when the answer ends.
            return await until_disconnect(request.scope, request.receive, exchange.respond())
        except RateLimited as error:
            record.refused(error)
            limited = from_client(error, name)
            record.failed(limited.status, limited.type)
            raise limited from None
        except ApiError as error:
            record.failed(error.status, error.type)
            if header(request.scope, b"last-event-id") or (stream is not None and stream.is_continued):
                record.metrics.resumed("refused")
            raise
        except (ClientGone, asyncio.CancelledError):
            record.disconnected()
            raise
        except Exception as error:
            failure = unexpected(error, name)
            record.failed(failure.status, failure.type)
            raise

    def _holding(self, request: Request, plan: GenerationPlan, stream: AskedStream) -> GenerationPlan:
        """Return the plan, with memory taken for its stream's request until the answer has ended. Each request to
        an engine has a copy of it.
        """
        num_copies = len(plan.encoder.context.prompts) * plan.num_candidates
        if len(stream.record) * num_copies > self._service.streams.max_record_bytes:
            stream.record = b""
        held, num_held = plan.held or self._bodies(request), max(plan.num_held, 0) + len(stream.record)
        return replace(plan, held=held, num_held=num_held)


def _max_wait_s(request: Request) -> float | None:
    """Return the `x-max-wait-s` header. Raises `ApiError` 400 unless it is a positive number."""
    given = header(request.scope, b"x-max-wait-s")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise invalid(f"x-max-wait-s must be a positive number of seconds, got {quoted(given)}.", "x-max-wait-s")
    return seconds


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _on_defect(request: Request, error: Exception) -> Response:
    """Answer after an unexpected exception, which `Envelope` then logs."""
    return error_response(unexpected(error, request_id(request.scope)), request.scope)


def _hints(request: Request, limits: Limits, *, is_open: bool) -> Hints:
    session_id, explains = header(request.scope, b"x-session-id"), header(request.scope, b"x-raydix-explain")
    if session_id is not None:
        at_most(limits, "max_hint_chars", "x-session-id", len(session_id), "characters")
    does_explain = explains is not None and explains.lower() in ("1", "true")
    address = address_of(request.scope) if is_open else ""
    return Hints(session_id, does_explain, _max_wait_s(request), address, is_deferrable(request.scope))
