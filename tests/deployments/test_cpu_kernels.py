"""What `raydix info` says of attention and the native kernels on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.cli.cpu_kernels import attention_text, kernels_text
from engine.hub import demo_model_path
from engine.kernels import native
from engine.models.config import ModelConfig
from engine.models.experts_config import ExpertsConfig


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is remembered of what other tests loaded, nor by those that follow."""
    native.forget()
    yield
    native.forget()


def facts() -> ModelConfig:
    return ModelConfig.from_directory(demo_model_path())


def test_without_the_library_info_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    todo = r"none\.so is missing \(.*\): install a C compiler"
    assert re.match(f"none: {todo}", kernels_text(facts(), torch.float32))
    assert re.match(rf"reference \(not native: {todo}", attention_text(facts(), 16, torch.float32, "cpu"))


def test_with_the_library_info_says_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_ISA", "generic")
    try:
        native.kernels(torch.bfloat16)
    except native.Unavailable as error:
        pytest.skip(str(error))
    used = r"generic of generic.*; \d+ threads; huge pages: \w+"
    assert re.match(used, kernels_text(facts(), torch.bfloat16))
    sparse = replace(facts(), experts=ExpertsConfig(8, 2, 64, True, frozenset({0})))
    assert re.match(f"attention alone \\(.*experts\\); {used}", kernels_text(sparse, torch.bfloat16))
    assert attention_text(facts(), 16, torch.bfloat16, "cpu") == "native"
    assert "not on cuda" in attention_text(facts(), 16, torch.bfloat16, "cuda")
