"""Weights of eight bits: close to the model they were rounded from, refused where nothing computes with them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import native
from engine.loading.load_model import load_model
from engine.model_files.model_directory import demo_model_path, fingerprint
from engine.program.llm import LLM
from engine.settings.config import DType, EngineConfig
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import save_tiny

TEXT = (
    "Return True if all characters in the string are digits and there is at least one character, False otherwise."
)


def needs_kernels() -> None:
    try:
        native.kernels(torch.float32)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


def loss(llm: LLM) -> float:
    """Mean negative log-likelihood of a token of the text."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scores = [token for token in llm.generate(TEXT, params, progress=False)[0].prompt_logprobs if token]
    return -sum(token.logprob for token in scores) / len(scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model_is_hardly_less_certain(dtype: DType) -> None:
    needs_kernels()
    plain = loss(LLM(dtype=dtype, kv_pages=16))
    rounded = loss(LLM(dtype=dtype, kv_pages=16, quantization="int8"))
    assert rounded != plain
    assert math.isclose(rounded, plain, rel_tol=0.05), (rounded, plain)


def test_an_answer_is_the_same_in_a_batch() -> None:
    needs_kernels()
    llm = LLM(kv_pages=64, quantization="int8")
    prompts, params = [TEXT[:n] for n in (5, 30, 60, 90)], SamplingParams(max_tokens=8, temperature=0)
    together = llm.generate(prompts, params, progress=False)
    for prompt, output in zip(prompts, together, strict=True):
        assert llm.generate(prompt, params, progress=False)[0].token_ids == output.token_ids


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"attention": "reference"}])
def test_settings_that_cannot_compute_with_rounded_weights_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"quantization 'int8' .* its attention is reference"):
        load_model(EngineConfig(quantization="int8", device="cpu", kv_pages=16, **settings))


def test_a_model_that_is_not_for_the_native_kernels(tmp_path: Path) -> None:
    """Torch computes its layers, and has no weights of eight bits."""
    needs_kernels()
    model = str(save_tiny("ministral3", tmp_path))
    with pytest.raises(
        ValueError, match=r"quantization 'int8' .* the native decoder does not compute queries scaled by position"
    ):
        load_model(EngineConfig(model=model, quantization="int8", device="cpu", kv_pages=16))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> native.Kernels:
        raise native.NativeUnavailable("libraydix.so was not built")

    monkeypatch.setattr(native, "kernels", unavailable)
    with pytest.raises(ValueError, match="native kernels"):
        load_model(EngineConfig(quantization="int8", device="cpu", kv_pages=16))


def test_no_other_quantization_is_known() -> None:
    with pytest.raises(ValueError, match="int4"):
        EngineConfig(quantization="int4")  # type: ignore[arg-type]


def test_streams_do_not_pass_between_rounded_and_other_weights() -> None:
    model = demo_model_path()
    assert fingerprint(model) == fingerprint(model, None) != fingerprint(model, "int8")
