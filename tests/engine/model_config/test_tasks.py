"""What a model is served for: told by its files or named by a setting, and held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import ModelLoadError
from engine.model_config.tasks import Task, check_task, tasks_of
from engine.program.engine import Engine
from engine.program.llm import LLM
from engine.settings.config import EngineConfig
from engine.values.embedding import values_of
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from tests.engine.support.embedding_models import LAST_TOKEN, describe, save_headless
from tests.engine.support.oracle import oracle_model, random_ids, save_tiny

EMBEDDED, JUDGED = SamplingParams(pooling=Pooling()), SamplingParams(pooling=Pooling((1, 2)))


def engine_for(model: Path, **settings: Any) -> Engine:
    return Engine.from_config(EngineConfig(model=str(model), device="cpu", page_size=8, kv_pages=32, **settings))


@torch.inference_mode()
def last_state(whole: Path, prompt: list[int]) -> list[float]:
    states = oracle_model(whole).model(torch.tensor([prompt])).last_hidden_state
    return list(states[0, -1].tolist())


@pytest.mark.parametrize("attention", ["native", "reference"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_decoder_saved_by_itself_embeds(tmp_path: Path, is_tied: bool, attention: str) -> None:
    """As Qwen3-Embedding is: without the prefix of its tensors' names and, where it is untied, without a head."""
    model = describe(save_headless(tmp_path, tie_word_embeddings=is_tied), None, "Normalize")
    engine = engine_for(model, attention=attention)
    assert engine.tasks == {"embed"}
    prompt = random_ids(1, 30)
    engine.loop.submit(engine.new_request("0", prompt, EMBEDDED))
    events = [event for _ in range(3) if engine.loop.has_work for event in engine.loop.step()]
    assert events[-1].pooled is not None
    found = values_of(events[-1].pooled).tolist()
    assert found == pytest.approx(last_state(tmp_path / "whole", prompt), rel=1e-3, abs=1e-4)


def test_without_a_head_nothing_is_generated(tmp_path: Path) -> None:
    model = save_headless(tmp_path)
    message = r"the weights lack lm_head.weight, which Qwen3ForCausalLM needs to generate; .*tasks: \[embed\]"
    for tasks in (["generate"], ["embed", "rerank"]):
        with pytest.raises(ModelLoadError, match=message):
            engine_for(model, tasks=tasks)


def test_the_task_is_read_from_the_files(tmp_path: Path) -> None:
    plain = save_tiny("qwen3", tmp_path / "plain")
    assert tasks_of("auto", plain) == ("generate",)
    assert tasks_of(["embed", "generate"], plain) == ("embed", "generate")
    assert tasks_of("auto", describe(plain)) == ("embed",)
    assert tasks_of("auto", describe(plain, {"pooling_mode": "lasttoken", "include_prompt": True})) == ("embed",)
    assert tasks_of("auto", save_headless(tmp_path)) == ("embed",)
    assert tasks_of("auto", tmp_path / "nowhere") == ("generate",)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        (
            {"pooling_mode_mean_tokens": True},
            (),
            r"pooling of embeddings is \['mean_tokens'\], and only lasttoken",
        ),
        ({"pooling_mode": "cls"}, (), "pooling of embeddings is cls, and only lasttoken"),
        ({}, (), "pooling of embeddings is not in its files"),
        (
            {**LAST_TOKEN, "pooling_mode_cls_token": True},
            (),
            r"pooling of embeddings is \['lasttoken', 'cls_token'\]",
        ),
        (LAST_TOKEN, ("Dense",), "modules.json has Dense, and only Transformer, Pooling, Normalize are known"),
    ],
)
def test_an_unsupported_pooling_is_refused(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], message: str
) -> None:
    model = describe(save_tiny("qwen3", tmp_path), pooling, *more)
    with pytest.raises(ModelLoadError, match=f"{message}.*engine.tasks"):
        tasks_of("auto", model)
    assert tasks_of(["embed"], model) == ("embed",)


def test_files_that_hold_something_else_are_ignored(tmp_path: Path) -> None:
    for name, text in (("modules.json", '[1, {"type": 5}]'), ("config.json", "[]")):
        (tmp_path / name).write_text(text)
        assert tasks_of("auto", tmp_path) == ("generate",)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": []}))
    assert tasks_of("auto", tmp_path) == ("generate",)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"modules\.json is not readable JSON"):
        tasks_of("auto", tmp_path)


def test_requests_for_other_tasks_are_refused() -> None:
    tasks: list[Task] = ["generate", "embed", "rerank"]
    for wanted, params in zip(tasks, (SamplingParams(), EMBEDDED, JUDGED), strict=True):
        check_task(params, [wanted])
        others = [task for task in tasks if task != wanted]
        with pytest.raises(ValueError, match=f"served to {', '.join(others)}, not to {wanted}: add {wanted} to"):
            check_task(params, others)
    llm = LLM("demo", kv_pages=32)
    with pytest.raises(ValueError, match=r"not to embed: add embed to engine\.tasks"):
        llm.embed("hi")
    with pytest.raises(ValueError, match='tasks must be "auto" or some of generate, embed, rerank'):
        EngineConfig(tasks=[])
