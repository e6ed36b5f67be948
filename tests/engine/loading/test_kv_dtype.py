"""KV in eight bits: half or a quarter of the memory, nearly the same logits, and never mixed with other KV."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.attention.base import AttentionShape, choose_backend
from engine.attention.kv_pages import FP8, MAX_FP8, KVPages, KVScales
from engine.loading.kv_scales import KVScaleCalibration
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path, fingerprint
from engine.models.decoder import Attention, Decoder, Layer
from engine.program.llm import LLM
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, random_prompt

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "qwen2_sliding", "llama_biased"])
def test_logits_are_nearly_those_of_unrounded_kv(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    logits = {}
    for kv_dtype in ("auto", "fp8"):
        runner = load_runner(model, kv_dtype=kv_dtype, attention="reference")
        plan = StepPlan((RequestByHand(random_prompt(60, 0), range(4)).chunk(),))
        logits[kv_dtype] = runner.logits(plan)
    error = (logits["fp8"] - logits["auto"]).abs().mean() / logits["auto"].std()
    assert 0 < error < 0.25


def test_pages_take_a_byte_a_number_and_are_read_by_reference(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path)
    whole, rounded = load_runner(model), load_runner(model, kv_dtype="fp8")
    assert whole.kv_bytes_per_token == 4 * rounded.kv_bytes_per_token
    assert (rounded.kv_dtype, rounded.attention_name) == (FP8, "reference")
    assert rounded.with_pages(3).kv_dtype == FP8


def test_the_native_kernels_refuse_pages_of_eight_bits() -> None:
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}), FP8)
    with pytest.raises(ValueError, match="only pages of the model's type"):
        choose_backend("native", shape, torch.float32, CPU)


def test_a_warm_prompt_gives_the_same_as_a_cold_one() -> None:
    """A prompt attends to its own KV as it is stored, so what a cache holds of it changes nothing."""
    llm = LLM(kv_dtype="fp8", kv_pages=256)
    question = "What does itertools.chain do? " * 8
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cold, warm = (llm.generate([question], sampling, progress=False)[0] for _ in range(2))
    assert warm.cached_tokens > 0 == cold.cached_tokens
    assert warm.token_ids == cold.token_ids


def scales_of(decoder: Decoder) -> KVScales:
    """Return the KV scales of the first layer."""
    attention = cast("Layer", decoder.layers[0]).attention
    assert isinstance(attention, Attention)
    return attention.kv_scales


@pytest.mark.parametrize("largest", [1e-3, 0.9, 60.0, 1e4])
def test_scales_leave_room_above_the_observed_numbers(largest: float, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, num_hidden_layers=1)
    config = ModelConfig.from_directory(tmp_path)
    decoder = Decoder(config)
    calibration = KVScaleCalibration(config.vocab_size, 16, 100)
    pages = KVPages(1, calibration.num_pages, 16, config.num_kv_heads, config.head_dim, torch.float32, CPU)
    pages.data[0, 0, 2, 3, 1, 7] = -largest
    calibration.set_scales(decoder, pages)
    keys, values = scales_of(decoder)
    assert values == 1, "nothing was seen of values"
    assert 4 * largest <= MAX_FP8 * keys < 8 * largest
    assert math.frexp(keys)[0] == 0.5, "a power of two"


def test_a_model_that_computes_nan_gets_no_scale_of_nan(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, num_hidden_layers=1)
    config = ModelConfig.from_directory(tmp_path)
    decoder, calibration = Decoder(config), KVScaleCalibration(config.vocab_size, 16, 16)
    pages = KVPages(1, 1, 16, config.num_kv_heads, config.head_dim, torch.float32, CPU)
    pages.data[:] = torch.nan
    calibration.set_scales(decoder, pages)
    assert scales_of(decoder) == (1, 1)


def test_streams_do_not_pass_between_rounded_and_other_kv() -> None:
    model = demo_model_path()
    names = {
        fingerprint(model, quantization, kv_dtype)
        for quantization in (None, "int8")
        for kv_dtype in ("auto", "fp8")
    }
    assert len(names) == 4
    assert fingerprint(model) == fingerprint(model, None, "auto")


def test_no_other_type_is_known() -> None:
    with pytest.raises(ValueError, match=r'kv_dtype must be "auto" or "fp8", got \'int4\''):
        EngineConfig(kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'^dtype must be "auto", "float32", .*, got \'int4\''):
        EngineConfig(dtype="int4")  # type: ignore[arg-type]
