"""Whole engines that fetch KV from each other: every answer is that of an engine which computes all of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from cache import Namespace
from engine.host_tier.peers import LentPages
from engine.program.engine import Engine
from engine.scheduling.prefill_budget import PrefillBudget
from engine.values.request import KVSource
from engine.values.stream_delta import StreamDelta
from tests.engine.support.in_process_peers import InProcessPeers
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 90) for seed in (1, 2, 3, 4)]
WHOLE = KVSource("source", 90)
"""Five pages of 16 tokens, and some more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def slow_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which engines never know how fast it is, so that their prompts wait for peers."""
    monkeypatch.setattr(PrefillBudget, "observe", lambda *_: None)
    return model


def engine_with_host(model: Path, num_tokens: int = 112) -> Engine:
    return engine_for(model, 16, num_tokens, max_running=2, host_kv_gib=2**-8, host_kv_min_uses=1)


class Pair:
    """A source, which has computed some prompts and whose loop runs, and a receiver that is stepped by hand."""

    def __init__(self, model: Path, *prompts: list[int], tokens_of_source: int = 112) -> None:
        self.source, self.receiver = engine_with_host(model, tokens_of_source), engine_with_host(model)
        for prompt in prompts:
            run_prompts(self.source, [prompt])
        self.source.loop.start(lambda _: None)
        self.peers = InProcessPeers(self.receiver, source=self.source)
        self.receiver.connect_peers(self.peers)

    def ask(self, prompt: list[int], source: KVSource | None = WHOLE, name: str = "0") -> list[StreamDelta]:
        self.receiver.loop.submit(self.receiver.new_request(name, prompt, GREEDY, source=source))
        events = []
        while self.receiver.loop.has_work:
            events += self.receiver.loop.step()
            assert self.receiver.cache.account().total == self.receiver.cache.num_pages
        return events

    def lend(self, tokens: list[int]) -> Future[LentPages]:
        """Have the source lend what it has."""
        return self.source.loop.lend(Namespace(self.source.config.name), tokens, 0)

    def wait_for_arrivals(self) -> None:
        """Wait until nothing is under way: the thread that moves pages decides how long that takes."""
        while self.receiver.scheduler.load(0.0).host_pages.arriving:
            self.receiver.scheduler.take_in_transfers()
            time.sleep(0.001)

    def close(self) -> None:
        self.wait_for_arrivals()
        self.receiver.close()
        assert self.peers.is_closed
        self.lend([]).result(60)  # after all that was given back
        load = self.source.scheduler.load(0.0)
        self.source.close()
        assert load.pages.lent == load.host_pages.lent == 0


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """What is put there is closed, and must hold nothing then."""
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.close()


def pair_of(pairs: list[Pair], *args: object, **options: int) -> Pair:
    pairs.append(Pair(*args, **options))  # type: ignore[arg-type]
    return pairs[-1]


def test_an_answer_from_fetched_pages_is_that_of_a_cold_engine(slow_model: Path, pairs: list[Pair]) -> None:
    pair = pair_of(pairs, slow_model, *PROMPTS[:1])
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(slow_model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 80 and pair.peers.num_pages == [5]
    assert pair.receiver.loop.load().peers.loaded == 5


def test_latent_kv_is_fetched_too(slow_model: Path, pairs: list[Pair], tmp_path: Path) -> None:
    latent = save_tiny("deepseek_v3", tmp_path)
    pair = pair_of(pairs, latent, *PROMPTS[:1])
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(latent, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 80


def test_pages_on_the_device_and_in_the_host_memory_of_a_source_are_fetched(
    slow_model: Path, pairs: list[Pair]
) -> None:
    """The end of the prompt was evicted to the host by another one that begins alike."""
    pair = pair_of(pairs, slow_model, PROMPTS[0], [*PROMPTS[0][:32], *PROMPTS[1][:60]])
    lent = pair.lend(PROMPTS[0]).result(60)
    pair.source.loop.give_back(lent.number)
    assert lent.device and lent.host
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(slow_model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 80


@pytest.mark.parametrize("most", [0, 2])
def test_a_source_that_dies_midway_changes_no_answer(slow_model: Path, pairs: list[Pair], most: int) -> None:
    pair = pair_of(pairs, slow_model, *PROMPTS[:1])
    pair.peers.most = most
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(slow_model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 16 * most


@pytest.mark.parametrize("num_tokens", [-1, 17, 10**9])
def test_a_source_that_is_said_to_have_other_than_it_has(
    slow_model: Path, pairs: list[Pair], num_tokens: int
) -> None:
    prompt = [*PROMPTS[0][:50], *PROMPTS[1][:40]]
    pair = pair_of(pairs, slow_model, *PROMPTS[:1])
    events = pair.ask(prompt, KVSource("source", num_tokens))
    assert tokens_of(events) == oracle_greedy(slow_model, prompt, GREEDY.max_tokens)
    assert events[-1].num_cached == (48 if num_tokens > 50 else max(num_tokens, 0) // 16 * 16)


def test_a_source_that_has_nothing_of_it_any_more(slow_model: Path, pairs: list[Pair]) -> None:
    pair = pair_of(pairs, slow_model, *PROMPTS[:1])
    pair.source.loop.empty_cache().result(60)
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(slow_model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 0


def test_a_source_that_is_slower_than_computing_is_not_waited_for(model: Path, pairs: list[Pair]) -> None:
    """Its pages come later, and the next prompt has them."""
    pair = pair_of(pairs, model, *PROMPTS[:1])
    for prompt in PROMPTS[1:3]:
        pair.ask(prompt, None)
    pair.peers.is_open.clear()
    events = pair.ask(PROMPTS[0])
    assert tokens_of(events) == oracle_greedy(model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 0
    pair.peers.is_open.set()
    pair.wait_for_arrivals()
    pair.receiver.cache.reset()
    again = pair.ask(PROMPTS[0], None)
    assert again[-1].num_cached == 80 and tokens_of(again) == tokens_of(events)


def test_an_abort_midway_leaves_pages_that_the_next_finds(slow_model: Path, pairs: list[Pair]) -> None:
    pair = pair_of(pairs, slow_model, *PROMPTS[:1])
    pair.peers.is_open.clear()
    pair.receiver.loop.submit(pair.receiver.new_request("gone", PROMPTS[0], GREEDY, source=WHOLE))
    pair.receiver.loop.step()
    pair.receiver.loop.abort("gone")
    ended = pair.receiver.loop.step()
    assert [event.finish_reason for event in ended] == ["abort"]
    pair.peers.is_open.set()
    pair.wait_for_arrivals()
    events = pair.ask(PROMPTS[0], None)
    assert tokens_of(events) == oracle_greedy(slow_model, PROMPTS[0], GREEDY.max_tokens)
    assert events[-1].num_cached == 80 and len(pair.peers.num_pages) == 1


def test_engines_whose_loops_run_fetch_from_each_other(slow_model: Path) -> None:
    """Each has room for one prompt, so both lend, evict and fetch all the time."""
    engines = [engine_with_host(slow_model) for _ in range(2)]
    events: queue.SimpleQueue[list[StreamDelta]] = queue.SimpleQueue()
    peers = [InProcessPeers(engines[0], other=engines[1]), InProcessPeers(engines[1], other=engines[0])]
    for engine, fetching in zip(engines, peers, strict=True):
        engine.connect_peers(fetching)
        engine.loop.start(events.put)
    names = [f"{number}.{prompt}.{turn}" for turn in range(3) for prompt in range(4) for number in range(2)]
    for name in names:
        number, prompt, _ = map(int, name.split("."))
        request = engines[number].new_request(name, PROMPTS[prompt], GREEDY, source=KVSource("other", 90))
        engines[number].loop.submit(request)
    got: dict[str, list[int]] = {name: [] for name in names}
    num_left = len(names)
    while num_left:
        for delta in events.get(timeout=60):
            got[delta.request_id] += delta.token_ids
            num_left -= delta.finish_reason is not None
    expected = [oracle_greedy(slow_model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for name, tokens in got.items():
        assert tokens == expected[int(name.split(".")[1])]
    for engine in engines:
        engine.close()
        account = engine.cache.account()
        assert account.total == engine.cache.num_pages and account.locked == account.private == 0


def test_peers_are_connected_before_the_loop_starts(model: Path) -> None:
    engine = engine_with_host(model)
    engine.loop.start(lambda _: None)
    peers = InProcessPeers(engine)
    with pytest.raises(RuntimeError, match="before start"):
        engine.connect_peers(peers)
    peers.close()
    engine.close()
