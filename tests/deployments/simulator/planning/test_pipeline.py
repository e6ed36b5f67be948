"""What the stages of a pipeline hold, how fast they are together, and on how many hosts: computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deployments.simulator.planning.known import gpu_named, planned_model
from deployments.simulator.planning.load import RequestShape
from deployments.simulator.planning.pipeline import pipeline_figures
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from engine.attention.kv_pages import KVPages
from engine.loading.kv_memory import pages_for, slots_for
from engine.model_config.config import ModelConfig
from engine.parallel.shard import Shard
from engine.settings.config import DType, EngineConfig
from tests.engine.support.published_models import PUBLISHED

H100, L4 = gpu_named("h100"), gpu_named("l4")
SMALL = planned_model("Llama-3.1-8B").facts
LARGE = planned_model("Llama-3.1-70B-Instruct").facts
ENGINE = EngineConfig(kv_memory_share=0.9)
TWO = replace(ENGINE, pipeline_parallel_size=2)
LAYER, TABLE = 855_654_400, 128_256 * 8192
"""Weights of a layer of LARGE, and of each of its two tables."""


def test_llama_70b_in_two_stages_by_hand() -> None:
    plan = ReplicaPlan(LARGE, H100, 2, TWO)
    first, last = plan.stages
    assert (first.layers, last.layers) == (range(39), range(39, 80))
    assert first.weight_bytes == 2 * (39 * LAYER + 2 * TABLE + 8192)
    assert last.weight_bytes == 2 * (41 * LAYER + 8192)
    assert (first.kv_bytes_per_token, last.kv_bytes_per_token) == (39 * 4096, 41 * 4096)
    free = H100.memory_bytes - 41 * LAYER - 8192 - 2 * 2**30
    assert plan.num_pages == int(0.9 * free) // (16 * 41 * 2048), "the last stage has more KV and so fewer pages"
    assert plan.num_pages_of(first) > plan.num_pages_of(last) == plan.num_pages
    whole = ReplicaPlan(LARGE, H100, 4, ENGINE)
    assert plan.kv_bytes_per_token == whole.kv_bytes_per_token
    assert plan.weight_bytes == whole.weight_bytes + 2 * 8192, "each stage has the final norm"


def test_requests_wait_for_a_pass_or_for_the_slowest_stage() -> None:
    plan = ReplicaPlan(SMALL, H100, 1, TWO)
    first, _ = plan.stages
    link_s = 4096 * 2 / 12.5e9
    alone = [plan.stage_step_s(stage, 1, 100) for stage in plan.stages]
    assert alone[0] == pytest.approx((first.weight_bytes + 100 * first.kv_bytes_per_token) / 2.345e12)
    assert plan.decode_step_s(1, 100) == pytest.approx(sum(alone) + 2 * link_s), "one request passes both"
    assert plan.rows_of(64) == 32
    each = [plan.stage_step_s(stage, 32, 100) for stage in plan.stages]
    assert plan.decode_step_s(64, 100) == pytest.approx(max(2 * max(each), sum(each) + 2 * 32 * link_s))
    three = ReplicaPlan(SMALL, H100, 1, replace(TWO, micro_batches=3))
    each = [three.stage_step_s(stage, 64 / 3, 100) for stage in three.stages]
    assert three.decode_step_s(64, 100) == pytest.approx(3 * max(each)), "a third one hides the links"
    slow = ReplicaPlan(SMALL, H100, 1, TWO, Assumptions(link_gb_s=0.01))
    assert slow.decode_step_s(64, 100) == pytest.approx(
        sum(slow.stage_step_s(stage, 32, 100) for stage in slow.stages) + 2 * 32 * 4096 * 2 / 1e7
    )


def test_prompts_are_computed_as_fast_as_the_slowest_stage_or_link() -> None:
    plan = ReplicaPlan(SMALL, H100, 1, TWO)
    each = [plan.prefill_token_s(stage, 1024) for stage in plan.stages]
    assert sum(each) == pytest.approx(1 / ReplicaPlan(SMALL, H100, 1, ENGINE).prefill_tokens_per_s(1024), rel=1e-4)
    assert plan.prefill_tokens_per_s(1024) == pytest.approx(1 / max(each))
    slow = ReplicaPlan(SMALL, H100, 2, TWO, Assumptions(link_gb_s=0.1))
    assert slow.prefill_tokens_per_s(1024) == pytest.approx(0.1e9 / (2 * 4096 * 2)), "both GPUs send it"
    # Steps of 2,048 tokens: the first passes both stages, the other two follow.
    assert plan.engine.max_step_tokens == 2048
    link_s = 4096 * 2 / 12.5e9
    assert plan.prefill_s(6144, 6144) == pytest.approx(
        2048 * (sum(each_of(plan, 6144)) + link_s) + 4096 * max(each_of(plan, 6144))
    )


def each_of(plan: ReplicaPlan, prompt_tokens: int) -> list[float]:
    return [plan.prefill_token_s(stage, prompt_tokens) for stage in plan.stages]


def test_the_bubble_and_the_links_by_hand() -> None:
    plan = ReplicaPlan(SMALL, H100, 1, replace(TWO, pipeline_parallel_size=4))
    figures = pipeline_figures(plan, 64, RequestShape(1024, 256))
    assert figures is not None and figures.micro_batches == 4 and figures.burst_bubble == 3 / 4
    slowest = max(plan.stage_step_s(stage, 16, 1152) for stage in plan.stages)
    assert figures.decode.gb_per_s == pytest.approx(16 * 4096 * 2 / slowest / 1e9)
    assert figures.decode.share == pytest.approx(figures.decode.gb_per_s / 12.5)
    assert figures.prefill.gb_per_s == pytest.approx(plan.prefill_tokens_per_s(1024) * 4096 * 2 / 1e9)
    assert figures.idle_share == pytest.approx(1 - 4 * slowest / plan.decode_step_s(64, 1152))
    assert 0 <= figures.idle_share < 0.02
    more = ReplicaPlan(SMALL, H100, 1, replace(TWO, pipeline_parallel_size=4, micro_batches=8))
    hidden = pipeline_figures(more, 64, RequestShape(1024, 256))
    assert hidden is not None and (hidden.burst_bubble, hidden.idle_share) == (3 / 8, 0)
    few = ReplicaPlan(SMALL, H100, 1, replace(TWO, pipeline_parallel_size=4, micro_batches=1))
    idle = pipeline_figures(few, 64, RequestShape(1024, 256))
    assert idle is not None and idle.burst_bubble == 3 and idle.idle_share > 0.7
    assert pipeline_figures(ReplicaPlan(SMALL, H100, 1, ENGINE), 64, RequestShape()) is None


def test_a_stage_s_pages_take_the_planned_memory() -> None:
    for facts in (SMALL, ModelConfig.from_json(PUBLISHED["openai/gpt-oss-20b"], {}, "gpt-oss")):
        plan = ReplicaPlan(facts, H100, 2, replace(TWO, pipeline_parallel_size=3))
        for stage in plan.stages:
            own = stage.stage.of(Shard(0, 2).of(facts))
            arguments = (torch.bfloat16, torch.device("meta"), None, stage.groups)
            pages = KVPages.of(own, 9, 16, *arguments)
            in_a_page = stage.kv_bytes_per_token // 2
            if stage.groups is not None:
                in_a_page = stage.groups.bytes_per_token(in_a_page)
            assert pages.data.nbytes == in_a_page * 16 * (9 + 1)  # and the null page
            assert plan.num_pages_of(stage) == pages_for(
                plan.engine, plan.free_bytes_of(stage), in_a_page, plan.longest_request, stage.groups
            )


def test_the_stage_with_least_room_decides_the_slots_of_states() -> None:
    facts = ModelConfig.from_json(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"], {}, "next")
    plan = ReplicaPlan(facts, gpu_named("h200"), 1, replace(TWO, dtype="bfloat16"))
    slots = [slots_for(plan.engine, plan.free_bytes_of(each), each.state_bytes) for each in plan.stages]
    assert plan.num_state_slots == min(slots)
    assert plan.state_bytes == facts.state_bytes(2) == sum(each.state_bytes for each in plan.stages)


def test_one_host_is_preferred_and_then_as_few_hosts_and_gpus_as_hold_the_model() -> None:
    def division(facts: ModelConfig, *arguments: object, **settings: int) -> tuple[int, int, int]:
        plan = smallest_replica(facts, *arguments, **settings)  # type: ignore[arg-type]
        return plan.tp, len(plan.stages), plan.num_hosts

    assert division(LARGE, H100, ENGINE, most_hosts=4) == (4, 1, 1), "as without pipelines"
    # 131 GiB in 70 % of 21.9 GiB each: nine GPUs or more. Two do not divide into nine, and five stages need ten.
    assert division(LARGE, L4, ENGINE, most_hosts=4) == (2, 5, 2)
    assert division(LARGE, L4, ENGINE, Assumptions(gpus_per_host=4), 4) == (2, 5, 3), "two stages on a host"
    assert division(LARGE, H100, ENGINE, num_stages=2) == (2, 2, 1)
    three = Assumptions(gpus_per_host=3)
    assert division(LARGE, H100, ENGINE, three, 1) == (1, 3, 1), "two GPUs are too few, and three share no heads"


@pytest.mark.parametrize(
    ("most_hosts", "num_stages", "dtype", "message"),
    [
        (1, None, "bfloat16", "on up to 8 L4 24 GB of one host: on 8 GPUs weights take 75% .* or more hosts"),
        (2, 2, "float32", "on up to 16 L4 24 GB of 2 hosts: on 16 GPUs weights take 75% .* or more hosts"),
        (1, 9, "bfloat16", r"9 stages of one GPU each take 2 hosts of 8 GPUs, but there may be 1 \(--hosts\)"),
        (16, 81, "bfloat16", "pipeline_parallel_size is 81, but the 80 layers .* at most 80 stages"),
    ],
)
def test_what_fits_on_no_hosts_is_refused_with_numbers(
    most_hosts: int, num_stages: int | None, dtype: DType, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        smallest_replica(LARGE, L4, replace(ENGINE, dtype=dtype), None, most_hosts, num_stages)


def test_the_gpus_of_a_stage_are_in_one_host() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 16, but a host has 8 GPUs"):
        ReplicaPlan(LARGE, H100, 16, TWO)
