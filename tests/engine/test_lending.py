"""Whole engines that lend: what is read of their pages while they work is the KV of the prompt, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cache import Namespace
from engine.host_tier.peers import LentPages
from engine.program.engine import Engine
from tests.engine.support.in_process_peers import read_pages
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 90) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


def lent_bytes(engine: Engine, tokens: Sequence[int]) -> tuple[LentPages, list[bytes]]:
    """Lend what there is of a prompt, and read it."""
    memory = engine.runner.page_memory
    assert memory is not None
    lent = engine.scheduler.lender.lend(Namespace(engine.config.name), tokens, 0)
    return lent, read_pages(memory, lent)


def test_a_page_is_the_same_from_the_device_from_the_host_and_from_another_engine(model: Path) -> None:
    engines = [engine_for(model, 16, 112, max_running=1, host_kv_gib=2**-8, host_kv_min_uses=1) for _ in range(2)]
    found = []
    for engine in engines:
        run_prompts(engine, PROMPTS[:1])
        lent, content = lent_bytes(engine, PROMPTS[0])
        assert (len(lent.device), len(lent.host)) == (5, 0)
        engine.scheduler.lender.give_back(lent.number)
        found.append(content)
    assert found[0] == found[1] and len(set(found[0])) == 5
    run_prompts(engines[0], PROMPTS[1:])
    lent, content = lent_bytes(engines[0], PROMPTS[0])
    assert (len(lent.device), len(lent.host)) == (0, 5)
    assert content == found[0]


def test_requests_run_during_a_loan_and_do_not_change_it(model: Path) -> None:
    engine = engine_for(model, 16, 320, max_running=2, host_kv_gib=2**-8, host_kv_min_uses=1)
    run_prompts(engine, PROMPTS[:1])
    lent, before = lent_bytes(engine, PROMPTS[0])
    prompts = [[*PROMPTS[0][:70], *PROMPTS[1]], *PROMPTS]
    for prompt in prompts:
        (events,) = run_prompts(engine, [prompt])
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    memory = engine.runner.page_memory
    assert memory is not None and read_pages(memory, lent) == before
    assert engine.cache.account().lent == 5
    engine.scheduler.lender.give_back(lent.number)
    assert engine.cache.account().lent == 0


def test_pages_are_equal_where_the_identity_is(model: Path, tmp_path: Path) -> None:
    settings = {"max_running": 1, "host_kv_gib": 2**-8}
    other = save_tiny("qwen3_tied", tmp_path / "other")
    memories = [
        engine_for(path, size, 128, **settings).runner.page_memory
        for path, size in ((model, 16), (model, 16), (model, 8), (other, 16))
    ]
    a, b, *different = [memory.identity for memory in memories if memory is not None]
    assert a == b and len({a, *different}) == 3


def test_without_host_pages_there_is_no_memory_to_share(model: Path) -> None:
    assert engine_for(model, 16, 112).runner.page_memory is None
