"""Tiny models with a layer that drafts for them, and engines whose drafts are recorded and checked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cache import Namespace
from engine import Speculation
from engine.ranks.launcher import WorkerLauncher
from engine.runner.layer_drafter import LayerDrafter
from engine.settings.config import EngineConfig
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.eagle3_models import reference, save_eagle3
from tests.engine.support.engine_run import Run
from tests.engine.support.mtp_models import reference_drafts, save_with_mtp
from tests.engine.support.oracle import save_tiny

EAGLE3 = "eagle3 "
"""How the names of models with a layer of EAGLE-3 begin; the rest is their family."""
FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(20, 26), 12.0)}
"""Six tokens above the others, so that some draft tokens are accepted."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 18, **FEW}


ALWAYS: dict[str, Any] = {"max_drafts": 3, "adaptive": False}


def config_of(directory: Path, **settings: Any) -> EngineConfig:
    """The settings of an engine that always drafts with MTP, unless `settings` say otherwise."""
    given = {"device": "cpu", "kv_pages": 60, "speculation": Speculation("mtp", **ALWAYS), **settings}
    return EngineConfig(model=str(directory), **given)


def request(tokens: Sequence[int], name: str = "r") -> Request:
    """A greedy request that no scheduler has seen."""
    sampling = SamplingParams(temperature=0, max_tokens=100)
    made = Request.make(name, list(tokens), sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
    made.longest = 200
    return made


class Predict(Protocol):
    """A layer in plain torch."""

    def __call__(
        self, tokens: Sequence[int], count: int, start: int = 1, bias: Mapping[int, float] | None = None
    ) -> list[int]:
        """The likeliest tokens after `tokens` (`reference_drafts`)."""


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A tiny model, its layer in plain torch, and the method that drafts with it."""

    directory: Path
    predict: Predict
    method: dict[str, Any]

    def config(self, speculation: Mapping[str, Any] | None = None, **settings: Any) -> EngineConfig:
        """The settings of an engine that always drafts, unless `speculation` says otherwise."""
        chosen = Speculation(**{**self.method, **ALWAYS, **(speculation or {})})
        return config_of(self.directory, **{"speculation": chosen, **settings})


def save_drafted(name: str, directory: Path, **overrides: Any) -> Drafted:
    """Save a random model of a family with an MTP layer, or of any (`EAGLE3`) with a layer of EAGLE-3."""
    if not name.startswith(EAGLE3):
        model = save_with_mtp(name, directory / "model", **overrides)
        return Drafted(model, partial(reference_drafts, name, model), {"method": "mtp"})
    model = save_tiny(name.removeprefix(EAGLE3), directory / "model", **overrides)
    layer = save_eagle3(directory / "layer", model)
    return Drafted(model, reference(layer, model).drafts, {"method": "eagle3", "model": str(layer)})


class Watched:
    """An engine whose drafts are recorded: each with the request's tokens and the beginning of its context."""

    def __init__(self, config: EngineConfig, every: int = 1, launcher: WorkerLauncher | None = None) -> None:
        """Only one in `every` steps may have draft tokens."""
        self.run = Run(config, launcher)
        drafter = self.run.engine.scheduler.speculator.drafter
        assert isinstance(drafter, LayerDrafter)
        self.drafter = drafter
        self.drafts: list[tuple[list[int], int, list[int]]] = []
        propose, calls = drafter.propose, itertools.count()

        def recorded(requests: Sequence[Any], max_tokens: Sequence[int]) -> list[Sequence[int]]:
            if next(calls) % every:
                return [()] * len(requests)
            found = propose(requests, max_tokens)
            for one, draft in zip(requests, found, strict=True):
                follower = drafter._followers.get(one.request_id)
                self.drafts.append((list(one.tokens), 0 if follower is None else follower.first, list(draft)))
            return found

        drafter.propose = recorded  # type: ignore[method-assign]

    def check(self, model: Drafted, every: int = 1) -> None:
        """All drafts, or one in `every`, are the layer's predictions."""
        for tokens, start, draft in self.drafts[::every]:
            expected = model.predict(tokens, len(draft), max(start, 1), FEW["logit_bias"])
            assert draft == expected, (start, tokens)

    @property
    def starts(self) -> list[int]:
        """Where the contexts of the drafts began; 0 for none."""
        return [start if draft else 0 for _, start, draft in self.drafts]


def run_both(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    every: int = 1,
    launcher: WorkerLauncher | None = None,
    *,
    on_one_rank: bool = True,
) -> Watched:
    """Run the prompts, which arrive in turn, with drafts and without: the tokens are the same. `launcher` starts
    the ranks, which the engine without drafts has too unless it is `on_one_rank`.
    """
    plain = dataclasses.replace(config, speculation=None)
    if on_one_rank:
        sizes: dict[str, Any] = {"tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel": False}
        plain = dataclasses.replace(plain, page_size=config.page_tokens, **sizes)
    watched, undrafted = Watched(config, every, launcher), Run(plain, launcher)
    for run in (watched.run, undrafted):
        for number, prompt in enumerate(prompts):
            run.submit(str(number), prompt, SamplingParams(**GREEDY))
            run.step()
        run.finish()
        run.engine.close()
    assert {name: watched.run.tokens(name) for name in undrafted.events} == {
        name: undrafted.tokens(name) for name in undrafted.events
    }
    return watched
