"""Each rank keeps its own part of a page in a file of its own; a page is there when all ranks' parts are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.kv_tier.page_file import RankFiles
from engine.program.engine import Engine
from engine.scheduling.prefill_budget import PrefillBudget
from engine.settings.config import EngineConfig
from engine.settings.kv_tier import KVTier
from engine.values.stream_delta import StreamDelta
from tests.engine.support.engines_on_ranks import Layout
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.rank_processes import Threads
from tests.engine.support.whole_engines import GREEDY, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 90) for seed in (1, 2, 3, 4)]
TWO_RANKS, TWO_STAGES, PARTS = Layout(2), Layout(1, stages=2), Layout(4, parts=2)
"""The two stages of the three layers have parts of pages of different sizes."""
NUM_PAGES = 3 * 5
"""Pages of the prompts that are evicted: the device has room for the last one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"), num_attention_heads=8)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for files; engines never know how fast they compute, so that prompts wait for these."""
    monkeypatch.setattr(PrefillBudget, "observe", lambda *_: None)
    (directory := tmp_path / "kv").mkdir()
    return directory


@contextmanager
def engine_on(model: Path, directory: Path, layout: Layout = TWO_RANKS) -> Iterator[Engine]:
    """An engine with device pages for one prompt."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        kv_pages=7,
        page_size=16 // layout.parts,
        max_running=1,
        max_step_tokens=16,
        tensor_parallel_size=layout.size,
        pipeline_parallel_size=layout.stages,
        context_parallel_size=layout.parts,
        host_kv_gib=2**-8,
        host_kv_min_uses=1,
        kv_tier=KVTier(str(directory), rescan_s=0.01),
    )
    engine = Engine.from_config(config, launcher=Threads())
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine) -> list[list[StreamDelta]]:
    """Ask all prompts, one after the other, each when nothing is being written any more."""
    found = []
    for prompt in PROMPTS:
        found += run_prompts(engine, [prompt])
        host = engine.scheduler.allocator.host
        host.begin_step()  # The last step no longer reads its pages.
        while host.pool.tier.num_idle < host.pool.tier.num_pages:
            engine.scheduler.take_in_transfers()
            time.sleep(0.001)
    return found


def right(model: Path, found: list[list[StreamDelta]]) -> bool:
    return [tokens_of(events) for events in found] == [
        oracle_greedy(model, one, GREEDY.max_tokens) for one in PROMPTS
    ]


def parts(directory: Path, rank: int) -> list[Path]:
    return sorted(directory.glob(f"*/*.{rank}.kv"))


@pytest.mark.parametrize("layout", [TWO_RANKS, TWO_STAGES, Layout(2, stages=2), PARTS], ids=str)
def test_files_of_the_ranks_are_continued_after_a_restart_and_by_another_engine(
    model: Path, directory: Path, layout: Layout
) -> None:
    for number in range(2):
        with engine_on(model, directory, layout) as engine:
            found = answers(engine)
            assert right(model, found)
            assert [events[-1].num_cached for events in found] == ([80, 80, 80, 0] if number else [0] * 4)
            totals = engine.loop.load().lower_tier
            assert totals.failed == 0 and (totals.loaded > 0) == (number > 0)
            assert totals.held == len(parts(directory, 0)) == len(parts(directory, 1)) >= NUM_PAGES
    assert not list(directory.glob("**/*.part"))


@pytest.mark.parametrize("layout", [TWO_RANKS, TWO_STAGES], ids=str)
def test_pages_in_host_memory_come_back_on_every_rank(model: Path, directory: Path, layout: Layout) -> None:
    with engine_on(model, directory, layout) as engine:
        assert right(model, answers(engine))
        found = answers(engine)
        assert right(model, found) and [events[-1].num_cached for events in found][:3] == [80, 80, 80]
        assert engine.loop.load().lower_tier.loaded == 0, "nothing had to be read"


@pytest.mark.parametrize(("rank", "spoil"), [(0, "missing"), (1, "cut"), (1, "changed")])
def test_a_page_of_which_a_ranks_part_is_spoilt_is_computed(
    model: Path, directory: Path, rank: int, spoil: str
) -> None:
    """Files that vanish after the engine has looked, and those that are not what was written."""
    with engine_on(model, directory) as engine:
        answers(engine)
    with engine_on(model, directory) as engine:
        for path in parts(directory, rank)[::2]:
            content = bytearray(path.read_bytes())
            content[100] ^= 255
            if spoil == "missing":
                path.unlink()
            else:
                path.write_bytes(content if spoil == "changed" else content[:-1])
        assert right(model, answers(engine))
        assert engine.loop.load().host_pages.total == engine.runner.host_memory.num_pages
    with engine_on(model, directory) as engine:  # what was spoilt is whole again, or gone
        assert right(model, answers(engine)) and engine.loop.load().lower_tier.failed == 0


def test_a_page_is_not_there_until_all_ranks_have_written_it(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's disk is full: no page counts, no part stays, and nobody is stopped."""
    write = RankFiles.write

    def full(files: RankFiles, *page: object) -> None:
        if files.rank:
            raise OSError("No space left on device")
        write(files, *page)  # type: ignore[arg-type]

    monkeypatch.setattr(RankFiles, "write", full)
    with engine_on(model, directory) as engine:
        assert right(model, answers(engine))
        assert engine.loop.load().lower_tier.held == 0
        log = engine.runner.lower_tier.log
        log.drain()
        assert not list(log.snapshot())
        while parts(directory, 0):
            time.sleep(0.001)


@pytest.mark.parametrize("other", [Layout(1), TWO_STAGES], ids=str)
def test_engines_with_other_ranks_do_not_share_files(model: Path, directory: Path, other: Layout) -> None:
    with engine_on(model, directory):
        pass
    with (
        pytest.raises(ValueError, match="holds the pages of another model or layout"),
        engine_on(model, directory, other),
    ):
        pass
