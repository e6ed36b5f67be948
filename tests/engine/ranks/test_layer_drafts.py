"""Layers that draft from hidden states for a model on several ranks. The first rank has the layer, whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine.program.load_with_layer import load_with_layer
from engine.ranks.runner import ParallelRunner
from engine.settings.config import EngineConfig
from tests.engine.support.engines_on_ranks import Layout
from tests.engine.support.rank_processes import Threads
from tests.engine.support.recorded_graphs import record_as_on_gpus
from tests.engine.support.watched_drafts import Drafted, Watched, run_both, save_drafted

Models = Callable[[str], Drafted]
PROMPTS = [list(range(20, 26)) * 4, list(range(30, 71)), list(range(30, 60)), [20, 21, 22], list(range(30, 71))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny model with a layer, by its name, which several ranks can share."""

    @cache
    def saved(name: str) -> Drafted:
        shape: dict[str, int] = {"num_attention_heads": 8, "num_key_value_heads": 2}
        if name in ("deepseek_v3", "qwen3_next"):
            shape = {}
        return save_drafted(name, tmp_path_factory.mktemp("drafted"), **shape)

    return saved


def on(layout: Layout, model: Drafted, **settings: Any) -> EngineConfig:
    """The settings of an engine on such ranks, in which prompts come in chunks, as many on slow machines."""
    defaults: dict[str, Any] = {"page_size": 16 // layout.parts, "max_running": 4, "max_step_tokens": 24}
    defaults |= {"max_step_ms": None, "max_step_stretch": None}
    sizes = {"tensor_parallel_size": layout.size, "context_parallel_size": layout.parts}
    return model.config(threads=1, overlap=False, **{**defaults, **sizes, **settings})


def run_on(config: EngineConfig, every: int = 1) -> Watched:
    """Run the prompts on ranks that are threads, with drafts, and on one rank without: the tokens are the same."""
    return run_both(config, PROMPTS, every, Threads())


ONE, TWO, PARTS = Layout(1), Layout(2), Layout(4, parts=2)
EXPERTS = {"expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("glm4_moe", TWO, {}),
        ("glm4_moe", Layout(4), EXPERTS),
        ("glm4_moe", PARTS, {}),
        ("deepseek_v3", TWO, EXPERTS),
        ("qwen3_next", TWO, {}),
        ("eagle3 llama3.1", Layout(4), {}),
        ("eagle3 qwen3", PARTS, {}),
        ("eagle3 gemma3", TWO, {}),
        ("eagle3 olmo2", TWO, {}),
    ],
)
def test_drafts_are_the_layer_s_predictions_and_as_many_as_on_one_rank(
    model: Models, name: str, layout: Layout, settings: dict[str, Any]
) -> None:
    """Draft tokens were accepted or not, and prompts began alike."""
    shared, alone = run_on(on(layout, model(name), **settings)), run_on(on(ONE, model(name)))
    assert shared.run.num_accepted == alone.run.num_accepted > 0
    assert shared.run.num_drafts == alone.run.num_drafts > shared.run.num_accepted
    assert shared.drafts == alone.drafts
    shared.check(model(name), every=3)


@pytest.mark.parametrize("name", ["glm4_moe", "eagle3 granite"])
def test_drafts_are_the_layer_s_predictions_for_requests_that_were_preempted(model: Models, name: str) -> None:
    watched = run_on(on(TWO, model(name), kv_pages=6))
    assert watched.run.engine.scheduler.load(0.0).num_preemptions > 0
    assert watched.run.num_drafts > 50
    watched.check(model(name), every=3)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "eagle3 qwen3"])
def test_drafts_are_the_layer_s_predictions_where_steps_are_replayed(
    model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of both ranks replay decodes, those of the first keep hidden states, and others continue drafts."""
    recordings = record_as_on_gpus(monkeypatch)
    watched = run_on(on(TWO, model(name), cuda_graphs="lazy", attention="reference", max_model_len=128), every=4)
    assert len([recording for recording in recordings if recording.num_replayed > 3]) >= 3
    assert watched.run.num_drafts > 20
    watched.check(model(name))


@pytest.mark.parametrize(("name", "head_dim"), [("glm4_moe", 32), ("eagle3 qwen3", 64)])
def test_pages_leave_room_for_the_layer_on_the_first_rank(
    model: Models, name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's pages hold its heads of the model and all of the layer's; the others have as many pages."""
    monkeypatch.setattr("engine.loading.load_model.available_ram", lambda: 5 * 2**20)
    settings: dict[str, Any] = {"kv_pages": None, "kv_memory_share": 0.5, "max_running": 4}
    runner, drafter = load_with_layer(on(PARTS, model(name), **settings), Threads())
    assert isinstance(runner, ParallelRunner)
    runner.close()
    ours = (
        3 * 2 * head_dim * 4
    )  # float32, keys and values of one head in three layers, for one of two tokens of a page
    layers = 2 * 2 * 2 * 32 * 4  # two heads in one layer, for both
    states = 4 * 512 * 96 * 4  # of 512 tokens of each request
    expected = int((5 * 2**18 - states) * 0.5) // (8 * (ours + layers))
    assert runner.num_pages == drafter.cache.num_pages == expected > 8
    assert runner.page_size == drafter.cache.page_size == 16
