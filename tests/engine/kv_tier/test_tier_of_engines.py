"""Whole engines with files: prompts continue what other engines computed, and nothing stops them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cache import Namespace
from cache.news.block_events import BlocksRemoved, BlocksStored
from cache.news.tier import Tier
from engine.kv_tier.page_files import PageFiles
from engine.program.engine import Engine
from engine.scheduling.prefill_budget import PrefillBudget
from engine.settings.config import EngineConfig
from engine.settings.kv_tier import KVTier
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 90) for seed in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "kv"
    directory.mkdir()
    return directory


def engine_with_files(model: Path, directory: Path, **tier: Any) -> Engine:
    """An engine with device pages for one prompt."""
    settings = KVTier(str(directory), rescan_s=0.01, **tier)
    return engine_for(model, 16, 112, max_running=1, host_kv_gib=2**-8, host_kv_min_uses=1, kv_tier=settings)


def ask(engine: Engine, prompt: list[int]) -> list[StreamDelta]:
    (events,) = run_prompts(engine, [prompt])
    return events


def written(engine: Engine) -> None:
    """Wait until nothing is being written: the threads, and no test, decide how long that takes."""
    host = engine.scheduler.allocator.host
    host.begin_step()  # The last step no longer reads its pages.
    while host.pool.tier.num_idle < host.pool.tier.num_pages:
        engine.scheduler.take_in_transfers()
        time.sleep(0.001)


def answers(engine: Engine) -> list[list[StreamDelta]]:
    events = []
    for prompt in PROMPTS:
        events.append(ask(engine, prompt))
        written(engine)
    return events


@pytest.fixture
def slow_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which engines never know how fast it is, so that their prompts wait for files."""
    monkeypatch.setattr(PrefillBudget, "observe", lambda *_: None)
    return model


def test_a_restarted_engine_continues_the_prefixes_in_files(slow_model: Path, directory: Path) -> None:
    model = slow_model
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for number in range(3):
        engine = engine_with_files(model, directory)
        found = answers(engine)
        assert [tokens_of(events) for events in found] == expected
        num_cached = [events[-1].num_cached for events in found]
        assert num_cached == ([80, 80, 80, 0] if number else [0] * 4)
        totals = engine.loop.load().lower_tier
        assert totals.failed == 0 and (totals.loaded > 0) == (number > 0)
        engine.close()


def test_pages_that_wait_to_be_written_are_written_in_turn(
    slow_model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page at a time, and an engine that has nothing to do but that."""
    monkeypatch.setattr("engine.kv_tier.open_tier.MAX_QUEUED_SHARE", 1e-9)
    engine = engine_with_files(slow_model, directory)
    for prompt in PROMPTS:
        ask(engine, prompt)
    engine.loop.start(lambda _: None)
    while engine.runner.lower_tier.totals().saved < 3 * 5:
        time.sleep(0.001)
    engine.close()


def test_spoilt_files_are_computed_again(slow_model: Path, directory: Path) -> None:
    model = slow_model
    engine = engine_with_files(model, directory)
    answers(engine)
    engine.close()
    for number, path in enumerate(sorted(directory.glob("*/*.kv"))):
        content = bytearray(path.read_bytes())
        content[100 + number] ^= 255
        path.write_bytes(content if number % 2 else content[:-5])
    engine = engine_with_files(model, directory)
    for prompt, events in zip(PROMPTS, answers(engine), strict=True):
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    assert engine.loop.load().lower_tier.failed > 0
    engine.close()


def test_a_full_disk_stops_no_request(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("engine.kv_tier.open_tier.RETRY_S", 1e-6)
    engine = engine_with_files(model, directory)
    writev = os.writev
    monkeypatch.setattr(os, "writev", full)
    for prompt, events in zip(PROMPTS, answers(engine), strict=True):
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    totals = engine.loop.load().lower_tier
    assert totals.skipped > 0 and totals.saved == totals.held == 0
    monkeypatch.setattr(os, "writev", writev)
    answers(engine)
    written(engine)
    assert engine.loop.load().lower_tier.saved > 0, "it is tried again"
    engine.close()


def test_a_disk_that_hangs_stops_no_request(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait as long as computing takes, and host memory keeps what is being read until that has ended."""
    engine = engine_with_files(model, directory)
    answers(engine)
    is_hanging, real = [True], PageFiles.read

    def hang(files: PageFiles, *page: Any) -> bool:
        while is_hanging:
            time.sleep(0.001)
        return real(files, *page)

    monkeypatch.setattr(PageFiles, "read", hang)
    for prompt in PROMPTS:
        assert tokens_of(ask(engine, prompt)) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    is_hanging.clear()
    assert [tokens_of(events) for events in answers(engine)] == [
        oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS
    ]
    engine.close()


def test_another_model_needs_another_directory(model: Path, directory: Path, tmp_path: Path) -> None:
    engine_with_files(model, directory).close()
    other = save_tiny("qwen3_tied", tmp_path / "other")
    with pytest.raises(ValueError, match="holds the pages of another model"):
        engine_with_files(other, directory)
    for each in (model, other):
        engine = engine_with_files(each, directory / "{fingerprint}")
        assert (directory / engine.runner.fingerprint).is_dir()  # type: ignore[attr-defined]
        engine.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_tier": KVTier("x")}, "host_kv_gib is 0"),
        ({"kv_tier": "x", "host_kv_gib": 1}, "must be a KVTier"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"directory": ""}, {"disk_gib": 0}, {"rescan_s": 0}, {"expected_mib_per_s": -1}],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"kv_tier\.{next(iter(settings))} must"):
        KVTier(**{"directory": "x", **settings})


def test_a_disk_with_no_room_for_a_page(model: Path, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"disk_gib is 1e-09, but one page takes"):
        engine_with_files(model, directory, disk_gib=1e-9)


def test_a_restarted_engine_reports_the_pages_in_its_directory_to_routers(model: Path, directory: Path) -> None:
    def told(engine: Engine) -> set[int]:
        log = engine.runner.lower_tier.log
        log.drain()
        return set(log.snapshot())

    engine = engine_with_files(model, directory)
    answers(engine)
    store, expected = engine.runner.lower_tier.store, told(engine)
    for prompt in PROMPTS[:-1]:  # the device still has the last one
        chain = engine.cache.block_hashes(Namespace(engine.config.name), prompt)
        assert expected >= set(chain[:5]) and len(chain) == 5
    engine.close()
    for _ in range(2):
        engine = engine_with_files(model, directory)
        while told(engine) != expected:
            time.sleep(0.001)
        assert engine.runner.lower_tier.store == store
        engine.close()


def test_blocks_in_files_are_reported_to_programs_of_others(model: Path, directory: Path) -> None:
    engine = engine_with_files(model, directory)
    events = engine.runner.lower_tier.log.events = engine.cache.follow_blocks()
    answers(engine)
    held: set[int] = set()
    for change in events.drain():
        if isinstance(change, BlocksStored) and change.tier == Tier.FILE:
            held.update(change.blocks)
    assert held >= set(engine.cache.block_hashes(Namespace(engine.config.name), PROMPTS[0])[:5])
    engine.runner.lower_tier.clear()
    gone = [one for one in events.drain() if isinstance(one, BlocksRemoved) and one.tier == Tier.FILE]
    assert {block for one in gone for block in one.blocks} == held
    engine.close()
