"""A replica's KV events, read over ZeroMQ as vLLM documents them: what a router of others would know."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import Namespace
from cache.news.block_events import BlockEvents
from cache.news.tier import Tier
from deployments.client.protocol import GenerateRequest
from deployments.config.kv_events import KvEventSettings
from deployments.replica.deployment import EngineReplica
from deployments.replica.kv_events import BUFFER_BYTES, BUFFER_STEPS, KvEventPublisher
from deployments.replica.settings import ReplicaSettings
from engine.model_files.model_directory import demo_model_path
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from tests.cache.support.block_mirror import prefixes


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """An event, as vLLM to 0.23 documents it: an array that begins with its type."""


class BlockStored(KVEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class NamedEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """An event, as vLLM from 0.24 on documents it: a map with its type among the names."""


class NamedStored(NamedEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class NamedRemoved(NamedEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class NamedCleared(NamedEvent, tag="AllBlocksCleared"):
    pass


class NamedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[NamedStored | NamedRemoved | NamedCleared]
    data_parallel_rank: int | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_free_ports(**options: Any) -> KvEventSettings:
    return KvEventSettings(
        **{
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
            "num_ports": 1,
            **options,
        }
    )


@dataclass
class Subscriber:
    """Follows a publisher, and asks again for what it missed."""

    publisher: KvEventPublisher
    hwm: int = 1000
    held: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set()})
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.RCVHWM, self.hwm)
        self.events.connect(self.publisher.endpoint)
        self.events.subscribe(b"")

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read(self, until: Callable[[], bool]) -> None:
        """Read messages until something is known, and ask for what came before the subscription."""
        for _ in range(2000):
            if until():
                return
            if self.events.poll(30):
                _, number, batch = self.events.recv_multipart()
                self.take(int.from_bytes(number, "big"), batch)
            else:
                self.recover()
        raise AssertionError((self.held, self.numbers))

    def take(self, number: int, batch: bytes) -> None:
        if number > (self.numbers[-1] if self.numbers else -1) + 1:
            self.recover()
        if number > (self.numbers[-1] if self.numbers else -1):
            self.apply(number, batch)

    def recover(self) -> None:
        """Ask for all after the last that was read, over a DEALER as vLLM's ROUTER expects it."""
        assert self.publisher.replay_endpoint
        for number, batch in self.ask((self.numbers[-1] + 1 if self.numbers else 0).to_bytes(8, "big")):
            self.replayed.append(number)
            self.apply(number, batch)

    def ask(self, *request: bytes) -> Iterator[tuple[int, bytes]]:
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.publisher.replay_endpoint or "")
        asking.send_multipart([b"", *request])
        while asking.poll(60_000):
            empty, number, batch = asking.recv_multipart()
            assert empty == b""
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            yield int.from_bytes(number, "big"), batch
        asking.close()

    def apply(self, number: int, batch: bytes) -> None:
        self.numbers.append(number)
        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.held = {"GPU": set(), "CPU": set()}
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                self.held[event.medium] -= set(event.block_hashes)
            else:
                self.store(event)

    def store(self, event: BlockStored) -> None:
        assert event.medium is not None and (event.lora_id, event.lora_name) == (None, None)
        prompt = () if event.parent_block_hash is None else self.prompts[event.parent_block_hash]
        for index, block in enumerate(event.block_hashes):
            prompt += tuple(event.token_ids[index * event.block_size : (index + 1) * event.block_size])
            self.prompts[block] = prompt
        self.held[event.medium] |= set(event.block_hashes)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def publisher_of(
    stack: ExitStack,
    events: BlockEvents,
    *,
    period_s: float = 0.01,
    buffer_steps: int = BUFFER_STEPS,
    buffer_bytes: int = BUFFER_BYTES,
    **options: Any,
) -> KvEventPublisher:
    publisher = KvEventPublisher(
        on_free_ports(**options),
        "r0",
        "127.0.0.1",
        "m",
        period_s=period_s,
        buffer_steps=buffer_steps,
        buffer_bytes=buffer_bytes,
    )
    stack.callback(publisher.close)
    publisher.start(events)
    return publisher


