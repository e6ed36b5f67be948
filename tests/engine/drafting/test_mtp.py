"""Drafts of a model's own layer for multi-token prediction, compared with the layer in plain torch."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import Namespace
from engine import Speculation
from engine.base.errors import ModelLoadError
from engine.loading.check_model import check_model
from engine.program.engine import Engine
from engine.program.load_with_mtp import load_with_mtp
from engine.runner.hidden_states import HiddenStates
from engine.runner.mtp_drafter import MTPDrafter
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.drafting.test_speculation_models import Run
from tests.engine.support.mtp_models import NAMES, reference_drafts, save_with_mtp
from tests.engine.support.oracle import Tiny, save_tiny

ALWAYS = Speculation("mtp", max_drafts=3, adaptive=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a family's tiny model with an MTP layer."""
    return cache(lambda family: save_with_mtp(family, tmp_path_factory.mktemp(family) / "model"))


def config_for(directory: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(directory), "device": "cpu", "kv_pages": 60, "speculation": ALWAYS, **settings})


def request(tokens: Sequence[int], name: str = "r") -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=100)
    made = Request.make(name, list(tokens), sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
    made.longest = 200
    return made


@pytest.mark.parametrize("family", NAMES)
def test_drafts_are_the_layer_s_predictions(model: Tiny, family: str) -> None:
    runner, drafter = load_with_mtp(config_for(model(family)))
    one = request(range(30, 57))
    result = runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),)))
    one.tokens += result.token_ids
    assert drafter.propose([one], [4]) == [reference_drafts(family, model(family), one.tokens, 4)]


class Watched:
    """An engine whose drafts are recorded: the request's tokens, where the layer's context began, and the draft."""

    def __init__(self, config: EngineConfig) -> None:
        self.run = Run(config)
        self.drafter = drafter = self.run.engine.scheduler.speculator.drafter
        assert isinstance(drafter, MTPDrafter)
        self.drafts: list[tuple[list[int], int, list[int]]] = []
        propose = drafter.propose

        def recorded(requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
            found = propose(requests, most)
            for one, draft in zip(requests, found, strict=True):
                follower = drafter._followers.get(one.request_id)
                self.drafts.append((list(one.tokens), 0 if follower is None else follower.first, list(draft)))
            return found

        drafter.propose = recorded  # type: ignore[method-assign]

    def check(self, family: str, directory: Path) -> None:
        """All drafts are the layer's predictions."""
        for tokens, start, draft in self.drafts:
            expected = reference_drafts(family, directory, tokens, len(draft), max(start, 1), FEW["logit_bias"])
            assert draft == expected, (start, tokens)

    @property
    def starts(self) -> list[int]:
        """Where the contexts of the drafts began; 0 for none."""
        return [start if draft else 0 for _, start, draft in self.drafts]


FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(20, 26), 12.0)}
"""Six tokens above the others, so that some draft tokens are accepted."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 18, **FEW}


def run_both(config: EngineConfig, prompts: Sequence[Sequence[int]]) -> Watched:
    """Run the prompts, which arrive one step after the other, with drafts and without: the tokens are the same."""
    watched, plain = Watched(config), Run(dataclasses.replace(config, speculation=None))
    for run in (watched.run, plain):
        for number, prompt in enumerate(prompts):
            run.submit(str(number), prompt, SamplingParams(**GREEDY))
            run.step()
        run.finish()
    assert {name: watched.run.tokens(name) for name in plain.events} == {
        name: plain.tokens(name) for name in plain.events
    }
    return watched


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_drafts_are_the_layer_s_predictions_whatever_came_before(model: Tiny, family: str, page_size: int) -> None:
    """Draft tokens were accepted or not, prompts came in chunks, began alike and were computed again."""
    prompts = [list(range(20, 26)) * 4, list(range(30, 71)), list(range(30, 60)), [20, 21, 22], list(range(30, 71))]
    settings = {"page_size": page_size, "kv_pages": 96 // page_size, "max_running": 4, "max_step_tokens": 24}
    watched = run_both(config_for(model(family), **settings), prompts)
    assert watched.run.engine.scheduler.load(0.0).num_preemptions > 0
    assert 0 < watched.run.num_accepted < watched.run.num_drafts
    assert watched.starts.count(1) > 0.5 * len(watched.starts)
    watched.check(family, model(family))
