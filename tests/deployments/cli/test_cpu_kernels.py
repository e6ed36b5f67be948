"""The report of `raydix info` on attention and the native kernels of this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.cli.cpu_kernels import attention_text, kernels_text
from engine.attention.base import AttentionShape
from engine.attention.triton import TritonAttention
from engine.kernels import native
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.parts import LaterScale
from engine.models.delta_net import GatedDeltaNet
from engine.models.native_decoder import NativeDecoder
from engine.models.native_delta_net import NativeDeltaHeads
from tests.engine.support.attention_packages import flash_module
from tests.engine.support.oracle import MORE_FAMILIES, save_tiny
from tests.engine.support.published_models import PUBLISHED, PUBLISHED_QUANTIZED
from tests.engine.support.steps_by_hand import load_runner


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the libraries that other tests loaded, before the test and after it."""
    native.forget()
    yield
    native.forget()


SHAPE = AttentionShape(4, 2, 64, 16, frozenset({None}))


def facts() -> ModelConfig:
    return ModelConfig.from_directory(demo_model_path())


def test_without_the_library_info_shows_the_reason_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDIX_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    todo = r"none\.so is missing \(.*\): install a C compiler"
    assert re.match(f"none: {todo}", kernels_text(facts(), torch.float32))
    assert re.match(f"none: {todo}", kernels_text(None, torch.float32))
    assert re.match(rf"reference\nnot native: {todo}", attention_text(SHAPE, torch.float32, "cpu"))


def test_with_the_library_info_shows_the_instructions_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_ISA", "generic")
    try:
        native.kernels(torch.bfloat16)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    used = r"generic of generic.*; \d+ threads; huge pages: \w+"
    for model in (facts(), None):
        assert re.match(used, kernels_text(model, torch.bfloat16))
    for inner, said in ((64, ""), (40, r"attention only \(inner size of experts 40: .* 32\); ")):
        sparse = replace(facts(), experts=ExpertsConfig(8, 2, inner, True, frozenset({0}), range(8)))
        assert re.match(said + used, kernels_text(sparse, torch.bfloat16))
    latent = ModelConfig.from_json(PUBLISHED["deepseek-ai/DeepSeek-V3-0324"], {}, "deepseek")
    assert re.match(f"attention only \\(.*MLA\\)\\); {used}", kernels_text(latent, torch.bfloat16))
    recurrent = ModelConfig.from_json(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"], {}, "qwen3_next")
    said, why = (
        "attention and recurrent layers only",
        "gated delta nets, gates of attention, gates of shared experts",
    )
    assert re.match(rf"{said} \(.* {why}\); {used}", kernels_text(recurrent, torch.bfloat16))
    odd = replace(facts(), attention=replace(facts().attention, head_dim=40))
    assert re.match(f"nothing of this model \\(head_dim 40.*\\); {used}", kernels_text(odd, torch.bfloat16))
    shape = AttentionShape.of(latent.attention, latent.windows, 16)
    assert attention_text(shape, torch.bfloat16, "cpu").startswith("native\n")
    scaled = replace(facts(), attention=replace(facts().attention, later_scale=LaterScale(0.1, 4096)))
    assert re.match(f"attention only \\(.*queries.*\\); {used}", kernels_text(scaled, torch.bfloat16))
    taken, *others = attention_text(SHAPE, torch.bfloat16, "cpu").splitlines()
    assert taken == "native" and "reference: when asked for by name" in others
    assert "not flash_attn: it runs on CUDA GPUs, not on cpu" in others


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_info_lists_the_layers_that_an_engine_would_compute_by_torch(family: str, tmp_path: Path) -> None:
    """Of every family, what is loaded here, layer by layer, is what the line for it says."""
    runner = load_runner(save_tiny(family, tmp_path))
    said = kernels_text(runner.model_config, torch.float32)
    if said.startswith("none: "):
        pytest.skip(said)
    decoder = runner.decoder
    if isinstance(decoder, NativeDecoder):
        assert said.startswith(native.kernels(torch.float32).isa)
        return
    recurrent = [layer.attention for layer in decoder.layers if isinstance(layer.attention, GatedDeltaNet)]
    by_kernels = {"native": "attention", "native and reference": "attention of some layers"}
    parts = {
        by_kernels.get(runner.attention_name, ""): "native" in runner.attention_name,
        "recurrent layers": any(isinstance(layer.heads, NativeDeltaHeads) for layer in recurrent),
    }
    computed = " and ".join(part for part, holds in parts.items() if holds)
    assert said.startswith(f"{computed} only (" if computed else "nothing of this model (")


@pytest.mark.parametrize("model", PUBLISHED_QUANTIZED)
def test_info_says_that_torch_multiplies_with_quantized_weights(model: str) -> None:
    model_facts = ModelConfig.from_json(PUBLISHED_QUANTIZED[model], {}, model)
    said = kernels_text(model_facts, torch.bfloat16)
    if said.startswith("none: "):
        pytest.skip(said)
    assert model_facts.weight_format is not None
    assert f"weights that stay in {model_facts.weight_format.name})" in said


def test_info_about_a_gpu_shows_what_would_run_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report needs no GPU: none is queried, and only the installed packages decide."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("flash_attn_interface", "vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    said = attention_text(SHAPE, torch.bfloat16, "cuda")
    assert "not native: it runs on CPUs, not on cuda" in said and "reference" in said
    assert re.search(r"not flash_attn: none of flash_attn_interface, .* 'raydix\[flash-attn\]'", said)
    assert "not flashinfer: flashinfer is not installed: pip install 'raydix[flashinfer]'" in said
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_module("flash_attn_interface"))
    assert "not flash_attn" not in attention_text(SHAPE, torch.bfloat16, "cuda")


def test_info_about_this_machines_gpu_gives_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU takes cuDNN for prompts, and our own kernels for a model with soft caps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(TritonAttention, "unavailable", lambda shape, dtype, device: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_module("flash_attn_interface"))
    said = attention_text(SHAPE, torch.bfloat16, "cuda")
    assert said.startswith("cudnn,triton (cuDNN has kernels for Hopper GPUs, for many tokens of a prompt; Triton")
    assert "flash_attn: when asked for by name, as it has not run on a GPU yet" in said
    said = attention_text(replace(SHAPE, soft_cap=50.0), torch.bfloat16, "cuda")
    assert said.startswith("triton (no backend that runs was measured to be faster at compute capability 9.0)\n")
    assert "not flash_attn: it is not used for scores with a soft cap" in said
