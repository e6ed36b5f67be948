"""Engines whose requests attend together to a prefix that they share give the same tokens as those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.kernels import native
from engine.settings.config import Cascade, EngineConfig
from engine.settings.drafting import Speculation
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import save_tiny
from tests.engine.support.steps_by_hand import random_prompt
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
}
PREFIX = random_prompt(600, 0)
PROMPTS = [PREFIX + random_prompt(5 + 9 * index, index + 1) for index in range(5)]
LOGPROBS = SamplingParams(temperature=0, max_tokens=20, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that saves a tiny model of a family."""
    directory = tmp_path_factory.mktemp("models")
    return lambda family: save_tiny(family, directory / family, **SHAPE)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[native.NativeBatch]:
    """The batches whose rows were to attend together where they can."""
    seen: list[native.NativeBatch] = []
    group_rows = native.group_rows

    def noted(batch: native.NativeBatch, page_size: int, group: int) -> object:
        kept = group_rows(batch, page_size, group)
        seen.append(batch)
        return kept

    monkeypatch.setattr(native, "group_rows", noted)
    return seen


def generate(model: Path, cascade: Cascade, num_tokens: int = 4096, **settings: Any) -> list[list[StreamDelta]]:
    """Run a prompt that leaves its prefix in the cache, then all of them."""
    engine = engine_for(model, 16, num_tokens, cascade_attention=cascade, threads=2, **settings)
    run_prompts(engine, PROMPTS[:1], LOGPROBS)
    return run_prompts(engine, PROMPTS, LOGPROBS)


def tokens_and_logprobs(streams: list[list[StreamDelta]]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    return [
        (tokens_of(events), [entry for event in events for entry in event.logprobs or ()]) for events in streams
    ]


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("ministral3", "float32")]
)
def test_tokens_and_probabilities_are_the_same(
    model: Callable[[str], Path], grouped: list[native.NativeBatch], family: str, dtype: str
) -> None:
    """In the native decoder, and in torch's, of which the native kernels compute the attention alone."""
    alone = generate(model(family), "off", dtype=dtype)
    assert not grouped
    together = generate(model(family), "auto", dtype=dtype)
    assert tokens_and_logprobs(together) == tokens_and_logprobs(alone)
    assert sum(batch.num_groups for batch in grouped) > 15


def test_tokens_are_the_same_after_preemptions(
    model: Callable[[str], Path], grouped: list[native.NativeBatch]
) -> None:
    """All prompts fit beside each other, and not all of what they generate."""
    alone = generate(model("qwen3"), "off")
    pressed = generate(model("qwen3"), "auto", num_tokens=16 * 52)
    assert sum(events[-1].timings.num_preemptions for events in pressed if events[-1].timings) > 0
    assert list(map(tokens_of, pressed)) == list(map(tokens_of, alone))
    assert sum(batch.num_groups for batch in grouped) > 15


def test_tokens_are_the_same_with_drafts(model: Callable[[str], Path], grouped: list[native.NativeBatch]) -> None:
    """Speculation changes no token, and rows of several tokens are grouped."""
    alone = generate(model("qwen3"), "off")
    drafted = generate(model("qwen3"), "auto", speculation=Speculation("ngram", adaptive=False))
    assert list(map(tokens_of, drafted)) == list(map(tokens_of, alone))
    with_drafts = [batch for batch in grouped if batch.num_groups and batch.num_rows == len(PROMPTS)]
    assert max(batch.num_tokens for batch in with_drafts) > len(PROMPTS)


def test_another_word_for_the_setting_is_refused() -> None:
    with pytest.raises(ValueError, match='cascade_attention must be "auto" or "off", got \'on\''):
        EngineConfig(cascade_attention="on")  # type: ignore[arg-type]
