"""Fetch or compute: by hand, and what must hold of any prompt, replica and sources."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost import Candidate, cost, queue_seconds
from router.fetch.fetching import FetchQuery, FetchTerms, Source, best_fetch, fetch_or_compute, transfer_seconds
from router.policies import CostPolicy
from tests.router.support.fleets import candidate, candidates, query

PEER = Source("b", 8000, 1e6, 0.5)


def fetch_query(**changes: Any) -> FetchQuery:
    """A prompt of 10,000 tokens, of which `a` holds 1,000 and `b` 8,000; KV takes 100 bytes a token."""
    values: dict[str, Any] = {
        "num_tokens": 10_000,
        "overlap": {"a": 1000, "b": 8000},
        "key": 7,
        "session": None,
        "utilisation": 0.0,
        "peers": (PEER,),
        "kv_bytes_per_token": 100.0,
    }
    return FetchQuery(**(values | changes))


def test_a_fetch_costs_its_transfer_and_the_tokens_that_the_source_lacks() -> None:
    """0.9 s to compute all, at 10,000 tokens/s; 0.2 s for what `b` lacks, after 0.5 s and 700 kB at 10 MB/s."""
    quick = source_b(bandwidth=1e7)
    terms = fetch_or_compute(fetch_query(peers=(quick,)), candidate("a"))
    assert isinstance(terms, FetchTerms)
    assert (terms.source, terms.fetched_tokens) == ("b", 7000)
    assert terms.fetch == pytest.approx(0.5 + 0.07)
    assert terms.prefill == pytest.approx(0.2)
    assert terms.total == pytest.approx(0.77)


def source_b(**changes: Any) -> Source:
    values: dict[str, Any] = {"name": "b", "tokens": 8000, "bandwidth": 1e6, "latency": 0.5}
    return Source(**(values | changes))


def test_a_link_too_slow_means_computing() -> None:
    slow = fetch_query(peers=(source_b(bandwidth=9e5),))  # 1.28 s against 0.9 s
    assert fetch_or_compute(slow, candidate("a")) == cost(slow, candidate("a"))


def test_a_fetch_that_ends_while_the_prompt_waits_costs_nothing() -> None:
    busy = candidate("a", queued_prefill_tokens=50_000)
    terms = fetch_or_compute(fetch_query(), busy)
    assert isinstance(terms, FetchTerms)
    assert (terms.queue, terms.fetch) == (5.0, 0.0)
    assert terms.total == pytest.approx(5.2)


def test_transfers_in_progress_share_a_link() -> None:
    alone = transfer_seconds(fetch_query(), PEER, "a", 1000)
    shared = transfer_seconds(fetch_query(transfers={"b": 2, "a": 1}), PEER, "a", 1000)
    assert alone == pytest.approx(0.6)
    assert shared == pytest.approx(0.8)


def test_no_replica_fetches_from_itself_or_less_than_it_has() -> None:
    assert best_fetch(fetch_query(), candidate("b")) is None
    assert best_fetch(fetch_query(peers=(source_b(tokens=1000, bandwidth=1e12),)), candidate("a")) is None


def test_each_replica_reads_its_own_files() -> None:
    files = {"a": Source("files of a", 9000, 1e9, 0.0)}
    found = best_fetch(fetch_query(peers=(), files=files), candidate("a"))
    assert found is not None and (found.source.name, found.tokens) == ("files of a", 8000)
    assert best_fetch(fetch_query(peers=(), files=files), candidate("c")) is None


def test_a_query_without_sources_costs_the_same_as_before() -> None:
    assert fetch_or_compute(query(), candidate("a")) == cost(query(), candidate("a"))


def test_a_bandwidth_of_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="the bandwidth from b must be above 0 bytes/s"):
        best_fetch(fetch_query(peers=(source_b(bandwidth=0.0),)), candidate("a"))


def test_the_policy_takes_an_idle_replica_that_can_fetch() -> None:
    """The holder has a queue of 0.4 s. Who counts on the fetch goes to the idle one, who does not waits."""
    fleet = [candidate("a"), candidate("b", queued_prefill_tokens=4_000.0)]
    prompt = fetch_query(overlap={"b": 8000}, peers=(source_b(bandwidth=1e9, latency=0.01),))
    assert CostPolicy().decide(prompt, fleet, random.Random(0)).order[0] == "b"
    decision = CostPolicy(price=fetch_or_compute).decide(prompt, fleet, random.Random(0))
    assert decision.order[0] == "a"
    assert isinstance(decision.terms["a"], FetchTerms)


sources = st.builds(
    Source,
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 20_000),
    st.floats(1.0, 1e12),
    st.floats(0.0, 10.0),
)


@given(
    peers=st.lists(sources, max_size=3),
    held=st.integers(0, 10_000),
    utilisation=st.floats(0.0, 1.0),
    one=candidates("a"),
    factor=st.floats(1.0, 100.0),
)
def test_fetching_never_costs_more_than_computing_nor_more_with_a_faster_link(
    peers: list[Source], held: int, utilisation: float, one: Candidate, factor: float
) -> None:
    prompt = fetch_query(overlap={"a": held}, peers=peers, utilisation=utilisation)
    terms, computed = fetch_or_compute(prompt, one), cost(prompt, one)
    assert terms.total <= computed.total * (1 + 1e-9)
    if isinstance(terms, FetchTerms):
        parts = terms.queue + terms.fetch + terms.prefill + terms.decode + terms.evict
        assert terms.total == pytest.approx(parts)
        assert terms.source != "a" and terms.fetched_tokens > 0
    faster = [Source(each.name, each.tokens, each.bandwidth * factor, each.latency) for each in peers]
    quicker = fetch_or_compute(fetch_query(overlap={"a": held}, peers=faster, utilisation=utilisation), one)
    assert quicker.total <= terms.total * (1 + 1e-9)
    assert queue_seconds(one) <= terms.total
