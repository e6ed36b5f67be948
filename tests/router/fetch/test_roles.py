"""Which prompts go to replicas that compute prompts, and what happens while one side is missing."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from msgspec import structs

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import KVAddress, ReplicaAddress
from router.fleet import Fleet
from router.member import ReplicaLoad
from router.placer import Placer, PlacerSettings
from tests.router.support.fleets import Prompt

BLOCK = 4
IDLE = ReplicaLoad(pages_free=10_000, pages_total=10_000, prefill_rate=1000.0, fetch_rate=50_000.0)
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}


def chain_of(tokens: list[int]) -> list[int]:
    return block_hashes(tokens, prefix_root(Namespace(Prompt("r", []).model)), BLOCK)


class Apart:
    """A placer of two replicas for prompts and three that generate, all idle."""

    def __init__(self, above: int | Literal["auto"] = 100) -> None:
        self.fleet = Fleet()
        lends = KVAddress("tcp://kv", "key")
        self.fleet.update(
            {name: ReplicaAddress(name, f"tcp://{name}", "s", kv=lends, role=role) for name, role in ROLES.items()}
        )
        for name in ROLES:
            self.fleet.record_load(name, IDLE)
        self.placer = Placer(self.fleet, PlacerSettings("cost", BLOCK, apart_above_tokens=above), random.Random(1))
        self._number = 0

    def place(self, num_tokens: int, avoid: tuple[str, ...] = (), output: int = 0) -> tuple[str, bool]:
        """Place a prompt; return its replica's role, and whether the stream goes on elsewhere."""
        self._number += 1
        request_id = f"r{self._number}"
        self.fleet.open(request_id)
        prompt = Prompt(request_id, list(range(num_tokens)), output_ids=list(range(output)))
        replica = self.placer.place(prompt, ROLES, avoid).order[0]
        is_handed_over = self.placer.is_handed_over(request_id)
        self.placer.release(request_id)
        assert not self.placer.is_handed_over(request_id)
        return ROLES[replica], is_handed_over


def test_long_prompts_are_computed_apart_and_short_ones_are_not() -> None:
    apart = Apart()
    assert apart.place(100) == ("decode", False)
    assert apart.place(400) == ("prefill", True)


def test_the_cache_of_a_generating_replica_does_not_count() -> None:
    apart = Apart()
    apart.placer.replace("d1", chain_of(list(range(400)))[:80])
    assert apart.place(400) == ("decode", False)
    apart.placer.replace("d1", [])
    apart.placer.replace("p1", chain_of(list(range(400)))[:80])
    assert apart.place(400) == ("prefill", True)


def test_a_stream_that_has_begun_goes_to_a_replica_that_generates() -> None:
    assert Apart().place(400, output=1) == ("decode", False)


def test_without_a_number_the_measured_rate_decides() -> None:
    assert Apart("auto").place(240) == ("decode", False)  # a quarter of a second is 250 tokens
    assert Apart("auto").place(260) == ("prefill", True)
    apart = Apart("auto")
    for name in ROLES:
        apart.fleet.record_load(name, structs.replace(IDLE, prefill_rate=100.0))
    assert apart.place(60) == ("prefill", True)


@pytest.mark.parametrize("state", ["gone", "draining", "full", "lost", "avoided"])
def test_while_one_side_cannot_serve_the_other_does_both(state: str) -> None:
    def missing(side: str) -> Apart:
        apart = Apart()
        names = [name for name, role in ROLES.items() if role == side]
        for name in names:
            if state in ("draining", "full"):
                load = structs.replace(IDLE, is_draining=state == "draining", is_full=state == "full")
                apart.fleet.record_load(name, load)
            elif state == "lost":
                apart.fleet.mark_lost(name)
        if state == "gone":
            known = apart.fleet.addresses()
            apart.fleet.update({name: address for name, address in known.items() if name not in names})
        return apart

    def avoided(side: str) -> tuple[str, ...]:
        return tuple(name for name, role in ROLES.items() if role == side) if state == "avoided" else ()

    assert missing("prefill").place(400, avoided("prefill")) == ("decode", False)
    if state != "gone":  # then they are no candidates, which the client says
        assert missing("decode").place(400, avoided("decode")) == ("prefill", False)
        assert missing("decode").place(40, avoided("decode")) == ("prefill", False)


def test_without_roles_nothing_is_handed_over() -> None:
    apart = Apart()
    placer = Placer(apart.fleet, PlacerSettings("cost", BLOCK), random.Random(1))
    apart.placer = placer
    assert {apart.place(400)[1] for _ in range(8)} == {False}
