"""Models in GGUF against the same ones as transformers computes them: every family, every type of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config import ModelConfig
from engine.scheduling.plan import StepPlan
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.oracle import MORE_FAMILIES, VOCAB, oracle_logits, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner

PROMPT = random_ids(6, 90)
GEMMA: Mapping[str, Any] = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}
"""GGUF does not say it: it is the size of a head in all published models but the largest."""
ORIGINAL = {"original_max_position_embeddings": 64}
LONG: Mapping[str, Any] = {
    **ORIGINAL,
    "max_position_embeddings": 256,
    "rope_parameters": {**MORE_FAMILIES["phi3_long"][1]["rope_parameters"], **ORIGINAL},
}
"""A context that is four times as long as the original one, and a prompt that is longer than that."""
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama2": ("llama2", {}),
    "llama3.1": ("llama3.1", {}),
    "llama_linear": ("llama_linear", {}),
    "llama_biased": ("llama_biased", {}),
    "llama_tied": ("llama_tied", {}),
    "mistral": ("mistral_full", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2_yarn", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3_tied", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", {**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "phi3": ("phi3", {}),
    "phi3_short": ("phi3_long", {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}),
    "phi3_long": ("phi3_long", LONG),
    "granite": ("granite", {}),
}
"""Models by the oracle's family and what differs from it."""


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as safetensors and in GGUF."""
    family, differences = MODELS[request.param]
    directory = save_tiny(family, tmp_path_factory.mktemp("model"), **differences)
    return directory, write_gguf(directory, tmp_path_factory.mktemp("gguf") / "model.gguf")


def logits(path: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    """The logits after a prompt."""
    runner = load_runner(path, max_model_len=256, **options)
    return runner.logits(StepPlan((RequestByHand(prompt, range(20)).chunk(),)))[0]


def test_logits_are_those_of_the_model_that_was_converted(both: tuple[Path, Path]) -> None:
    directory, path = both
    expected = oracle_logits(directory, PROMPT, torch.float64)[-1]
    assert (logits(path, PROMPT) - expected).abs().max() < 1e-4


def test_the_configuration_is_that_of_the_model_that_was_converted(both: tuple[Path, Path]) -> None:
    """But for the rotation's form, the order of numbers, and the ends of text, which stand elsewhere in GGUF."""
    directory, path = both
    ours, theirs = ModelConfig.from_directory(path), ModelConfig.from_directory(directory)
    same = ("vocab_size", "hidden_size", "max_position_embeddings", "attention", "mlp", "tied_embeddings", "names",
            "windows", "num_parameters")  # fmt: skip
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.eos_token_ids == {VOCAB - 1}
    assert not ours.unused_keys.uncertain
    ours.unused_keys.check(ours.architecture, ())
