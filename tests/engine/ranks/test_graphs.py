"""Several ranks replay recorded steps: the same tokens as without graphs, whatever the rows ask of the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import RankLost
from engine.graphs.draft_graphs import DraftSize
from engine.loading import load_model
from engine.models.expert_copies import NOTHING
from engine.program.engine import Engine
from engine.runner.token_reader import TokensUnderway
from engine.settings.drafting import Speculation
from engine.values.sampling_params import SamplingParams
from tests.engine.support.engines_on_ranks import PROMPTS, Layout, ranks_config, run_on_ranks, tokens_of_each
from tests.engine.support.gpu_proofs import counted_replays
from tests.engine.support.oracle import random_ids, save_tiny
from tests.engine.support.rank_processes import Threads
from tests.engine.support.recorded_graphs import Recording, SpreadingAttention, record_as_on_gpus

LIMITED: dict[str, Any] = {"attention": "reference", "max_model_len": 128, "cuda_graphs": "lazy"}
"""Recorded steps gather whole page tables, and each size on its first use."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return save_tiny("qwen3", tmp_path_factory.mktemp("ranks"), **shape)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """What each rank records its steps with."""
    return record_as_on_gpus(monkeypatch)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        (Layout(2), True),
        (Layout(4), False),
        (Layout(4, parts=2), True),
        (Layout(1, stages=2), True),
        (Layout(2, stages=2), False),
    ],
    ids=str,
)
def test_ranks_that_replay_get_the_tokens_of_one_that_does_not(
    model: Path, recordings: list[Recording], layout: Layout, overlap: bool
) -> None:
    asked = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0.8, max_tokens=12, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, max_tokens=12, seed=3),
    ]
    for params in asked:
        alone, _ = run_on_ranks(model, 1, PROMPTS, params, attention="reference", cuda_graphs="off")
        recordings.clear()
        shared, _ = run_on_ranks(model, layout, PROMPTS, params, overlap=overlap, **LIMITED)
        assert tokens_of_each(shared) == tokens_of_each(alone)
        replayed = [recording.num_replayed for recording in recordings]
        assert len(replayed) == layout.size * layout.stages and min(replayed) >= 8, (
            "every rank replays what rank 0 does"
        )
        assert len(set(replayed)) == 1


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, stages=2), Layout(2, stages=2)], ids=str)
@pytest.mark.parametrize("drafts", [False, True])
def test_ranks_replay_steps_of_a_recurrent_model(
    recordings: list[Recording], layout: Layout, drafts: bool, tmp_path: Path
) -> None:
    """Each rank has its layers' or its heads' part of a state in the slot that rank 0 names."""
    model = save_tiny("qwen3_next", tmp_path, num_hidden_layers=4 * layout.stages)
    params = SamplingParams(temperature=0, max_tokens=12)
    alone, _ = run_on_ranks(model, 1, PROMPTS, params, attention="reference", cuda_graphs="off")
    recordings.clear()
    drafting = Speculation(max_drafts=3, adaptive=False, min_match=1) if drafts else None
    with counted_replays(DraftSize) as of_drafts:
        shared, _ = run_on_ranks(model, layout, PROMPTS, params, speculation=drafting, **LIMITED)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    replayed = [recording.num_replayed for recording in recordings]
    assert min(replayed) >= 8 and len(set(replayed)) == 1
    assert any(of_drafts) == (drafts or layout.stages > 1)


def test_ranks_replay_steps_with_drafts_and_with_prompts(model: Path, recordings: list[Recording]) -> None:
    """All ranks pad alike, as they add up what the others computed."""
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 11] * 5]
    settings: dict[str, Any] = {"speculation": Speculation(max_drafts=3, adaptive=False), "max_step_tokens": 40}
    alone, _ = run_on_ranks(model, 1, prompts, params, attention="reference", cuda_graphs="off")
    recordings.clear()
    shared, _ = run_on_ranks(model, 2, prompts, params, **settings, **LIMITED)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    replayed = {(recording.num_replayed, recording.num_cuts) for recording in recordings}
    assert len(replayed) == 1 and min(replayed.pop()) > 0


def test_ranks_replay_short_prompts_as_rows_of_a_token_each(
    model: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside decodes, and in the graphs of the same sizes on every rank."""
    monkeypatch.setattr(load_model, "choose_backend", lambda names, shape, *_: SpreadingAttention(shape))
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [random_ids(seed, length) for seed, length in enumerate((16, 15, 3, 30))]
    alone, _ = run_on_ranks(model, 1, prompts, params, attention="reference", cuda_graphs="off")
    recordings.clear()
    shared, _ = run_on_ranks(model, 2, prompts, params, max_step_tokens=20, max_running=4, **LIMITED)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    found = {(recording.num_recorded, recording.num_replayed, recording.num_cuts) for recording in recordings}
    [(_, num_replayed, num_cuts)] = found
    assert num_replayed > 0 == num_cuts


def test_preempted_requests_swap_their_pages_between_replays_on_every_rank(
    model: Path, recordings: list[Recording]
) -> None:
    prompts = [random_ids(20 + index, 25 + index) for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20)
    memory: dict[str, Any] = {
        "kv_pages": 14,
        "page_size": 8,
        "preemption": "swap",
        "host_kv_gib": 2**-9,
        "max_running": 6,
    }
    alone, _ = run_on_ranks(model, 1, prompts, params, attention="reference", cuda_graphs="off")
    recordings.clear()
    shared, engine = run_on_ranks(model, 2, prompts, params, **memory, **LIMITED)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    assert engine.loop.load().num_swapped > 0
    assert len({recording.num_replayed for recording in recordings}) == 1 < recordings[0].num_replayed


def test_a_replay_that_fails_on_the_first_rank_loses_the_group(
    model: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are read after the step was launched; other ranks have computed it, and cannot go back."""
    engine = Engine.from_config(ranks_config(model, 2, **LIMITED), launcher=Threads())
    try:
        engine.loop.submit(engine.new_request("r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=30)))
        while recordings[0].num_replayed < 3:
            engine.loop.step()
        monkeypatch.setattr(TokensUnderway, "wait", lambda _: 1 / 0)
        with pytest.raises(RankLost, match="rank 0 failed: ZeroDivisionError"):
            for _ in range(3):
                engine.loop.step()
    finally:
        monkeypatch.undo()
        engine.close()


def test_copies_of_experts_change_between_recorded_steps(tmp_path: Path, recordings: list[Recording]) -> None:
    """Recorded steps read which expert is where from tensors that are overwritten."""
    model = save_tiny("mixtral", tmp_path, num_attention_heads=8, num_local_experts=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    alone, _ = run_on_ranks(model, 1, PROMPTS, params, attention="reference", cuda_graphs="off")
    recordings.clear()
    settings = {"expert_parallel": True, "expert_copies": 1, "expert_copies_interval": 4, **LIMITED}
    shared, engine = run_on_ranks(model, 2, PROMPTS, params, **settings)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    assert min(recording.num_replayed for recording in recordings) >= 8
    placed = getattr(engine.runner, "first").expert_copies.placed  # noqa: B009
    assert any(expert != NOTHING for placement in placed for experts in placement for expert in experts)
