"""A service on the embedded model's tokenizer, with an engine whose answers the test scripts."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import deployments.demo_model
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.client.protocol import (
    FleetHealth,
    FoundPart,
    FoundStream,
    GenerateRequest,
    ReplicaHealth,
    TakenOver,
    Turn,
)
from deployments.client.timeline import Timeline
from deployments.wire.messages import StreamPart
from engine.text.tokenizer import load_tokenizer
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics

MODEL = "demo"
MAX_MODEL_LEN = 512


STOP = 2
"""The token <|im_end|>, with which an answer ends."""


@dataclass
class ScriptedGeneration:
    """Emits the tokens of one request, then waits for ever where the script says so."""

    events: list[StreamDelta | Exception]
    hangs: bool = False
    replica: str | None = "replica-1"
    closed: bool = False
    detached: bool = False
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another reader takes the stream over."""
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0, 0.0))

    def explain(self) -> dict[str, Any] | None:
        return {"replica": self.replica, "reason": "holder", "terms": {"replica-1": {"total": 0.25}}}

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        await asyncio.sleep(0)
        if not self.events and self.hangs:
            await self.taken.wait()
        if self.taken.is_set():
            raise TakenOver
        if not self.events:
            raise StopAsyncIteration
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    async def aclose(self) -> None:
        self.closed = True

    async def detach(self) -> None:
        self.detached = True


@dataclass
class ScriptedEngine:
    """Answers every request with `says` (text, or by request), `chunk` tokens per event."""

    codec: TextCodec
    says: str | Callable[[GenerateRequest], str] = "The quick brown fox jumps over the lazy dog."
    chunk: int = 1
    chunks: Sequence[int] = ()
    """The tokens of the first events, if they are not `chunk`."""
    hangs: bool = False
    cached: int = 0
    refuse_with: Exception | None = None
    fail_after: tuple[int, Exception | StreamDelta] | None = None
    state: str = "healthy"
    scores: bool = True
    """Whether it scores prompts when it is asked to."""
    requests: list[GenerateRequest] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)
    tenants: dict[str, str] = field(default_factory=dict)
    """The tenant of each stream in `found`, by its name."""
    found: dict[str, FoundStream] = field(default_factory=dict)
    """Streams that replicas have, by name."""
    adopted: list[FoundPart] = field(default_factory=list)
    keeps: bool = False
    """Whether resumable streams are found without a test's help."""

    _reader: dict[str, ScriptedGeneration] = field(default_factory=dict)

    are_awaited = False

    def expect_none(self) -> None: ...

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        return request

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> ScriptedGeneration:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.refuse_with is not None:
            raise self.refuse_with
        generation = ScriptedGeneration(self.events(request), self.hangs)
        self.generations.append(generation)
        if self.keeps and (stream := request.stream) is not None:
            self._reader[request.request_id] = generation
            parts = self.found[stream.name].parts if stream.name in self.found else {}
            part = FoundPart("replica-1", StreamPart(stream.index, request.request_id, 0))
            self.found[stream.name] = FoundStream(stream.record, {**parts, stream.index: part})
            self.tenants[stream.name] = stream.tenant
        return generation

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        return self.found.get(name) if self.tenants.get(name) == tenant else None

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> ScriptedGeneration:
        self.adopted.append(found)
        if (former := self._reader.get(found.part.request_id)) is not None:
            former.taken.set()
        generation = self._reader[found.part.request_id] = ScriptedGeneration(self.events(request), self.hangs)
        self.generations.append(generation)
        return generation

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        made = [generation.explain() or {} for generation in reversed(self.generations)]
        return made[:limit]

    async def health(self) -> FleetHealth:
        replicas = (ReplicaHealth("replica-1", True, 0.01, num_running=2), ReplicaHealth("replica-2", False, None))
        return FleetHealth(self.state, 2, replicas)  # type: ignore[arg-type]

    def events(self, request: GenerateRequest) -> list[StreamDelta | Exception]:
        if request.sampling.pooling is not None:
            return self._pooled(request)
        text = self.says if isinstance(self.says, str) else self.says(request)
        ids = [*self.codec.encode(text, add_special_tokens=False), STOP]
        reason = "stop"
        if len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], "length"
        events: list[StreamDelta | Exception] = list(self._scores(request))
        sizes, start = iter(self.chunks), 0
        while start < len(ids):
            part = ids[start : start + next(sizes, self.chunk)]
            start += len(part)
            is_last = start >= len(ids) and not self.hangs
            events.append(
                StreamDelta(
                    request.request_id,
                    part,
                    logprobs=[_logprobs(token, request.sampling.logprobs) for token in part]
                    if request.sampling.logprobs is not None
                    else [],
                    finish_reason=reason if is_last else None,  # type: ignore[arg-type]
                    num_cached=self.cached,
                )
            )
        if self.fail_after is not None:
            events[self.fail_after[0] :] = [self.fail_after[1]]
        return events

    def _pooled(self, request: GenerateRequest) -> list[StreamDelta | Exception]:
        pooled = scripted_values(request)
        if self.fail_after is not None:
            return [self.fail_after[1]]
        end = StreamDelta(request.request_id, num_cached=self.cached, finish_reason="stop", pooled=pooled)
        return [] if self.hangs else [end]

    def _scores(self, request: GenerateRequest) -> Iterator[StreamDelta]:
        """Yield scores of two prompt tokens at a time, as `scripted_score` defines them."""
        top, prompt = request.sampling.prompt_logprobs, request.prompt_ids
        if top is not None and self.scores:
            for start in range(1, len(prompt), 2):
                rows = [scripted_score(prompt, at, top) for at in range(start, min(start + 2, len(prompt)))]
                flat = [(row.logprob, row.rank, *chain.from_iterable(row.top)) for row in rows]
                records = b"".join(struct.pack("<fI" + "If" * top, *numbers) for numbers in flat)
                yield StreamDelta(request.request_id, prompt_logprobs=PackedLogprobs(start, top, records))


