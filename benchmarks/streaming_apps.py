"""Serve applications that differ only in how tokens travel from the engine replica to the ingress.

    wire      engine ──ZeroMQ, encrypted, one message per step──▶ ingress ──one chunk per token──▶ HTTP
    plain     engine ──ZeroMQ, one message per step─────────────▶ ingress ──one chunk per token──▶ HTTP
    handle    engine ──Serve handle generator───────────────────▶ ingress ──one chunk per token──▶ HTTP

All engines are the real engine loop around a model that costs nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from starlette.responses import StreamingResponse

from benchmarks.null_model import NullEngines
from deployments.app import bind_engines
from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.client.serve_watcher import ServeWatcher
from deployments.config.args import AppArgs, ModelArgs
from deployments.config.settings import EngineDeploymentSettings, WireSettings
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from router.state import router_state

CONFIG = EngineConfig(kv_pages=65_536, max_model_len=100_000)
MAX_ONGOING = 1000
MODEL = ModelArgs(engine=CONFIG, engines=EngineDeploymentSettings(num_cpus=0.1, max_ongoing=MAX_ONGOING))


def wire_app(*, encrypts: bool) -> Application:
    """Streams tokens over the wire."""
    args = AppArgs(wire=WireSettings(encrypt=encrypts))
    (engines,) = bind_engines(args, MODEL, None, engine_factory=NullEngines()).values()
    return _ingress(WireIngress).bind(engines)


def handle_app() -> Application:
    """Streams tokens through a Serve handle generator."""
    engine = serve.deployment(HandleEngine, max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0.1})
    return _ingress(HandleIngress).bind(engine.bind())


def _ingress(cls: Any) -> Any:
    return serve.deployment(cls, max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0.1})


class _Streaming:
    """The routes that both ingresses share. `_tokens` yields lists of tokens as they arrive."""

    def _tokens(self, num_tokens: int) -> AsyncIterator[list[int]]:
        raise NotImplementedError

    async def _chunks(self, num_tokens: int) -> AsyncIterator[str]:
        async for tokens in self._tokens(num_tokens):
            for token in tokens:
                yield f"data: {token}\n\n"

    async def _hop(self, num_streams: int, num_tokens: int) -> dict[str, float]:
        """Read streams inside the ingress, without HTTP, to measure the hop alone."""

        async def read() -> int:
            return len([1 async for _ in self._tokens(num_tokens)])

        began = time.perf_counter()
        # Each needs its own context, or Serve treats all handle calls as one (see `ServeWatcher.watch`).
        tasks = [asyncio.create_task(read(), context=contextvars.Context()) for _ in range(num_streams)]
        reads = await asyncio.gather(*tasks)
        return {"seconds": time.perf_counter() - began, "reads": sum(reads)}

    def routes(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/stream", self._stream, methods=["GET"], response_model=None)
        app.add_api_route("/hop", self._hop, methods=["GET"])
        return app

    async def _stream(self, num_tokens: int) -> StreamingResponse:
        return StreamingResponse(self._chunks(num_tokens), media_type="text/event-stream")


@serve.ingress()
class WireIngress(_Streaming):
    """Streams tokens over the wire."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines

    async def __serve_build_asgi_app__(self) -> FastAPI:
        settings = AppArgs().placer(MODEL)
        router = router_state(self._engines.app_name, self._engines.deployment_name, settings)
        self._client = RemoteEngines(router, 1, ServeWatcher(lambda replica: self._engines))
        await self._client.start()
        await self._engines.describe.remote()
        return self.routes()

    async def _tokens(self, num_tokens: int) -> AsyncIterator[list[int]]:
        stream = await self._client.generate(_request(num_tokens))
        async for event in stream:
            yield list(event.token_ids)


class HandleEngine:
    """The same engine, which yields its tokens one by one."""

    def __init__(self) -> None:
        self._engine = NullEngines()(CONFIG)
        self._queues: dict[str, asyncio.Queue[StreamDelta]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._engine.loop.start(self._on_events)

    def _on_events(self, events: list[StreamDelta]) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: list[StreamDelta]) -> None:
        for event in events:
            self._queues[event.request_id].put_nowait(event)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[int]:
        self._event_loop = asyncio.get_running_loop()
        queue = self._queues[request.request_id] = asyncio.Queue()
        made = self._engine.new_request(request.request_id, request.prompt_ids, request.sampling)
        self._engine.loop.submit(made)
        while True:
            event = await queue.get()
            for token in event.token_ids:
                yield token
            if event.finish_reason is not None:
                del self._queues[request.request_id]
                return


@serve.ingress()
class HandleIngress(_Streaming):
    """Streams tokens through a Serve handle generator."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(stream=True)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self.routes()

    async def _tokens(self, num_tokens: int) -> AsyncIterator[list[int]]:
        async for token in self._engine.stream.remote(_request(num_tokens)):
            yield [token]


def _request(num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    return GenerateRequest(uuid.uuid4().hex, "null", list(range(16)), sampling)
