"""What routers know of files: a block in a store is kept once, whoever reads it, and prompts go by it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import ReplicaAddress, store_name
from router.decisions import DecisionRecord
from router.fetch.fetching import FetchTerms
from router.fleet import Fleet
from router.member import ReplicaLoad
from router.placer import Placer, PlacerSettings
from router.prefix_index import PrefixIndex
from tests.router.support.fleets import Prompt

BLOCK = 4
STORE, OTHER = store_name("shared"), store_name("other")
IDLE = ReplicaLoad(
    pages_free=10_000, pages_total=10_000, prefill_rate=1000.0, load_rates=(200_000.0, 50_000.0)
)  # fmt: skip
BUSY = structs.replace(IDLE, queued_prefill_tokens=20_000)
PROMPT = list(range(4000))
CHAIN = block_hashes(PROMPT, prefix_root(Namespace(Prompt("r", []).model)), BLOCK)


class Placing:
    """A placer of replicas, each of which reads from a store of files or from none."""

    def __init__(self, stores: dict[str, str], policy: str = "cost") -> None:
        self.fleet, self.names, self._number = Fleet(), list(stores), 0
        self.fleet.update(
            {name: ReplicaAddress(name, f"tcp://{name}", "secret", store=store) for name, store in stores.items()}
        )
        for name in stores:
            self.fleet.record_load(name, IDLE)
        self.placer = Placer(self.fleet, PlacerSettings(policy, BLOCK), random.Random(1))

    def place(self) -> DecisionRecord:
        self._number += 1
        request_id = f"r{self._number}"
        self.fleet.open(request_id)
        self.placer.place(Prompt(request_id, PROMPT), self.names)
        record = self.placer.decision(request_id)
        assert record is not None
        self.placer.release(request_id)
        return record


def test_a_prompt_goes_to_a_replica_that_loads_it_from_files() -> None:
    placing = Placing({"a": "", "b": STORE, "c": "", "d": ""})
    placing.placer.replace(STORE, CHAIN[:900])
    record = placing.place()
    assert record.replica == "b" and record.predicted_tiers == {"file": 3600}
    assert record.predicted_cached == 3600 and record.fetch_from is None and record.fetch_tokens == 0
    terms = record.terms["b"]
    assert isinstance(terms, FetchTerms) and (terms.source, terms.fetched_tokens) == (STORE, 3600)
    assert terms.fetch == pytest.approx(3600 / 50_000)
    placing.placer.settle(record.request_id, 3600)
    assert placing.placer.totals()["predicted"] == placing.placer.totals()["actual"] == 3600


def test_all_that_share_a_store_are_as_good_and_the_index_keeps_it_once() -> None:
    placing = Placing(dict.fromkeys("abcd", STORE))
    placing.placer.replace(STORE, CHAIN[:900])
    assert placing.placer.totals()["blocks"] == 900
    for name in "abc":
        placing.fleet.record_load(name, BUSY)
    record = placing.place()
    assert record.replica == "d" and record.predicted_tiers == {"file": 3600}
    assert set(record.terms) == set("abcd")
    assert all(isinstance(terms, FetchTerms) for terms in record.terms.values())


def test_files_continue_where_the_device_ends() -> None:
    placing = Placing({"a": STORE, "b": STORE})
    placing.placer.replace("a", CHAIN[:100])
    placing.placer.replace(STORE, CHAIN[100:500])
    record = placing.place()
    assert record.replica == "a" and record.predicted_tiers == {"device": 400, "file": 1600}


def test_files_that_are_slower_than_computing_do_not_count() -> None:
    for rates in ((200_000.0, 900.0), (200_000.0,), ()):
        placing = Placing({"a": "", "b": STORE})
        placing.fleet.record_load("b", structs.replace(IDLE, load_rates=rates))
        placing.placer.replace(STORE, CHAIN)
        assert placing.place().predicted_tiers == {}


def test_blocks_come_and_go_and_the_last_reader_takes_the_store_along() -> None:
    placing = Placing({"a": STORE, "b": STORE, "c": OTHER})
    placing.placer.replace(STORE, CHAIN[:10])
    placing.placer.extend(STORE, CHAIN[10:20])
    placing.placer.apply_delta(STORE, CHAIN[20:900], [])
    placing.placer.apply_delta(STORE, [], CHAIN[600:900])
    assert placing.place().predicted_tiers == {"file": 2400}
    placing.fleet.update({"b": placing.fleet.addresses()["b"], "c": placing.fleet.addresses()["c"]})
    placing.names = ["b", "c"]
    placing.fleet.record_load("b", IDLE)
    assert placing.place().predicted_tiers == {"file": 2400}
    placing.fleet.update({"c": placing.fleet.addresses()["c"]})
    placing.names = ["c"]
    assert placing.place().predicted_tiers == {} and placing.placer.totals()["blocks"] == 0
    placing.placer.apply_delta(STORE, CHAIN, [])
    assert placing.placer.totals()["blocks"] == 0, "a late message brings nothing back"


@pytest.mark.parametrize("policy", ["session", "rendezvous", "least_loaded", "random"])
def test_no_policy_takes_a_store_for_a_replica(policy: str) -> None:
    placing = Placing({"a": STORE, "b": STORE}, policy)
    placing.placer.replace(STORE, CHAIN)
    record = placing.place()
    assert record.replica in "ab" and record.predicted_tiers == {"file": 4000} and record.regret_tokens == 0


@given(st.dictionaries(st.sampled_from(["a", "b", STORE, OTHER]), st.integers(0, 12)), st.integers(0, 12))
def test_a_store_reaches_up_to_its_last_block_and_holds_no_prompt(held: dict[str, int], first: int) -> None:
    index = PrefixIndex(BLOCK)
    chain = CHAIN[:12]
    for name, blocks in held.items():
        index.replace(name, chain[:blocks])
    assert index.match(chain, 0.0) == {name: held[name] for name in "ab" if held.get(name)}
    for store in (STORE, OTHER):
        assert index.reach(store, chain, first) == max(first, held.get(store, 0))
    index.forget(STORE)
    assert index.reach(STORE, chain, first) == first
