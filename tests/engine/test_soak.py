"""The soak of `benchmarks/soak.py`, as much of it as CI has time for: always the same episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.soak import STEPS
from benchmarks.soak_episode import Episode
from cache import KVCacheManager, Lease
from cache.node import Node
from cache.radix_tree import page_of
from cache.tiers.loans import Loan, Loans
from cache.tiers.page_tier import PageTier, TierPage
from engine.host_tier.host_pool import Copies
from engine.host_tier.host_prefixes import HostPrefixes
from engine.host_tier.swap import SwapSpace
from engine.scheduling.scheduler import Scheduler
from tests.engine.support.pipeline_runner import PipelineRunner

NUM_EPISODES = 60
GROUPS = 4
"""So that they spread over the processes that run the tests."""


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_request_of_any_episode_is_served_and_nothing_is_held_in_the_end(group: int) -> None:
    for number in range(group, NUM_EPISODES, GROUPS):
        Episode(f"ci.{number}").run(STEPS)


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_every_request_of_a_pipeline_is_served_too(micro_batches: int) -> None:
    """The last episodes each found a defect."""
    counts, num_full = Counter[str](), 0
    for number in [*range(12), 53, 64, 100, 146, 214]:
        episode = Episode(f"p.{number}", micro_batches)
        episode.run(STEPS)
        counts += episode.counts
        runner = episode.script.runner
        assert isinstance(runner, PipelineRunner)
        num_full += runner.most_in_flight == micro_batches
    assert all(counts[name] for name in ("drafts", "preemptions", "swapped", "beam searches", "abort", "error"))
    assert num_full > 8


def test_an_episode_is_the_same_every_time() -> None:
    """Steps that run in another thread included: what it found once, it finds again."""
    stories = []
    for number in [*range(5), *range(5)]:
        episode = Episode(f"ci.{number}")
        episode.run(STEPS)
        stories.append((episode.counts, episode.script.events))
    assert stories[:5] == stories[5:]


# --- what it would notice --------------------------------------------------------------------------------------

Wrap = Callable[[Any], Any]


def copies_nothing_back(swap_in: Any) -> Any:
    def wrong(*args: Any, **options: Any) -> Any:
        return Copies([], []) if isinstance(swap_in(*args, **options), Copies) else []

    return wrong


def counts_recomputed_requests_again(record: Any) -> Any:
    def wrong(*args: Any, recompute: bool, **rest: Any) -> None:
        record(*args, recompute=False, **rest)

    return wrong


def forgets_the_copy(fork: Any) -> Any:
    def wrong(*args: Any) -> Lease:
        lease: Lease = fork(*args)
        lease.partial = 0
        return lease

    return wrong


def unpins(pin: Any) -> Any:
    def wrong(tier: PageTier, *which: Any) -> list[TierPage]:
        pages: list[TierPage] = pin(tier, *which)
        tier.unpin(pages)
        return pages

    return wrong


def lends_a_page_too_many(lend: Any) -> Any:
    """The one in which the match ends, which a request may write on in."""

    def wrong(loans: Loans, node: Node | None, length: int) -> Loan | None:
        loan: Loan | None = lend(loans, node, length)
        if loan is not None and node is not None and length > loan.node.end:
            return Loan(loan.node, [*loan.pages, page_of(node, len(loan.pages))])
        return loan

    return wrong


DEFECTS: list[tuple[type, str, Wrap]] = [
    (KVCacheManager, "release_copy", lambda release: lambda *args: None),
    (KVCacheManager, "record_admission", counts_recomputed_requests_again),
    (KVCacheManager, "fork", forgets_the_copy),
    (SwapSpace, "swap_in", copies_nothing_back),
    (SwapSpace, "forget", lambda forget: lambda *args: None),
    (HostPrefixes, "hold", lambda hold: lambda *args: None),
    (HostPrefixes, "load", copies_nothing_back),
    (HostPrefixes, "drop", lambda drop: lambda prefixes, copies: prefixes.settle(copies)),
    (PageTier, "pin", unpins),
    (PageTier, "lend", unpins),
    (Loans, "lend", lends_a_page_too_many),
    (Scheduler, "needs_results", lambda needs: False),
]
NOTICED_IN = {"release_copy": (262,)}
"""Episodes that notice a defect that few do: they save the time of the others."""


@pytest.mark.parametrize(
    ("owner", "name", "wrong"), DEFECTS, ids=[f"{owner.__name__}.{name}" for owner, name, _ in DEFECTS]
)
def test_a_defect_is_noticed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Wrap) -> None:
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    with pytest.raises((AssertionError, ValueError)):
        for number in (*NOTICED_IN.get(name, ()), *range(NUM_EPISODES)):
            Episode(f"ci.{number}").run(STEPS)