def scripted_values(request: GenerateRequest) -> bytes:
    """The state of a prompt is its length, its sum, and its first and last tokens; "yes" is as likely as the last
    token is large.
    """
    prompt, pooling = request.prompt_ids, request.sampling.pooling
    assert pooling is not None
    values = [float(len(prompt)), float(sum(prompt)), float(prompt[0]), -float(prompt[-1])]
    if pooling.token_ids:
        values = [prompt[-1] / 4096, 1 - prompt[-1] / 4096]
    return struct.pack(f"<{len(values)}f", *values)


def scripted_score(prompt: Sequence[int], position: int, top: int) -> TokenLogprobs:
    """Token p of a prompt has log-probability -p and rank p; the likeliest are those with the lowest ids."""
    alternatives = tuple((number, -0.125 * number) for number in range(top))
    return TokenLogprobs(prompt[position], -float(position), alternatives, position)


def _logprobs(token: int, top: int | None) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple((100 + i, -1.0 - i) for i in range(top or 0)))


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(load_tokenizer(Path(deployments.demo_model.__file__).parent))


@pytest.fixture
def engine(codec: TextCodec) -> ScriptedEngine:
    return ScriptedEngine(codec)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(MODEL, "ingress-1")


@pytest.fixture
def service(engine: ScriptedEngine, codec: TextCodec, metrics: Metrics) -> ApiService:
    return service_around(engine, codec, metrics)


def service_around(engine: ScriptedEngine, codec: TextCodec, metrics: Metrics) -> ApiService:
    """A service of one model."""

    async def metrics_text() -> tuple[bytes, str]:
        return b"raydix_up 1\n", "text/plain; version=0.0.4"

    card = ModelCard(MODEL, created=1, max_model_len=MAX_MODEL_LEN, vocab_size=4096)
    return ApiService({MODEL: ServedModel(card, engine, codec, metrics)}, metrics_text, Limits(), metrics)


@pytest.fixture
def transport(service: ApiService) -> httpx.ASGITransport:
    return httpx.ASGITransport(create_app(service))


class Client:
    """Drives the app without a server: the openai client, and plain HTTP, each call in a loop of its own."""

    def __init__(self, transport: httpx.ASGITransport) -> None:
        self._transport = transport

    @cached_property
    def _openai(self) -> openai.AsyncOpenAI:
        """One for all calls: it connects to nothing, and being made takes longer than a short answer."""
        http = httpx.AsyncClient(transport=self._transport)
        options: dict[str, Any] = {"http_client": http}  # its type has changed between versions
        return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, **options)

    def request(self, method: str, path: str, **options: object) -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return asyncio.run(run())

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        """`body` as bytes goes out as it is, anything else as JSON."""
        if isinstance(body, bytes):
            return self.request("POST", path, content=body, **options)
        return self.request("POST", path, json=body, **options)

    def run(self, work: Callable[[openai.AsyncOpenAI], object]) -> object:
        return asyncio.run(work(self._openai))  # type: ignore[arg-type]


@pytest.fixture
def client(transport: httpx.ASGITransport) -> Client:
    return Client(transport)


async def hang_up(service: ApiService, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A client that sends a request, waits for the engine's first output, and closes the connection."""
    content = json.dumps(body).encode()
    sent = bytearray()
    inbox = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(b"content-type", b"application/json")], "server": ("test", 80),
        "client": ("test", 1),
    }  # fmt: skip
    await asyncio.wait_for(create_app(service)(scope, receive, send), 60)
    return bytes(sent)
