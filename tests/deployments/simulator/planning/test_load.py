"""How many replicas a load needs, and that the autoscaler agrees when given the same work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.replica.autoscaling import Targets, desired_replicas
from deployments.simulator.planning.known import gpu_named, planned_model
from deployments.simulator.planning.load import STEADY, RequestShape, operate, replicas_for
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from engine.settings.config import EngineConfig
from tests.support.examples import examples

REPLICA = smallest_replica(
    planned_model("Llama-3.1-8B").facts, gpu_named("h100"), EngineConfig(kv_memory_share=0.9)
)
SPARSE = smallest_replica(planned_model("Qwen3-30B-A3B").facts, gpu_named("h200"), EngineConfig())
STAGES = smallest_replica(
    planned_model("Llama-3.1-8B").facts, gpu_named("l4"), EngineConfig(), Assumptions(link_gb_s=1.0), num_stages=4
)
SHAPES = st.builds(RequestShape, st.integers(1, 60_000), st.integers(1, 8000), st.floats(0, 1))
RATES = st.floats(0.001, 500)


def test_prefill_decides_for_long_prompts_by_hand() -> None:
    request = RequestShape(prompt_tokens=2048, output_tokens=1)
    rate = REPLICA.prefill_tokens_per_s(2048)
    each = operate(REPLICA, request, 4.0)
    assert each.busy_share == pytest.approx(4 * 2048 / rate)
    prefill_s = 2048 / rate
    assert each.queued_prefill_s == pytest.approx(prefill_s * each.busy_share / (1 - each.busy_share))
    # 0.85 of a replica's rate may be in use, and no request waits a second at that load.
    assert replicas_for(REPLICA, request, 40.0) == math.ceil(40 * 2048 / rate / 0.85)


@pytest.mark.parametrize("rate", [0.001, 0.05, 4.0])
@pytest.mark.parametrize("replica", [REPLICA, SPARSE, STAGES], ids=["dense", "sparse", "stages"])
def test_running_requests_follow_littles_law(replica: ReplicaPlan, rate: float) -> None:
    request = RequestShape(prompt_tokens=512, output_tokens=1000)
    each = operate(replica, request, rate)
    decoding = each.num_running - rate * replica.prefill_s(512, 512)
    assert decoding == pytest.approx(rate * 1000 * each.itl_s)
    step = replica.decode_step_s(decoding, request.context)
    assert each.itl_s == pytest.approx(step / (1 - each.busy_share))


def test_in_a_pipeline_prompts_wait_for_the_slowest_stage_and_pass_all() -> None:
    request = RequestShape(prompt_tokens=2048, output_tokens=1)
    slowest = 2048 * max(STAGES.prefill_token_s(stage, 2048) for stage in STAGES.stages)
    a_pass = 2048 * sum(STAGES.prefill_token_s(stage, 2048) for stage in STAGES.stages)
    a_pass += 3 * 2048 * 4096 * 2 / 1e9  # three links
    each = operate(STAGES, request, 0.5)
    assert each.busy_share == pytest.approx(0.5 * slowest)
    queue = slowest * each.busy_share / (1 - each.busy_share)
    assert each.ttft_s == pytest.approx(queue + a_pass + each.itl_s)
    assert a_pass > 3.5 * slowest, "stages take about as long as each other"


def test_memory_decides_for_long_outputs() -> None:
    request = RequestShape(prompt_tokens=16_000, output_tokens=4000, hit_rate=0.99)
    count = replicas_for(REPLICA, request, 2.0)
    each = operate(REPLICA, request, 2.0 / count)
    assert 0.5 < each.kv_share <= 0.85 and each.busy_share < 0.85
    assert count > 1
    assert operate(REPLICA, request, 2.0 / (count - 1)).kv_share > 0.85


@settings(max_examples=examples(12))
@given(SHAPES, RATES)
def test_the_autoscaler_comes_to_the_same_number(request: RequestShape, rate: float) -> None:
    targets = STEADY
    count = replicas_for(REPLICA, request, rate, targets)
    enough = [operate(REPLICA, request, rate / count).work] * count
    assert desired_replicas(targets, enough, count, count) <= count, "enough: no more are started"
    if count > 1:
        few = operate(REPLICA, request, rate / (count - 1)).work
        if all(map(math.isfinite, (few.queued_prefill_s, few.kv_share))):
            assert desired_replicas(targets, [few] * (count - 1), count - 1, count - 1) >= count


@settings(max_examples=examples(12))
@given(
    st.sampled_from([REPLICA, STAGES]),
    SHAPES,
    RATES,
    st.floats(1, 5),
    st.integers(0, 4000),
    st.integers(0, 2000),
    st.floats(0, 1),
)
def test_more_load_never_needs_fewer(
    replica: ReplicaPlan, request: RequestShape, rate: float, more: float, prompt: int, output: int, colder: float
) -> None:
    harder = RequestShape(
        request.prompt_tokens + prompt, request.output_tokens + output, request.hit_rate * (1 - colder)
    )
    few = replicas_for(replica, request, rate)
    assert replicas_for(replica, request, rate * more) >= few
    assert replicas_for(replica, harder, rate) >= few


def test_a_lower_target_needs_more() -> None:
    request = RequestShape(prompt_tokens=30_000, output_tokens=10)

    def at(ttft_target_s: float) -> int:
        return replicas_for(REPLICA, request, 5.0, replace(STEADY, ttft_target_s=ttft_target_s))

    assert at(0.2) > at(5.0)


def test_a_load_that_cannot_be_carried_is_reported() -> None:
    with pytest.raises(
        ValueError, match=r"a request of 140,000 tokens does not fit: a replica has room for 131,072"
    ):
        replicas_for(REPLICA, RequestShape(100_000, 40_000), 1.0)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="requests per second must be above 0"):
            replicas_for(REPLICA, RequestShape(), rate)
    with pytest.raises(ValueError, match="TTFT target must be above 0"):
        replicas_for(REPLICA, RequestShape(), 1.0, Targets(0.0))
    with pytest.raises(ValueError, match="lower the load"):
        replicas_for(REPLICA, RequestShape(), 1e12)
    with pytest.raises(ValueError, match="hit rate must be from 0 to 1"):
        RequestShape(hit_rate=math.nan)
