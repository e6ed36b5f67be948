"""A new replica computes the prefixes that ingresses reported to the hub before it is ready."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.api.served.text_codec import TextCodec
from deployments.config.settings import WarmUpSettings
from deployments.config.shared_prefixes import SharedPrefixSettings
from deployments.hub.deployment import MetricsHub
from deployments.replica.deployment import EngineReplica
from deployments.replica.settings import ReplicaSettings
from engine.program.engine import Engine, model_directory
from engine.settings.config import EngineConfig
from engine.text.tokenizer import load_tokenizer
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from tests.deployments.support.in_process_engines import CountingRunner, request, until
from tests.deployments.support.prefix_reports import BLOCK, report, tokens_of
from tests.deployments.support.time_limit import run_scenario

SYSTEM = list(range(100, 140))


class Handle:
    """A deployment handle without Serve, on which the methods named in `broken` never answer."""

    def __init__(self, target: Any, *broken: str) -> None:
        self._target, self._broken = target, broken

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        return SimpleNamespace(remote=never if name in self._broken else method)


def replica(hub: Any, *shared: SharedPrefixSettings, **limits: float) -> EngineReplica:
    config = EngineConfig(served_name="m", kv_pages=64, page_size=BLOCK, block_tokens=BLOCK)
    warm_up = WarmUpSettings.model_validate({"ask_timeout_s": 0.2, **limits})
    settings = ReplicaSettings(warm_up=warm_up, shared_prefixes=shared)
    runner = CountingRunner(64)
    runner.model_config.vocab_size = 100_000
    engine = Engine(config, runner)
    return EngineReplica(config, settings, Handle(hub) if isinstance(hub, MetricsHub) else hub, lambda _: engine,
                         lambda: ("new", "127.0.0.1"))  # fmt: skip


async def cached_tokens(made: EngineReplica, request_id: str, prompt: list[int], salt: str = "") -> int:
    """Run a request and return how many tokens of its prompt were in the cache."""
    before = made.engine.loop.load().cache.hit_tokens
    asked = request(request_id, max_tokens=1, salt=salt)
    asked.prompt_ids[:] = prompt
    output = (await made.generate(asked)).output
    assert output is not None and output.finish_reason == "length"
    await until(lambda: not made.engine.loop.has_work)
    return made.engine.loop.load().cache.hit_tokens - before


# --- the ingress -----------------------------------------------------------------------------------------------


def test_the_placer_knows_which_beginnings_came_often() -> None:
    fleet = Fleet()
    placer = Placer(fleet, PlacerSettings(block_tokens=BLOCK, hot_tokens=10_000))
    fleet.update({"r0": None})
    for number in range(4):
        asked = request(f"a{number}")
        asked.prompt_ids[:] = [*SYSTEM, number]
        placer.place(asked, ["r0"])
    resumed = request("resumed", output_ids=[1, 2])
    for _ in range(9):
        placer.place(resumed, ["r0"])  # a stream that moved is no new use of its prompt
    assert tokens_of(placer.hot_prefixes(1000)) == [SYSTEM]
    assert Placer(Fleet()).hot_prefixes(1000) == []


# --- the replica -----------------------------------------------------------------------------------------------


def test_a_new_replica_holds_the_most_valuable_prefixes_before_it_is_ready() -> None:
    async def scenario() -> None:
        hub = MetricsHub()
        await hub.report_prefixes("i1", report([*SYSTEM, 1], [*SYSTEM, 2], salt="tenant"))
        await hub.report_prefixes("i2", report([7] * 20, [7] * 20, model="another"))
        made = replica(hub)
        await made.record_replica_metadata()
        assert (
            made.engine.loop.load().cache.query_tokens == 0
        )  # the users' hits and misses are counted, and no others
        assert await cached_tokens(made, "a", [*SYSTEM, 5], salt="tenant") == len(SYSTEM)
        assert await cached_tokens(made, "b", [*SYSTEM, 5]) == 0
        assert await cached_tokens(made, "c", [7] * 20) == 0
        made.close()

    run_scenario(scenario())


def test_the_best_prefixes_fill_a_share_of_a_new_replicas_pages() -> None:
    async def scenario() -> None:
        hub = MetricsHub()
        best, next_best = [1] * 64, [2] * 128
        await hub.report_prefixes("i1", report(*[best] * 9, *[next_best] * 3))
        made = replica(hub, max_kv_share=0.5)  # of 256 tokens
        await made.record_replica_metadata()
        assert made.engine.loop.load().pages.evictable == 32
        assert await cached_tokens(made, "a", [*best, 5]) == 64
        assert await cached_tokens(made, "b", [*next_best, 5]) == 64
        made.close()

    run_scenario(scenario())


@pytest.mark.parametrize("limits", [{}, {"max_seconds": 0}])
def test_without_an_answer_or_a_wish_a_replica_starts_cold(
    limits: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        hub = MetricsHub()
        await hub.report_prefixes("i1", report(SYSTEM, SYSTEM))
        made = replica(Handle(hub, "hot_prefixes"), **limits)
        with caplog.at_level(logging.WARNING, logger="ray.serve"):
            await made.record_replica_metadata()
        complaints = [record.message for record in caplog.records if "cold" in record.message]
        assert complaints == ([] if limits else ["this replica starts cold: TimeoutError"])
        assert await cached_tokens(made, "a", [*SYSTEM, 5]) == 0
        made.close()

    run_scenario(scenario())


def test_a_replica_computes_shared_prefixes_from_their_texts_and_keeps_them_for_all_salts() -> None:
    text = "Answer in one short sentence, and name the module that you speak of."
    codec = TextCodec(load_tokenizer(model_directory(EngineConfig())))

    def prompt(question: str) -> list[int]:
        return codec.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": question}])

    async def scenario() -> None:
        hub = MetricsHub()
        await hub.report_prefixes("i1", report(*[[1] * 64] * 9))
        made = replica(hub, SharedPrefixSettings(text=text))
        await made.record_replica_metadata()
        load = made.engine.loop.load()
        num_shared = load.pages.locked * BLOCK
        assert len(text) // 8 < num_shared <= len(prompt("")) and load.pages.evictable == 64 // BLOCK
        for salt in ("tenant:a:", "tenant:b:", ""):
            assert await cached_tokens(made, f"r{salt}", prompt("Hi"), salt=salt) == num_shared
        made.close()

    run_scenario(scenario())


@pytest.mark.parametrize(("times", "complaint"), [(4, "take .* of the KV pages"), (50, "at most 255 fit")])
def test_a_replica_does_not_start_without_its_shared_prefixes(times: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replica(None, SharedPrefixSettings(text="Answer in one short sentence. " * times), max_kv_share=0.05)
