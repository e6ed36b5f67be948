"""KV that moves between simulated replicas and files: who gets what when, and what a death in between costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.prefix_hash import block_hashes, prefix_root
from deployments.simulator.fleet.fetches import STORE, Fetches
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.replica import NAMESPACE, Job, SimulatedReplica
from deployments.simulator.fleet.result import Result
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Kill, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import TraceRequest
from router.fetch.fetching import Source
from router.policy_names import policy_named
from tests.router.support.traffic import conversations

SPEED = ServiceModel(prefill_rate=1000.0, decode_base_s=0.01, decode_per_request_s=0.0)
PEERS = Tiers(peer_bandwidth=10_000.0, peer_latency_s=0.005, kv_bytes_per_token=1.0)
"""Blocks of 100 tokens: a peer sends one in 10 ms, and to compute one takes 100 ms."""
FILES = Tiers(
    host_tokens=400, host_min_uses=1, host_bandwidth=1e6, kv_bytes_per_token=1.0, file_tokens=10_000,
    is_file_store_shared=True, file_bandwidth=10_000.0, file_latency_s=0.0,
)  # fmt: skip


class Pair:
    """Two replicas and what moves between them, on one clock."""

    def __init__(self, tiers: Tiers, num_pages: int = 5) -> None:
        self.fetches = Fetches(tiers, 100, lambda *_: None, lambda *_: None)
        self.replicas = [SimulatedReplica(name, SPEED, num_pages, 100, tiers=tiers) for name in ("a", "b")]
        for one in self.replicas:
            self.fetches.join(one)
        self.now = 0.0

    def submit(self, at: int, blocks: Sequence[int], source: Source | None = None) -> Job:
        job = Job(TraceRequest(self.now, 100 * len(blocks), 1, tuple(blocks)), hashes(blocks), 0, self.now)
        if source is not None:
            self.fetches.begin(job, self.replicas[at], source, self.now)
        self.replicas[at].submit(job, self.now)
        return job

    def run(self) -> None:
        while (
            due := min(self.fetches.links.next_event(), *(one.next_event() for one in self.replicas))
        ) < math.inf:
            self.now = due
            self.fetches.links.advance(due)
            for one in self.replicas:
                if one.next_event() <= due:
                    one.advance(due)
                self.fetches.write(one, due)

    def serve(self, at: int, blocks: Sequence[int], source: Source | None = None) -> Job:
        job = self.submit(at, blocks, source)
        self.run()
        return job


def hashes(blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(block_hashes(blocks, prefix_root(NAMESPACE), 1))


def peer(tokens: int = 400) -> Source:
    return Source("a", tokens, 10_000.0, 0.005)


def test_a_peers_prefix_comes_over_the_link_and_is_found() -> None:
    pair = Pair(PEERS)
    pair.serve(0, (1, 2, 3, 4))
    job = pair.serve(1, (1, 2, 3, 4), peer())
    assert (job.hit_tokens, job.peer_tokens) == (399, 400)
    assert job.first_token_at is not None
    assert job.first_token_at - job.arrived == pytest.approx(0.005 + 0.04 + 0.001)
    assert pair.fetches.links.moved["a out"] == pair.fetches.links.moved["b in"] == pytest.approx(400.0)


def test_a_promise_that_the_peer_cannot_keep_means_computing() -> None:
    pair = Pair(PEERS)
    pair.serve(0, (1, 2))
    job = pair.serve(1, (1, 2, 3, 4), peer())
    assert (job.hit_tokens, job.peer_tokens) == (200, 200)
    assert pair.serve(1, (6, 7), Source("a", 200, 1.0, 0.0)).peer_tokens == 0


def test_others_go_first_while_a_prompt_waits_for_its_transfer() -> None:
    pair = Pair(PEERS, 12)
    pair.serve(0, (1, 2, 3, 4))
    fetching = pair.submit(1, (1, 2, 3, 4), peer())
    other = pair.submit(1, (8,))
    pair.run()
    assert other.first_token_at is not None and fetching.first_token_at is not None
    assert other.first_token_at < fetching.first_token_at
    assert fetching.hit_tokens == 399


def test_the_sender_keeps_the_blocks_that_it_sends_until_they_have_arrived() -> None:
    pair = Pair(replace(PEERS, peer_bandwidth=100.0))  # 4 s for 4 blocks
    pair.serve(0, (1, 2, 3, 4))
    fetching, pressing = pair.submit(1, (1, 2, 3, 4), peer()), pair.submit(0, (5, 6, 7, 8))
    pair.run()
    assert fetching.hit_tokens == 399
    assert pressing.first_token_at is not None and pressing.first_token_at - pressing.arrived > 4.0


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_death_in_between_means_computing(lost: str) -> None:
    pair = Pair(replace(PEERS, peer_bandwidth=100.0))
    pair.serve(0, (1, 2, 3, 4))
    job = pair.submit(1, (1, 2, 3, 4), peer())
    pair.fetches.lose(lost, pair.now + 1.0)
    if lost == "b":
        assert pair.replicas[1].lose(pair.now + 1.0) == [job]
        assert job.fetching is None
        assert pair.serve(0, (5, 6, 7, 8)).first_token_at is not None  # the sender's pages are free again
        return
    pair.now += 1.0
    pair.replicas[1].advance(pair.now)
    pair.run()
    assert (job.hit_tokens, job.peer_tokens) == (0, 0)
    assert job.first_token_at is not None


def test_blocks_that_the_host_takes_lie_in_files_for_all_replicas_that_share_them() -> None:
    pair = Pair(FILES)
    for prompt in ((1, 2, 3, 4), (5, 6, 7, 8)):
        pair.serve(0, prompt)
    job = pair.serve(1, (1, 2, 3, 4), Source(STORE, 400, 10_000.0, 0.0))
    assert (job.hit_tokens, job.file_tokens) == (399, 400)
    assert job.first_token_at is not None
    assert job.first_token_at - job.arrived == pytest.approx(0.04 + 0.001)


def test_own_files_are_read_by_no_other_replica() -> None:
    pair = Pair(replace(FILES, is_file_store_shared=False))
    for prompt in ((1, 2, 3, 4), (5, 6, 7, 8)):
        pair.serve(0, prompt)
    assert pair.serve(1, (1, 2, 3, 4), Source("files of b", 400, 10_000.0, 0.0)).file_tokens == 0
    pair.serve(0, (11, 12, 13, 14))  # with (5, 6, 7, 8) in the host's four pages
    assert pair.serve(0, (1, 2, 3, 4), Source("files of a", 400, 10_000.0, 0.0)).file_tokens == 400


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans()),
        max_size=25,
    ),
    with_files=st.booleans(),
)
def test_only_computed_blocks_are_served_and_bytes_are_those_of_blocks(
    steps: list[tuple[int, list[int], bool]], with_files: bool
) -> None:
    tiers = replace(FILES, peer_bandwidth=10_000.0) if with_files else PEERS
    pair, computed, fetched = Pair(tiers, 6), set[tuple[int, ...]](), 0
    for at, blocks, by_file in steps:
        source = Source(STORE if by_file else "ab"[1 - at], 100 * len(blocks), 10_000.0, 0.0)
        job = pair.serve(at, blocks, source)
        prefixes = [tuple(blocks[: end + 1]) for end in range(len(blocks))]
        assert job.first_token_at is not None
        assert computed.issuperset(prefixes[: -(-(job.hit_tokens or 0) // 100)])
        computed.update(prefixes)
        fetched += job.peer_tokens
    moved = pair.fetches.links.moved
    assert moved["a in"] + moved["b in"] == pytest.approx(fetched)
    assert moved["a in"] == pytest.approx(moved["b out"]) and moved["b in"] == pytest.approx(moved["a out"])
    assert all(bytes_ <= 10_000.0 * pair.now * (1 + 1e-9) for bytes_ in moved.values())


SMALL = Scenario(num_replicas=4, cache_tokens=150_000, load=1.2)
CHAT = conversations(300)


def run(tiers: Tiers, policy: str = "cost_fetch", **changes: object) -> Result:
    scenario = replace(SMALL, tiers=tiers, **changes)  # type: ignore[arg-type]
    return simulate(CHAT, scenario, policy, lambda: policy_named(policy, SIMULATED))


def test_fetches_bring_hits_and_every_policy_can_fetch() -> None:
    """The cost finds most where it goes anyhow; the others profit."""
    assert run(Tiers(peer_bandwidth=25e9)).peer_share > 0.0
    for policy in ("random", "linear"):
        without, with_peers = run(Tiers(), policy), run(Tiers(peer_bandwidth=25e9), policy)
        assert with_peers.peer_share > 0.0 == without.peer_share
        assert with_peers.hit_rate > without.hit_rate


def test_a_link_slower_than_computing_is_not_used() -> None:
    """12,000 tokens/s of 131,072 bytes are 1.6 GB/s."""
    assert run(Tiers(peer_bandwidth=1e8)).peer_share == 0.0


@pytest.mark.parametrize("shared", [False, True])
def test_no_request_is_lost_where_replicas_die_with_transfers_under_way(shared: bool) -> None:
    tiers = Tiers(
        host_tokens=150_000, host_min_uses=1, file_tokens=1_000_000, is_file_store_shared=shared,
        file_bandwidth=2e9, peer_bandwidth=2e9,
    )  # fmt: skip
    kills = tuple(Kill(number % 4, 5.0 + 7.0 * number) for number in range(12))
    result = run(tiers, kills=kills, restart_s=3.0)
    assert result.num_moved > 0
    assert result.num_failed == run(tiers).num_failed
    assert result.file_share + result.peer_share > 0.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"peer_bandwidth": 0.0}, "peer_bandwidth must be above 0 bytes/s, got 0.0"),
        ({"file_bandwidth": 0.0}, "file_bandwidth must be above 0 bytes/s, got 0.0"),
        ({"peer_latency_s": -1.0}, "peer_latency_s must be at least 0 s, got -1.0"),
        ({"file_tokens": -1}, "file_tokens must be at least 0, which means no files, got -1"),
        (
            {"file_tokens": 1000},
            "file_tokens without host_tokens: evicted KV reaches files through",
        ),
        ({"is_file_store_shared": True}, "a shared file store needs its size: set file_tokens"),
    ],
)
def test_settings_are_checked(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PEERS, **setting)  # type: ignore[arg-type]
