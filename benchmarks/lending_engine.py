"""An engine in a process of its own, which lends the KV of some prompts to the one that is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Literal

from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch.exchange import KVExchange
from engine.program.engine import Engine
from engine.program.precompute import precompute
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from router.addresses import KVAddress

Transport = Literal["zmq", "nixl"]


@contextlib.contextmanager
def lending(
    config: EngineConfig, prompts: Sequence[Sequence[int]], transport: Transport = "zmq"
) -> Iterator[KVAddress]:
    """Yield where the KV of all prompts can be fetched."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_lend, args=(config, prompts, transport, there))
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join()


def _lend(config: EngineConfig, prompts: Sequence[Sequence[int]], transport: Transport, pipe: Connection) -> None:
    engine = Engine.from_config(config)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    requests = [engine.new_request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    precompute(engine.loop, requests, float("inf"))
    exchange = exchange_of(engine, transport)
    engine.loop.start(lambda events: None)
    pipe.send(exchange.sender.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    engine.close()
    exchange.close()


def exchange_of(engine: Engine, transport: Transport = "zmq") -> KVExchange:
    """Return the exchange of an engine with host memory, with the settings of a replica."""
    exchange = KVExchange.of(engine, "127.0.0.1", KvFetchSettings(transport=transport), WireSettings())
    assert exchange is not None, "the engine has no host pages"
    return exchange
