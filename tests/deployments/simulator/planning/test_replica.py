"""What fits on a GPU: computed by hand for two models, and as the engine itself counts and allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from deployments.simulator.planning.known import gpu_named, gpus, known_models, planned_model
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from deployments.simulator.planning.report import with_and_without
from engine.attention.kv_pages import KVPages
from engine.loading.kv_memory import pages_for
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.settings.config import EngineConfig
from engine.settings.kv_tier import KVTier
from tests.engine.support.published_models import PUBLISHED

H100 = gpu_named("H100")
LLAMA = planned_model("Llama-3.1-8B").facts
QWEN = planned_model("Qwen/Qwen3-32B").facts
ENGINE = EngineConfig(kv_memory_share=0.9)


@pytest.mark.parametrize("name", known_models())
def test_the_known_shapes_have_the_published_number_of_weights(name: str) -> None:
    assert planned_model(name).facts.num_parameters == known_models()[name]["parameters"]
    assert name in known_models()[name]["source"]


def test_llama_8b_on_an_h100_by_hand() -> None:
    plan = smallest_replica(LLAMA, H100, ENGINE)
    assert LLAMA.num_parameters == 8_030_261_248
    assert plan.weight_bytes == 16_060_522_496
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    assert plan.tp == 1
    # 79.1 GiB - 14.957 GiB of weights - 2 GiB = 62.143 GiB; 0.9 of it in pages of 2 MiB
    assert plan.num_pages == int(0.9 * (int(79.1 * 2**30) - 16_060_522_496 - 2 * 2**30)) // 2**21 == 28_635
    assert plan.num_tokens == 458_160
    assert plan.concurrent_requests(8192) == 28_635 // 512 == 55
    assert plan.concurrent_requests(100) == 256, "no more than max_running"
    # One request: 16.06 GB of weights and 128 MiB of KV at 0.7 of 3.35 TB/s.
    assert plan.decode_step_s(1, 1024) == pytest.approx((16.0605e9 + 0.1342e9) / 2.345e12, rel=1e-3)
    # 989 TFLOPS * 0.55 over 2 * 8.03e9 + 2 * 32 * 4096 * 1024 operations
    assert plan.prefill_tokens_per_s(1024) == pytest.approx(543.95e12 / (16.0605e9 + 0.2684e9), rel=1e-3)


def test_qwen_32b_needs_two_h100_or_one_h200() -> None:
    plan = smallest_replica(QWEN, H100, ENGINE)
    assert QWEN.num_parameters == 32_762_123_264
    assert plan.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2 == 262_144
    assert (plan.tp, smallest_replica(QWEN, gpu_named("h200"), ENGINE).tp) == (2, 1)
    page = 16 * 262_144 // 2  # each GPU holds half of the heads
    assert plan.num_pages == int(0.9 * (H100.memory_bytes - 32_762_123_264 - 2 * 2**30)) // page
    roomy = Assumptions(max_weight_share=0.8)
    assert smallest_replica(QWEN, H100, ENGINE, roomy).tp == 1


def test_a_mixture_is_held_whole_and_read_in_part() -> None:
    """Mixtral 8x7B: 46.7B parameters, of which a token goes through 12.9B, as its makers state."""
    mixtral = planned_model("Mixtral-8x7B-Instruct-v0.1").facts
    assert (f"{mixtral.num_parameters / 1e9:.1f}", f"{mixtral.active_parameters / 1e9:.1f}") == ("46.7", "12.9")
    qwen = planned_model("Qwen3-30B-A3B").facts
    unused = 48 * 120 * 3 * 2048 * 768  # in each layer 120 experts, of three matrices
    assert qwen.active_parameters == qwen.num_parameters - unused == 3_353_032_704, "stated as 3.3B"
    plan = smallest_replica(mixtral, gpu_named("h200"), ENGINE)
    assert plan.weight_bytes == 2 * 46_702_792_704, "all experts are in memory"
    active = 2 * mixtral.active_parameters
    assert plan.decode_step_s(1, 1) == pytest.approx(active / plan.bytes_per_s, rel=1e-3)
    assert plan.bytes_read(64) == pytest.approx(plan.weight_bytes, rel=1e-3), "64 tokens leave no expert out"
    assert plan.decode_flops == active
    assert plan.prefill_tokens_per_s(1) == pytest.approx(plan.flops / active, rel=1e-3)


def test_pages_are_those_the_engine_counts() -> None:
    plan = ReplicaPlan(LLAMA, H100, 1, ENGINE)
    assert plan.num_pages == pages_for(ENGINE, plan.free_bytes, LLAMA.kv_bytes_per_token(2), 131_072)
    stated = replace(ENGINE, kv_pages=77)
    assert ReplicaPlan(LLAMA, H100, 1, stated).num_pages == 77
    short = replace(ENGINE, max_model_len=64, max_running=8)
    assert ReplicaPlan(LLAMA, H100, 1, short).num_pages == 8 * 4, "more than the largest batch can use is no use"


def test_kv_in_eight_bits_is_half_of_it() -> None:
    rounded = ReplicaPlan(LLAMA, H100, 1, replace(ENGINE, kv_dtype="fp8"))
    assert rounded.kv_bytes_per_token == LLAMA.kv_bytes_per_token(1)
    assert rounded.weight_bytes == ReplicaPlan(LLAMA, H100, 1, ENGINE).weight_bytes
    assert rounded.num_pages == 2 * ReplicaPlan(LLAMA, H100, 1, ENGINE).num_pages


def test_the_embedded_model_takes_the_planned_memory() -> None:
    directory = demo_model_path()
    facts = ModelConfig.from_directory(directory)
    with safe_open(directory / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in list(file.keys()))
    plan = ReplicaPlan(facts, H100, 1, EngineConfig(kv_pages=10, dtype="float32"))
    assert plan.weight_bytes == stored * 4
    shape = (facts.num_layers, 10, 16, facts.num_kv_heads, facts.head_dim)
    pages = KVPages(*shape, torch.float32, torch.device("cpu"))
    assert pages.data.nbytes == plan.kv_bytes_per_token * 16 * (10 + 1)  # and the null page


def test_a_model_is_shared_evenly_or_not_at_all() -> None:
    with pytest.raises(ValueError, match=r"is 3, .* 8 key-value heads .* it can be 1, 2, 4, 8, 16"):
        ReplicaPlan(LLAMA, H100, 3, ENGINE)
    whole, half = ReplicaPlan(LLAMA, H100, 1, ENGINE), ReplicaPlan(LLAMA, H100, 2, ENGINE)
    assert half.decode_step_s(64, 2048) == pytest.approx(whole.decode_step_s(64, 2048) / 2)
    assert half.num_tokens > 2 * whole.num_tokens


def test_a_model_that_no_machine_holds_is_refused_with_the_reason() -> None:
    large = planned_model("Llama-3.1-70B-Instruct").facts
    with pytest.raises(ValueError, match=r"70\.6B parameters do not fit on up to 8 L4 24 GB .* 75% of the memory"):
        smallest_replica(large, gpu_named("l4"), ENGINE)
    with pytest.raises(ValueError, match="no memory for KV pages"):
        ReplicaPlan(large, H100, 1, ENGINE)


def test_every_gpu_has_its_figures_and_a_source() -> None:
    for gpu in gpus().values():
        assert gpu.source.startswith("https://") and 20 < gpu.memory_gib < 200
        assert 100 < gpu.bandwidth_gb_s < 10_000 and 50 < gpu.bf16_tflops < 3000
        assert 10 < gpu.peer_gb_s < gpu.bandwidth_gb_s
    with pytest.raises(ValueError, match=r"unknown GPU 'h999'; choose one of h100, h200"):
        gpu_named("h999")


def test_gpt_oss_20b_on_an_h100_holds_nearly_twice_as_many_requests_with_windows_apart() -> None:
    """Its 12 layers with a window hold 9 pages of 16 tokens each for 128 tokens, of the 512 for 8,192."""
    facts = ModelConfig.from_json(PUBLISHED["openai/gpt-oss-20b"], {}, "gpt-oss")
    plan = ReplicaPlan(facts, H100, 1, ENGINE)
    apart, whole = (plan.with_windowed_kv(setting) for setting in ("on", "off"))
    assert plan.layer_groups == apart.layer_groups, "they are apart by default"
    assert apart.num_pages in (2 * whole.num_pages, 2 * whole.num_pages + 1)
    assert (apart.pages_of(8192), whole.pages_of(8192)) == (512 + 9, 512)
    assert with_and_without(plan, 8192) == [("on", apart.num_pages // 521), ("off", whole.num_pages // 512)]
    assert apart.num_tokens == (apart.num_pages - (128 + 2048) // 16 - 2) * 16
    with_host = replace(plan, engine=replace(ENGINE, host_kv_gib=1.0))
    assert with_host.layer_groups is None, "replicas fetch pages of all layers through host memory by default"
    assert with_and_without(with_host, 8192) == with_and_without(plan, 8192)
    with_files = replace(plan, engine=replace(ENGINE, host_kv_gib=1.0, kv_tier=KVTier("kv")))
    assert with_files.layer_groups is None and with_and_without(with_files, 8192) == []


def test_gemma_3_27b_holds_three_times_as_many_requests_with_windows_apart() -> None:
    facts = ModelConfig.from_json(PUBLISHED["google/gemma-3-27b-it"], {}, "gemma")
    plan = ReplicaPlan(facts, H100, 2, ENGINE)
    assert plan.layer_groups is not None
    found = dict(with_and_without(plan, 8192))
    assert found["on"] / found["off"] == pytest.approx(512 * 62 / ((512 + 6 * 65) * 10), rel=0.03)