def subscribe(stack: ExitStack, publisher: KvEventPublisher, **options: Any) -> Subscriber:
    subscriber = Subscriber(publisher, **options)
    stack.callback(subscriber.close)
    return subscriber


def replica_with(events: KvEventSettings, **config: Any) -> EngineReplica:
    engine = {"model": str(demo_model_path()), "device": "cpu", "kv_pages": 256, "threads": 1, **config}
    return EngineReplica(
        EngineConfig(**engine),
        ReplicaSettings(kv_events=events),
        None,
        Engine.from_config,
        lambda: ("r0", "127.0.0.1"),
    )


def answer(replica: EngineReplica, name: str, prompt: list[int], salt: str = "") -> None:
    """Run a request to its end."""
    asked = GenerateRequest(name, "demo", prompt, SamplingParams(max_tokens=4, seed=1), salt=salt)
    assert asyncio.run(replica.generate(asked)).output is not None


def prompt_of(*numbers: int) -> list[int]:
    """A prompt of some blocks of 16 tokens, each of one number."""
    return [number for number in numbers for _ in range(16)]


def test_the_events_of_a_real_engine_give_the_blocks_that_its_cache_holds(stack: ExitStack) -> None:
    """Prompts with a common beginning, more than there is room for, then an emptied cache."""
    replica = replica_with(on_free_ports(), host_kv_gib=0.01, host_kv_min_uses=1, kv_pages=24)
    stack.callback(replica.close)
    assert replica.kv_events is not None
    subscriber = subscribe(stack, replica.kv_events)
    cache = replica.engine.cache
    for number in range(12):
        answer(replica, f"a{number}", prompt_of(5, 6, 7 + number, 8))
    held: set[tuple[int, ...]] = prefixes(cache, 16, salted=False)

    def told(medium: str) -> set[tuple[int, ...]]:
        return {subscriber.prompts[block] for block in subscriber.held[medium]}

    subscriber.read(lambda: told("GPU") == held)
    assert len(held) > 10 and tuple(prompt_of(5, 6)) in held
    subscriber.read(lambda: tuple(prompt_of(5, 6, 7, 8)) in told("CPU"))
    assert all(len(prompt) % 16 == 0 for prompt in told("CPU"))
    asyncio.run(replica.empty_cache())
    subscriber.read(lambda: not subscriber.held["GPU"] and not subscriber.held["CPU"])
    assert not subscriber.replayed or subscriber.replayed[0] == 0, "it missed only what came before it"
    assert replica.kv_events.counts["stored"] >= replica.kv_events.counts["removed"] > 24


