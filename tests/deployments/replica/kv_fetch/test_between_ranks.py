"""Replicas of several ranks fetch from each other: each rank's part of a page comes to the same rank there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from cache import Namespace
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch.exchange import KVExchange
from engine.program.engine import Engine
from engine.ranks import pages_of_ranks
from engine.scheduling.prefill_budget import PrefillBudget
from engine.settings.config import EngineConfig
from engine.values.request import KVSource
from engine.values.stream_delta import StreamDelta
from tests.engine.support.engines_on_ranks import Layout
from tests.engine.support.in_process_peers import read_pages
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.rank_processes import LastFirst, Threads
from tests.engine.support.whole_engines import GREEDY, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 90) for seed in (1, 2)]
TWO_RANKS, STAGES, PARTS = Layout(2), Layout(2, stages=2), Layout(6, parts=3)
"""The two stages of the three layers have parts of pages of different sizes."""
NUM_PAGES = 5
"""Whole pages of a prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@contextmanager
def replica(
    model: Path,
    transport: Literal["zmq", "nixl"] = "zmq",
    layout: Layout = TWO_RANKS,
    launcher: Threads | None = None,
) -> Iterator[tuple[Engine, KVExchange]]:
    """An engine with device pages for one prompt, and its exchange."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        kv_pages=7 if layout.parts == 1 else 3,
        page_size=16,
        max_running=1,
        tensor_parallel_size=layout.size,
        pipeline_parallel_size=layout.stages,
        context_parallel_size=layout.parts,
        host_kv_gib=2**-8,
        host_kv_min_uses=1,
    )
    engine = Engine.from_config(config, launcher=launcher or Threads())
    try:
        exchange = KVExchange.of(engine, "127.0.0.1", KvFetchSettings(transport=transport), WireSettings())
        assert exchange is not None
        yield engine, exchange
        exchange.close()
    finally:
        engine.close()


def ask(engine: Engine, prompt: list[int], source: KVSource) -> list[StreamDelta]:
    """Step an engine by hand until it has answered a prompt that lies elsewhere."""
    engine.loop.submit(engine.new_request("0", prompt, GREEDY, source=source))
    events = []
    while engine.loop.has_work:
        events += engine.loop.step()
        assert engine.cache.account().total == engine.cache.num_pages
    return events


@pytest.fixture(autouse=True)
def waits_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines never know how fast they compute, so that prompts wait for what is fetched."""
    monkeypatch.setattr(PrefillBudget, "observe", lambda *_: None)


@pytest.mark.parametrize(
    ("transport", "layout"), [("zmq", TWO_RANKS), ("nixl", TWO_RANKS), ("zmq", STAGES), ("zmq", PARTS)]
)
def test_pages_of_the_ranks_of_one_replica_come_to_those_of_another(
    model: Path,
    transport: Literal["zmq", "nixl"],
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pages_of_ranks, "_MOST_UNSTORED", 1)
    kind = transport, layout
    with replica(model, *kind) as (source, lending), replica(model, *kind) as (receiver, fetching):
        for prompt in PROMPTS:  # the first goes to host memory, the second stays on the device
            run_prompts(source, [prompt])
        source.loop.start(lambda _: None)
        for number, prompt in enumerate(PROMPTS, 1):
            events = ask(receiver, prompt, KVSource(lending.sender.address, len(prompt)))
            assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
            num_pages = len(prompt) // source.cache.page_size
            assert events[0].num_cached == num_pages * source.cache.page_size
            assert (fetching.fetcher.totals().loaded, fetching.fetcher.totals().failed) == (number * num_pages, 0)
    assert ("its pages go over sockets" in caplog.text) == (transport == "nixl")


def test_ranks_that_connect_late_get_their_own_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's ranks 5, 4, ... 1 connect in this order."""
    layout = Layout(6)
    with replica(model, layout=layout) as (source, lending):
        run_prompts(source, PROMPTS[:1])
        source.loop.start(lambda _: None)
        with replica(model, layout=layout, launcher=LastFirst(monkeypatch)) as (receiver, _):
            events = ask(receiver, PROMPTS[0], KVSource(lending.sender.address, len(PROMPTS[0])))
            assert tokens_of(events) == oracle_greedy(model, PROMPTS[0], GREEDY.max_tokens)
            assert events[0].num_cached == NUM_PAGES * 16


def test_a_page_read_elsewhere_has_both_ranks_parts(model: Path) -> None:
    contents = []
    for _ in range(2):
        with replica(model) as (engine, exchange):
            run_prompts(engine, PROMPTS[:1])
            memory = engine.runner.page_memory
            assert memory is not None and memory.regions() is None
            lent = engine.scheduler.lender.lend(Namespace(engine.config.name), PROMPTS[0], 0)
            contents.append(read_pages(memory, lent))
            assert [len(content) for content in contents[-1]] == [exchange.page_bytes] * NUM_PAGES
            engine.scheduler.lender.give_back(lent.number)
    half = len(contents[0][0]) // 2
    assert contents[0] == contents[1] and all(page[:half] != page[half:] for page in contents[0])


@pytest.mark.parametrize(
    ("own", "other"), [(TWO_RANKS, Layout(1)), (TWO_RANKS, Layout(1, stages=2)), (Layout(6), PARTS)], ids=str
)
def test_pages_of_other_ranks_are_of_another_kind(model: Path, own: Layout, other: Layout) -> None:
    with replica(model, layout=other) as (source, lending), replica(model, layout=own) as (receiver, fetching):
        run_prompts(source, PROMPTS[:1])
        source.loop.start(lambda _: None)
        events = ask(receiver, PROMPTS[0], KVSource(lending.sender.address, len(PROMPTS[0])))
        assert tokens_of(events) == oracle_greedy(model, PROMPTS[0], GREEDY.max_tokens)
        assert events[0].num_cached == 0 and fetching.fetcher.totals().failed_fetches == 1
        while lending.sender.num_transfers:
            time.sleep(0.001)
