"""Host memory below a simulated replica: what it keeps, what a copy costs, and that it serves what it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.replica import Job, SimulatedReplica
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import Trace, TraceRequest
from router.policy_names import policy_named
from tests.router.support.traffic import conversations

SPEED = ServiceModel(prefill_rate=1000.0, decode_base_s=0.01, decode_per_request_s=0.0)
HOST = Tiers(host_tokens=1000, host_bandwidth=10_000.0, kv_bytes_per_token=1.0)
"""Blocks of 100 tokens: a copy takes 10 ms, and to compute one 100 ms."""


def serve(one: SimulatedReplica, *prompts: tuple[int, ...]) -> list[Job]:
    """Run prompts of whole blocks one after the other, each with one token of answer."""
    jobs: list[Job] = []
    for prompt in prompts:
        now = 0.0 if not jobs else (jobs[-1].first_token_at or 0.0)
        job = Job(TraceRequest(now, 100 * len(prompt), 1, prompt), prompt, 0, now)
        one.submit(job, now)
        while one.next_event() != float("inf"):
            one.advance(one.next_event())
        jobs.append(job)
    return jobs


def replica(tiers: Tiers, num_pages: int = 5) -> SimulatedReplica:
    return SimulatedReplica("r", SPEED, num_pages, 100, tiers=tiers)


def test_a_prefix_that_was_used_twice_comes_back_for_the_time_of_a_copy() -> None:
    """The device has 5 blocks, which every request takes: four for its prompt, one for its answer."""
    jobs = serve(replica(HOST), (1, 2, 3, 4), (1, 2, 3, 4), (6, 7, 8, 9), (1, 2, 3, 4))
    last = jobs[-1]
    assert (last.hit_tokens, last.host_tokens) == (399, 399)
    assert last.first_token_at is not None
    assert last.first_token_at - last.arrived == pytest.approx(4 * 0.01 + 0.001)  # copies, and the last token


def test_copies_to_the_host_take_time_too() -> None:
    jobs = serve(replica(HOST), (1, 2, 3, 4), (1, 2, 3, 4), (6, 7, 8, 9))
    assert jobs[-1].first_token_at is not None
    assert jobs[-1].first_token_at - jobs[-1].arrived == pytest.approx(0.4 + 4 * 0.01)


def test_a_prefix_that_was_used_once_is_kept_only_if_one_use_is_enough() -> None:
    prompts = ((1, 2, 3, 4), (6, 7, 8, 9), (1, 2, 3, 4))
    assert serve(replica(HOST), *prompts)[-1].host_tokens == 0
    assert serve(replica(replace(HOST, host_min_uses=1)), *prompts)[-1].host_tokens > 0


def test_blocks_that_are_computed_sooner_than_copied_are_computed() -> None:
    slow = replace(HOST, host_bandwidth=999.0)  # 100.1 ms a block
    jobs = serve(replica(slow), (1, 2, 3, 4), (1, 2, 3, 4), (6, 7, 8, 9), (1, 2, 3, 4))
    assert jobs[-1].host_tokens == 0
    assert jobs[-1].first_token_at is not None


def test_routers_hear_of_a_block_until_no_tier_holds_it() -> None:
    one = replica(replace(HOST, host_tokens=400))
    jobs = serve(one, (1, 2, 3, 4), (1, 2, 3, 4), (6, 7, 8, 9))
    stored, evicted = one.drain_news()
    assert (len(stored), evicted) == (8, [])
    assert one.held_blocks(jobs[0]) == 4
    serve(one, (6, 7, 8, 9), (11, 12, 13, 14))  # these take the host's four pages
    assert len(one.drain_news()[1]) == 4
    assert one.held_blocks(jobs[0]) == 0


prompts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(prompts=prompts, host_blocks=st.integers(1, 12), min_uses=st.integers(1, 3))
def test_nothing_is_served_that_no_tier_can_hold(
    prompts: list[tuple[int, ...]], host_blocks: int, min_uses: int
) -> None:
    """Blocks are found only after they were computed here, and no more of them than both tiers have room for."""
    one = replica(replace(HOST, host_tokens=100 * host_blocks, host_min_uses=min_uses), num_pages=6)
    computed: set[tuple[int, ...]] = set()
    for prompt in prompts:
        chain = [prompt[: end + 1] for end in range(len(prompt))]
        (job,) = serve(one, tuple(_number(each) for each in chain))
        found = -(-(job.hit_tokens or 0) // 100)
        assert computed.issuperset(chain[:found])
        assert 0 <= job.host_tokens <= (job.hit_tokens or 0)
        computed.update(chain)
        held = [each for each in computed if one.held_blocks(_whole(each)) == len(each)]
        assert len(held) <= 6 + host_blocks


def _number(prefix: tuple[int, ...]) -> int:
    """A block's number, which equal prefixes share and no others."""
    return sum(4**place * block for place, block in enumerate(prefix))


def _whole(prefix: tuple[int, ...]) -> Job:
    blocks = tuple(_number(prefix[: end + 1]) for end in range(len(prefix)))
    return Job(TraceRequest(0.0, 100 * len(blocks), 1, blocks), blocks, 0, 0.0)


def test_a_fleet_with_host_memory_finds_more_and_answers_sooner() -> None:
    small = Scenario(num_replicas=2, cache_tokens=100_000, load=1.2)
    tiers = Tiers(host_tokens=800_000, host_min_uses=1)
    trace = conversations(400)
    runs = [
        simulate(trace, replace(small, tiers=each), "cost", lambda: policy_named("cost", SIMULATED))
        for each in (Tiers(), tiers)
    ]
    assert runs[0].host_share == 0.0
    assert runs[1].hit_rate > runs[0].hit_rate + 0.05
    assert runs[1].ttft_p95 < runs[0].ttft_p95


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"host_tokens": -1}, "host_tokens must be at least 0, which means no host tier, got -1"),
        ({"host_min_uses": 0}, "host_min_uses must be at least 1"),
        ({"host_bandwidth": 0.0}, "host_bandwidth must be above 0 bytes/s, got 0.0"),
        ({"kv_bytes_per_token": -2.0}, "kv_bytes_per_token must be above 0 bytes, got -2.0"),
        ({"host_bandwidth": float("nan")}, "host_bandwidth must be above 0 bytes/s, got nan"),
    ],
)
def test_tiers_are_checked(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HOST, **setting)  # type: ignore[arg-type]


def test_a_tier_smaller_than_a_block_is_named() -> None:
    trace = Trace("t", (TraceRequest(0.0, 600, 1, (0, 1)),), 512, True)
    scenario = Scenario(num_replicas=1, tiers=Tiers(host_tokens=511))
    with pytest.raises(ValueError, match="host_tokens must be at least 512, a block of the trace"):
        simulate(trace, scenario, "cost", lambda: policy_named("cost", SIMULATED))
