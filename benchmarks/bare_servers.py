"""Two servers to compare Raydix's front door with: the least that a server of chats can do.

    python -m benchmarks.bare_servers starlette PORT         a Starlette that answers chats itself, with one token
    python -m benchmarks.bare_servers engine ENDPOINT        Raydix's engine behind one ZeroMQ socket
    python -m benchmarks.bare_servers door PORT ENDPOINT     an ASGI function that asks that engine

All render and tokenize with Raydix's embedded model. None checks its input, limits
anything, counts anything, or survives the loss of the other: what they cost is what serving costs at the least.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio

from deployments.api.served.text_codec import TextCodec
from deployments.config.args import ModelArgs
from engine.program.engine import Engine, model_directory
from engine.settings.config import EngineConfig
from engine.text.tokenizer import load_tokenizer
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

CONFIG = EngineConfig(model="demo", device="cpu", dtype="float32", kv_pages=4096, threads=1)


class Ask(msgspec.Struct, array_like=True):
    """A request on its way to the engine."""

    name: str
    prompt_ids: list[int]
    max_tokens: int


class Told(msgspec.Struct, array_like=True):
    """What a request gained in a step."""

    name: str
    token_ids: list[int]
    is_last: bool


def load_codec() -> TextCodec:
    """Load the embedded model's tokenizer and template."""
    return TextCodec(load_tokenizer(model_directory(CONFIG)), ModelArgs(engine=CONFIG).chat)


def serve_starlette(port: int) -> None:
    """Serve chats that are rendered and tokenized, and answered with the prompt's last token."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    codec = load_codec()

    async def answer(request: Request) -> StreamingResponse:
        ids = codec.encode_chat((await request.json())["messages"])

        async def events() -> Any:
            yield _event(codec.decode(ids[-1:]))
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def serve_engine(endpoint: str) -> None:
    """Run requests that come at a socket; tokens go back from the engine's own thread, through a second socket."""
    engine, context = Engine.from_config(CONFIG), zmq.Context()
    door, steps, step = context.socket(zmq.ROUTER), context.socket(zmq.PULL), context.socket(zmq.PUSH)
    door.bind(endpoint)
    steps.bind("inproc://steps")
    step.connect("inproc://steps")
    decode, encode = msgspec.msgpack.Decoder(Ask).decode, msgspec.msgpack.encode
    read = msgspec.msgpack.Decoder(list[Told]).decode
    clients: dict[str, bytes] = {}

    def on_events(deltas: list[StreamDelta]) -> None:
        step.send(encode([Told(d.request_id, list(d.token_ids), d.finish_reason is not None) for d in deltas]))

    engine.loop.start(on_events)
    poller = zmq.Poller()
    poller.register(door, zmq.POLLIN)
    poller.register(steps, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket is door:
                client, data = door.recv_multipart()
                ask = decode(data)
                clients[ask.name] = client
                sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
                engine.loop.submit(engine.new_request(ask.name, ask.prompt_ids, sampling))
            else:
                for told in read(steps.recv()):
                    client = clients.pop(told.name) if told.is_last else clients[told.name]
                    door.send_multipart((client, encode(told)))


def serve_door(port: int, endpoint: str) -> None:
    """Serve chats with that engine."""
    codec, context = load_codec(), zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    decode, encode = msgspec.msgpack.Decoder(Told).decode, msgspec.msgpack.encode
    streams: dict[str, asyncio.Queue[Told]] = {}
    names = map(str, itertools.count())

    async def receive_all() -> None:
        while True:
            told = decode(await socket.recv())
            streams[told.name].put_nowait(told)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            app.reader = asyncio.create_task(receive_all())  # type: ignore[attr-defined]
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while message := await receive():
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = msgspec.json.decode(body)
        name = next(names)
        queue = streams[name] = asyncio.Queue()
        await socket.send(encode(Ask(name, codec.encode_chat(asked["messages"]), asked["max_tokens"])))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        is_last = False
        while not is_last:
            told = await queue.get()
            is_last = told.is_last
            event = _event(codec.decode(told.token_ids))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        del streams[name]
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, http="httptools")


def _event(text: str) -> bytes:
    delta = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(delta).encode() + b"\n\n"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["starlette", port]:
            serve_starlette(int(port))
        case ["engine", endpoint]:
            serve_engine(endpoint)
        case ["door", port, endpoint]:
            serve_door(int(port), endpoint)
        case _:
            sys.exit(__doc__)
