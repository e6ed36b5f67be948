"""Which requests are told to fetch KV, and from whom."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import KVAddress, ReplicaAddress
from router.fetch.fetching import FetchTerms
from router.fleet import Fleet
from router.member import ReplicaLoad
from router.placer import Placer, PlacerSettings
from tests.router.support.fleets import Prompt

BLOCK = 4
IDLE = ReplicaLoad(pages_free=10_000, pages_total=10_000, prefill_rate=1000.0, fetch_rate=50_000.0)
BUSY = structs.replace(IDLE, queued_prefill_tokens=20_000)
PROMPT = list(range(4000))
CHAIN = block_hashes(PROMPT, prefix_root(Namespace(Prompt("r", []).model)), BLOCK)


def lending(name: str) -> ReplicaAddress:
    return ReplicaAddress(name, f"tcp://{name}", "secret", kv=KVAddress(f"tcp://kv-{name}", "kv secret"))


class Placing:
    """A placer of replicas that lend KV, of which those that are `busy` hold the prompt's blocks as given."""

    def __init__(self, names: str, busy: dict[str, int], policy: str = "cost") -> None:
        self.fleet, self.names, self._number = Fleet(), names, 0
        self.fleet.update({name: lending(name) for name in names})
        for name in names:
            self.fleet.record_load(name, BUSY if name in busy else IDLE)
        self.placer = Placer(self.fleet, PlacerSettings(policy, BLOCK), random.Random(1))
        for name, blocks in busy.items():
            self.placer.replace(name, CHAIN[:blocks])

    def place(self) -> tuple[str, str, str]:
        """Place the prompt; return the request's id, its replica, and whom it is to fetch from ("": nobody)."""
        self._number += 1
        request_id = f"r{self._number}"
        self.fleet.open(request_id)
        chosen = self.placer.place(Prompt(request_id, PROMPT), self.names).order[0]
        planned = self.placer.planned_fetch(request_id)
        return request_id, chosen, "" if planned is None else planned.source


def test_a_prompt_whose_holder_is_busy_goes_elsewhere_and_fetches() -> None:
    placing = Placing("abcd", {"a": 900})
    request_id, chosen, source = placing.place()
    assert chosen != "a" and source == "a"

    planned = placing.placer.planned_fetch(request_id)
    assert planned is not None
    assert (planned.address, planned.num_tokens, planned.fetched) == (lending("a").kv, 3600, 3600)
    record = placing.placer.decision(request_id)
    assert record is not None
    assert (record.fetch_from, record.fetch_tokens, record.predicted_cached) == ("a", 3600, 0)
    assert record.regret_tokens == 0
    terms = record.terms[chosen]
    assert isinstance(terms, FetchTerms) and terms.source == "a"
    assert placing.fleet.candidates([chosen])[0].queued_prefill_tokens == 400  # what is left to compute
    placing.placer.settle(request_id, 3600)
    assert placing.placer.totals()["predicted"] == placing.placer.totals()["actual"] == 3600


def test_tokens_that_a_replica_is_about_to_compute_are_not_fetched_from_it() -> None:
    """It holds a beginning of the prompt, and was sent all of it a moment ago."""
    placing = Placing("ab", {"a": 500})
    placing.fleet.record_load("a", IDLE)
    assert placing.place()[1:] == ("a", "")
    placing.fleet.record_load("a", BUSY)
    request_id, chosen, source = placing.place()
    assert (chosen, source) == ("b", "a")
    planned = placing.placer.planned_fetch(request_id)
    assert planned is not None and planned.num_tokens == 500 * BLOCK


def test_an_idle_holder_computes_and_fetches_nothing() -> None:
    placing = Placing("abcd", {"a": 900})
    placing.fleet.record_load("a", IDLE)
    assert placing.place()[1:] == ("a", "")


@pytest.mark.parametrize("policy", ["random", "least_loaded", "rendezvous", "session"])
def test_replicas_fetch_under_every_policy(policy: str) -> None:
    placing = Placing("abcd", {"a": 1000}, policy)
    placed = [placing.place()[1:] for _ in range(40)]
    assert {source for chosen, source in placed if chosen == "a"} <= {""}
    first = next(source for chosen, source in placed if chosen != "a")
    assert first == "a"


def test_the_less_busy_sender_of_holders_with_as_much_is_asked() -> None:
    placing = Placing("abcdefgh", {"a": 1000, "b": 1000, "c": 500}, "least_loaded")
    sources = [placing.place()[2] for _ in range(4)]
    assert sorted(sources) == ["a", "a", "b", "b"]


def test_replicas_that_are_lost_or_lend_nothing_are_not_asked() -> None:
    placing = Placing("abcd", {"a": 900})
    placing.fleet.mark_lost("a")
    assert placing.place()[2] == ""
    answers = Placing("abcd", {"a": 900})
    answers.fleet.mark_lost("a")
    answers.fleet.mark_lost("a", False)
    assert answers.place()[2] == "a"

    silent = Placing("abcd", {"a": 900})
    silent.fleet.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in "abcd"})
    assert silent.place()[2] == ""

    unable = Placing("abcd", {"a": 900})
    for name in "abcd":
        unable.fleet.record_load(name, structs.replace(IDLE if name != "a" else BUSY, fetch_rate=0.0))
    assert unable.place()[2] == "" and unable.fleet.fetch_rate() == 0


def test_a_draining_replica_still_lends() -> None:
    placing = Placing("abcd", {"a": 900})
    placing.fleet.record_load("a", structs.replace(IDLE, is_draining=True))
    request_id, chosen, source = placing.place()
    assert chosen != "a" and source == "a"
    placing.placer.release(request_id)
    assert placing.placer.planned_fetch(request_id) is None


def test_a_slow_link_is_not_used() -> None:
    placing = Placing("abcd", {"a": 900})
    for name in "abcd":
        placing.fleet.record_load(name, structs.replace(BUSY if name == "a" else IDLE, fetch_rate=10.0))
    assert placing.fleet.fetch_rate() == pytest.approx(10.0)
    assert placing.place()[2] == ""


def test_a_fetch_counts_until_the_first_token_or_the_end() -> None:
    placing = Placing("ab", {"a": 1000}, "least_loaded")
    request_id, _, source = placing.place()
    assert source == "a" and placing.placer.planned_fetch(request_id) is not None
    placing.placer.settle(request_id, 4000)
    assert placing.placer.planned_fetch(request_id) is None
    placing.placer.release(request_id)
    placing.placer.release(request_id)
    placing.fleet.update({"b": lending("b")})
    assert set(placing.fleet.lenders()) == {"b"}