@pytest.mark.parametrize("include", [False, True])
def test_a_private_tenant_s_prompts_are_not_published_unless_asked_for(stack: ExitStack, include: bool) -> None:
    replica = replica_with(on_free_ports(include_tenants=include))
    stack.callback(replica.close)
    assert replica.kv_events is not None
    subscriber = subscribe(stack, replica.kv_events)
    secret, known = prompt_of(11, 12, 13), prompt_of(21, 22)
    answer(replica, "a", secret, salt="tenant:a:")
    answer(replica, "b", known)
    subscriber.read(lambda: tuple(known) in subscriber.prompts.values())
    batches = [batch for _, batch in subscriber.ask((0).to_bytes(8, "big"))]
    events = [event for batch in batches for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    private = [event for event in stored if 11 in event.token_ids]
    assert bool(private) == include
    assert all(event.extra_keys is not None for event in private)
    assert not any(b"tenant" in batch for batch in batches), "a salt itself is never told"
    assert not any(event.extra_keys for event in stored if 21 in event.token_ids)


def test_names_in_place_of_positions(stack: ExitStack) -> None:
    events = BlockEvents(2)
    publisher = publisher_of(stack, events, encoding="map", topic="kv@{host}@{model}")
    subscriber = subscribe(stack, publisher)
    events.store(Namespace("m"), None, [2**64 - 1, 7], array("i", [1, 2, 3, 4]))
    *_, (number, batch) = subscriber.ask((0).to_bytes(8, "big"))
    while number < 1:
        *_, (number, batch) = subscriber.ask((0).to_bytes(8, "big"))
    decoded = msgspec.msgpack.decode(batch, type=NamedBatch)
    assert decoded.events == [NamedStored([2**64 - 1, 7], None, [1, 2, 3, 4], 2, None, "GPU", None)]
    assert decoded.data_parallel_rank == 0 and decoded.ts > 1.7e9
    events.evict([2**64 - 1, 7])
    topic, _, batch = subscriber.events.recv_multipart()
    while not isinstance(msgspec.msgpack.decode(batch, type=NamedBatch).events[0], NamedRemoved):
        topic, _, batch = subscriber.events.recv_multipart()
    events_then = msgspec.msgpack.decode(batch, type=NamedBatch).events
    assert topic == b"kv@127.0.0.1@m" and isinstance(events_then[1], NamedCleared)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(seed=st.integers(0, 2**32), buffer_steps=st.sampled_from((0, 2, 1000)), loss=st.sampled_from((0.2, 0.9)))
def test_a_subscriber_that_misses_messages_has_the_same_blocks_after_a_replay(
    seed: int, buffer_steps: int, loss: float
) -> None:
    """Messages are lost at random, kept or not any more: in the end the mirror is what the cache holds."""
    draw, events, held = random.Random(seed), BlockEvents(1), {Tier.DEVICE: set[int](), Tier.HOST: set[int]()}
    with ExitStack() as stack:
        publisher = publisher_of(stack, events, buffer_steps=buffer_steps, period_s=0.001)
        subscriber = subscribe(stack, publisher)
        lossless = subscriber.take
        subscriber.take = lambda *message: None if draw.random() < loss else lossless(*message)  # type: ignore
        for number in range(60):
            block = draw.randrange(30) + 1
            if block not in held[Tier.DEVICE]:
                events.store(Namespace("m"), None, [block], array("i", [block]))
                held[Tier.DEVICE].add(block)
            elif block not in held[Tier.HOST] and draw.random() < 0.5:
                events.keep([block], Tier.HOST)
                held[Tier.HOST].add(block)
            else:
                events.evict([block])
                held[Tier.DEVICE].remove(block)
                events.drop([block] if block in held[Tier.HOST] else [], Tier.HOST)
                held[Tier.HOST].discard(block)
            if number % 5 == 0 and subscriber.events.poll(20):
                _, at, batch = subscriber.events.recv_multipart()
                subscriber.take(int.from_bytes(at, "big"), batch)
        subscriber.take = lossless  # type: ignore[method-assign]
        events.store(Namespace("m"), None, [99], array("i", [99]))
        subscriber.read(lambda: 99 in subscriber.held["GPU"])
        assert subscriber.held == {"GPU": held[Tier.DEVICE] | {99}, "CPU": held[Tier.HOST]}


def test_a_slow_subscriber_misses_messages_and_recovers(stack: ExitStack) -> None:
    """It reads nothing while far more is published than may wait for it."""
    events = BlockEvents(64)
    publisher = publisher_of(stack, events, hwm=2, period_s=0.001, buffer_bytes=2**20)
    subscriber = subscribe(stack, publisher, hwm=1)
    subscriber.store = lambda event: subscriber.held["GPU"].update(event.block_hashes)  # type: ignore[method-assign]
    first = array("i", range(64))
    events.store(Namespace("m"), None, [1], first)
    subscriber.read(lambda: 1 in subscriber.held["GPU"])
    number = 2
    while publisher.counts["stored"] < 60_000:  # more than the sockets' own buffers take
        events.store(Namespace("m"), None, range(number, number + 500), array("i", range(64 * 500)))
        number += 500
        threading.Event().wait(0.002)
    last = number
    events.store(Namespace("m"), None, [last], first)
    while publisher.counts["stored"] < last:
        threading.Event().wait(0.01)
    subscriber.read(lambda: last in subscriber.held["GPU"])
    assert publisher.counts["snapshot"] and len(subscriber.numbers) <= subscriber.numbers[-1]
    assert subscriber.held["GPU"] == set(range(1, last + 1))


def test_a_request_that_is_none_is_counted_and_those_after_it_are_served(stack: ExitStack) -> None:
    events = BlockEvents(1)
    publisher = publisher_of(stack, events)
    subscriber = subscribe(stack, publisher)
    strange = subscriber.context.socket(zmq.DEALER)
    strange.connect(publisher.replay_endpoint or "")
    for request in ([b"x"], [b"", b"short"], [b"", b"x" * 9], [b"", b"x" * 8, b"more"], [b"no", b"x" * 8]):
        strange.send_multipart(request)
    while publisher.counts["malformed"] < 5:
        threading.Event().wait(0.01)
    assert [number for number, _ in subscriber.ask((0).to_bytes(8, "big"))] == [0]
    assert list(subscriber.ask((2**63).to_bytes(8, "big"))) == []
    while publisher.counts["buffered"] < 2:  # an answer is counted when it has been sent
        threading.Event().wait(0.01)
    assert not publisher.counts["failed"]


def test_each_replica_of_a_machine_takes_the_next_ports(stack: ExitStack) -> None:
    settings = on_free_ports(num_ports=1)
    first = KvEventPublisher(settings, "r0", "127.0.0.1", "m")
    stack.callback(first.close)
    with pytest.raises(OSError, match=r"in use\. Give engines\.kv_events other endpoints, or raise its num_ports"):
        KvEventPublisher(settings, "r1", "127.0.0.1", "m")
    both = settings.model_copy(update={"num_ports": 8})
    second = KvEventPublisher(both, "r1", "127.0.0.1", "m")
    stack.callback(second.close)
    moved = [
        int(there.rpartition(":")[2]) - int(here.rpartition(":")[2])
        for here, there in (
            (first.endpoint, second.endpoint),
            (first.replay_endpoint or "", second.replay_endpoint or ""),
        )
    ]
    assert moved[0] == moved[1] > 0
    first.close()
    again = KvEventPublisher(settings, "r2", "127.0.0.1", "m")
    stack.callback(again.close)
    assert again.endpoint == first.endpoint


def test_an_endpoint_that_is_not_this_machine_s_ends_the_start_before_a_model_is_loaded() -> None:
    def load(config: EngineConfig) -> Engine:
        raise AssertionError("no model is loaded")

    for endpoint in ("tcp://203.0.113.7:5557", "ipc:///no/such/folder/{replica}"):
        options = ReplicaSettings(kv_events=KvEventSettings(endpoint=endpoint))
        with pytest.raises(OSError, match=r"cannot be published on .*need addresses of this machine"):
            EngineReplica(EngineConfig(), options, None, load, lambda: ("r0", "127.0.0.1"))


def test_files_in_place_of_ports(stack: ExitStack, tmp_path: Path) -> None:
    events = BlockEvents(1)
    publisher = publisher_of(
        stack,
        events,
        endpoint=f"ipc://{tmp_path}/{{replica}}",
        replay_endpoint=f"ipc://{tmp_path}/{{replica}}-again",
    )
    assert publisher.endpoint == f"ipc://{tmp_path}/r0"
    subscriber = subscribe(stack, publisher)
    events.store(Namespace("m"), None, [1], array("i", [5]))
    while not publisher.counts["stored"]:
        threading.Event().wait(0.01)
    assert [number for number, _ in subscriber.ask((0).to_bytes(8, "big"))] == [0, 1]
