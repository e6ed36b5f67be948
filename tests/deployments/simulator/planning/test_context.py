"""What GPUs hold that divide the KV of requests, and what they exchange: computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deployments.simulator.planning.context import context_figures
from deployments.simulator.planning.known import gpu_named, planned_model
from deployments.simulator.planning.load import RequestShape, operate
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from engine.attention.kv_pages import KVPages
from engine.model_config.config import ModelConfig
from engine.parallel.shard import Shard
from engine.settings.config import EngineConfig

H100 = gpu_named("h100")
QWEN = planned_model("Qwen3-30B-A3B").facts
"""48 layers with 32 query heads and 4 key-value heads of 128."""
DEEPSEEK = planned_model("DeepSeek-V3-0324").facts
"""61 layers with 128 heads that share keys of 576 numbers, of which 512 are the value."""
WHOLE = EngineConfig(kv_memory_share=0.9, max_step_tokens=8192, tensor_parallel_size=8)
HALVES = replace(WHOLE, context_parallel_size=2)
KV, QUERIES = 48 * 2 * 128 * 2, 48 * 4 * ((128 + 128) * 2 + 4)
"""Bytes of QWEN for a token and one of eight GPUs: keys and values of its head, and the queries of its four heads
with as many partial results."""


def planned(
    facts: ModelConfig = QWEN, engine: EngineConfig = HALVES, peer_gb_s: float | None = None
) -> ReplicaPlan:
    return ReplicaPlan(facts, H100, 8, engine, Assumptions(peer_gb_s=peer_gb_s))


def test_gpus_with_the_same_head_have_room_for_as_many_times_more_tokens() -> None:
    whole, halves = planned(engine=WHOLE), planned()
    assert (whole.kv_bytes_per_token, halves.kv_bytes_per_token) == (8 * KV, 4 * KV)
    assert halves.free_bytes == whole.free_bytes
    assert whole.num_pages == halves.num_pages == int(0.9 * whole.free_bytes) // (16 * KV)
    assert (whole.num_tokens, halves.num_tokens) == (whole.num_pages * 16, whole.num_pages * 32)
    assert (whole.pages_of(1000), halves.pages_of(1000)) == (63, 32)
    assert halves.concurrent_requests(100_000) == halves.num_pages // 3125 == 55
    short = planned(engine=replace(HALVES, max_model_len=100, max_running=8))
    assert short.num_pages == 8 * 4, "more than the largest batch can use is no use"
    assert planned(engine=replace(HALVES, kv_pages=77)).num_tokens == 77 * 32


def test_a_gpu_s_pages_take_the_planned_memory() -> None:
    for facts, parts in ((QWEN, 2), (DEEPSEEK, 8), (DEEPSEEK, 2)):
        plan = ReplicaPlan(facts, gpu_named("h200"), 8, replace(WHOLE, context_parallel_size=parts))
        own = Shard(0, 8).of(facts)
        pages = KVPages.of(own, 9, 16, torch.bfloat16, torch.device("meta"), None, None)
        a_page = pages.data.nbytes // (9 + 1)  # and the null page
        assert plan.num_pages == int(0.9 * plan.free_bytes) // a_page
        assert plan.kv_bytes_per_token * 16 * parts == a_page * 8
        assert plan.num_tokens == plan.num_pages * 16 * parts


def test_a_decode_step_reads_less_kv_and_waits_for_queries_and_results() -> None:
    plan = planned()
    [stage] = plan.stages
    read_s = (plan.bytes_read(32) + 32 * 50_000 * 8 * KV / 2) / plan.bytes_per_s
    exchange_s = 32 * QUERIES / 450e9
    assert plan.decode_step_s(32, 50_000) == pytest.approx(read_s + exchange_s)
    assert plan.decode_step_s(32, 50_000) < planned(engine=WHOLE).decode_step_s(32, 50_000)
    slow = planned(peer_gb_s=1.0)
    assert slow.decode_step_s(32, 50_000) == pytest.approx(read_s + 450 * exchange_s)
    rounded = planned(engine=replace(HALVES, kv_dtype="fp8")).stages[0]
    assert (rounded.query_bytes, 2 * rounded.kv_bytes_per_token) == (8 * QUERIES, stage.kv_bytes_per_token)


def test_latent_keys_have_one_head_for_all_gpus() -> None:
    plan = ReplicaPlan(DEEPSEEK, gpu_named("h200"), 8, replace(WHOLE, context_parallel_size=8))
    assert plan.stages[0].query_bytes == 8 * 7 * 61 * 16 * ((576 + 512) * 2 + 4)
    assert plan.kv_bytes_per_token == 61 * 576 * 2, "no GPU holds what another does"
    assert plan.num_tokens == 8 * ReplicaPlan(DEEPSEEK, gpu_named("h200"), 8, WHOLE).num_tokens


def test_the_earlier_kv_of_a_long_prompt_is_passed_while_attention_computes() -> None:
    """32,768 tokens in four steps: on average, half of the others are earlier ones, and a GPU receives the other
    half of their KV.
    """
    whole, halves = planned(engine=WHOLE), planned()
    [stage] = halves.stages
    received = halves.prompt_traffic(stage, 32_768)
    assert received.is_hidden and received.num_bytes == pytest.approx(8 * KV / 2 * 12_288 / 8192)
    assert halves.prefill_tokens_per_s(32_768) == whole.prefill_tokens_per_s(32_768)
    slow = planned(peer_gb_s=0.1)
    a_token = 2 * QWEN.active_parameters / slow.flops + received.num_bytes / (8 * 0.1e9)
    assert 1 / slow.prefill_tokens_per_s(32_768) == pytest.approx(a_token)
    assert slow.prefill_s(32_768, 32_768) == pytest.approx(32_768 * a_token)
    assert slow.ttft_s_alone(32_768, 32_768) > whole.ttft_s_alone(32_768, 32_768)
    eight_bits = planned(engine=replace(HALVES, kv_dtype="fp8"))
    assert eight_bits.prompt_traffic(eight_bits.stages[0], 32_768).num_bytes == received.num_bytes / 2


def test_a_prompt_in_one_step_needs_no_exchange() -> None:
    for num_tokens in (1, 1023, 1024, 8192):
        assert planned().prompt_traffic(planned().stages[0], num_tokens).num_bytes == 0


def test_few_tokens_after_a_cached_prefix_send_their_queries() -> None:
    plan = planned()
    [stage] = plan.stages
    few, many = plan.prompt_traffic(stage, 50_000, 1023), plan.prompt_traffic(stage, 50_000, 1024)
    assert (few.is_hidden, few.num_bytes) == (False, 8 * QUERIES)
    assert many.is_hidden and many.num_bytes == pytest.approx(8 * KV / 2 * (50_000 - 1024) / 1024)
    rate = planned(engine=WHOLE).prefill_tokens_per_s(50_000, 1023)
    assert 1 / plan.prefill_tokens_per_s(50_000, 1023) == pytest.approx(1 / rate + QUERIES / 450e9)
    never = planned(engine=replace(HALVES, ring_attention_tokens=2**20))
    queries = never.prompt_traffic(stage, 32_768)
    assert queries.num_bytes == pytest.approx(8 * QUERIES * 3 / 4), "the first of four steps has none before it"


def test_a_load_waits_for_exchanges_too() -> None:
    request = RequestShape(50_000, 500, hit_rate=0.99)
    fast, slow = (operate(planned(peer_gb_s=rate), request, 2.0) for rate in (450.0, 1.0))
    assert slow.busy_share == pytest.approx(fast.busy_share + 2.0 * 500 * QUERIES * (1e-9 - 1 / 450e9))
    assert slow.itl_s > fast.itl_s and slow.ttft_s > fast.ttft_s


def test_stages_divide_kv_as_one_does() -> None:
    plan = planned(engine=replace(HALVES, pipeline_parallel_size=2, max_running=1000))
    assert sum(stage.query_bytes for stage in plan.stages) == 8 * QUERIES
    assert plan.kv_bytes_per_token == 4 * KV
    for stage in plan.stages:
        in_a_page = 16 * KV * len(stage.layers) // 48
        assert plan.num_pages_of(stage) == int(0.9 * plan.free_bytes_of(stage)) // in_a_page
    figures = context_figures(plan, 64, RequestShape(50_000, 500))
    assert figures is not None
    steps = [plan.stage_step_s(stage, 32, 50_250) for stage in plan.stages]
    most = max(32 * s.query_bytes / 8 / step for s, step in zip(plan.stages, steps, strict=True))
    assert figures.decode.gb_per_s == pytest.approx(most / 1e9)


def test_the_figures_by_hand() -> None:
    plan, request = planned(), RequestShape(32_768, 512)
    figures = context_figures(plan, 10, request)
    assert figures is not None and (figures.parts, figures.is_prefill_hidden) == (2, True)
    step_s = plan.decode_step_s(10, request.context)
    assert figures.decode.gb_per_s == pytest.approx(10 * QUERIES / step_s / 1e9)
    assert figures.decode.share == pytest.approx(figures.decode.gb_per_s / 450)
    rate = plan.prefill_tokens_per_s(32_768)
    assert figures.prefill.gb_per_s == pytest.approx(KV / 2 * 1.5 * rate / 1e9)
    cached = context_figures(plan, 10, RequestShape(32_768, 512, hit_rate=0.99))
    assert cached is not None and not cached.is_prefill_hidden and cached.prefill.share > figures.prefill.share
    assert context_figures(planned(engine=WHOLE), 10, request) is None


def test_as_few_gpus_as_have_the_same_heads_hold_the_model() -> None:
    halves = EngineConfig(kv_memory_share=0.9, tensor_parallel_size=2, context_parallel_size=2)
    plan = smallest_replica(QWEN, H100, halves)
    assert (plan.tp, plan.cp, plan.engine.tensor_parallel_size) == (8, 2, 8)
    quarters = replace(halves, tensor_parallel_size=4, context_parallel_size=4)
    assert smallest_replica(QWEN, H100, quarters, Assumptions(gpus_per_host=16)).tp == 16
    stages = smallest_replica(QWEN, gpu_named("l4"), halves, most_hosts=2, num_stages=2)
    assert (stages.tp, len(stages.stages), stages.num_hosts) == (8, 2, 2)
    with pytest.raises(ValueError, match=r"is 4, for which 16 GPUs or more .*4 key-value heads.* a host has 8"):
        smallest_replica(QWEN, H100, quarters)
    with pytest.raises(ValueError, match="2 stages of 8 GPUs each take 2 hosts of 8 GPUs, but there may be 1"):
        smallest_replica(QWEN, H100, halves, num_stages=2)


@pytest.mark.parametrize(
    ("model", "tp", "cp", "message"),
    [
        (
            "Qwen3-30B-A3B",
            8,
            4,
            r"is 4, but .* is 2 \(tensor_parallel_size is 8.* can be 1, 2, or set .* to 16 or 32$",
        ),
        (
            "Llama-3.1-8B",
            8,
            2,
            r"is 2, but .* is 1 \(tensor_parallel_size is 8.* can be 1, or set .* to 16 or 32$",
        ),
        ("gpt-oss-20b", 2, 2, "is 2, but layers of this model .* a window or a chunk"),
    ],
)
def test_kv_that_gpus_do_not_share_is_not_divided(model: str, tp: int, cp: int, message: str) -> None:
    engine = replace(WHOLE, tensor_parallel_size=tp, context_parallel_size=cp)
    with pytest.raises(ValueError, match=f"context_parallel_size {message}"):
        ReplicaPlan(planned_model(model).facts, H100, tp, engine)
