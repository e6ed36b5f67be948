"""Prefixes from other engines: what is fetched, what a prompt waits for, and that nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from cache.tiers.page_keys import PageKeys
from engine.host_tier.host_pool import HostAccount
from engine.host_tier.peers import PeerTotals
from engine.values.plan import StepPlan
from engine.values.request import KVSource
from tests.engine.scenarios.conftest import Make
from tests.engine.scenarios.conftest import engine as engine
from tests.engine.support.evicted_prompts import A, B, C, ask, evict, made
from tests.engine.support.script import Script
from tests.engine.support.scripted_peers import ScriptedPeers
from tests.support.examples import examples

WHOLE = KVSource("a", 41)
"""An engine named "a" that is said to have 41 tokens: ten pages of four."""


def pair(engine: Make, **options: Any) -> tuple[Script, Script, ScriptedPeers]:
    """A source, which has A, and a receiver with 24 device and 22 host pages. A token takes 0.25 s."""
    source = engine(num_pages=24, host_pages=22, host_min_uses=1)
    ask(source, A)
    receiver = made(engine, **{"host_pages": 22, "host_min_uses": 1, **options})
    peers = ScriptedPeers(receiver, a=source)
    receiver.host.connect(peers)

    def take_time(plan: StepPlan) -> None:
        receiver.now += 0.25 * sum(chunk.num_tokens for chunk in plan.chunks)

    receiver.runner.on_run = take_time
    return source, receiver, peers


def nothing_lent(source: Script) -> bool:
    return source.scheduler.account().lent == source.host.account().lent == 0


def test_a_prompt_continues_a_prefix_that_another_engine_has_computed(engine: Make) -> None:
    source, receiver, peers = pair(engine)
    name = ask(receiver, A, source=WHOLE)
    assert receiver.events[name][-1].num_cached == 40
    assert receiver.num_computed(name) == 2, "the prompt's last token, and one of the answer's"
    assert peers.asked == [("a", 0, 10)] and nothing_lent(source)
    load = receiver.scheduler.load(receiver.now)
    assert load.peers == PeerTotals(10, 0, 1, 0) and load.cache.host_hit_tokens == 40
    assert source.cache.stats.query_tokens == 41, "a loan is no request"


def test_only_missing_pages_are_fetched(engine: Make) -> None:
    """The device has the first three pages, and host memory all but two in the midst and the last."""
    _, receiver, peers = pair(engine)
    ask(receiver, A, source=WHOLE)
    receiver.cache.reset()
    ask(receiver, A[:13])
    keys, pool = PageKeys(Namespace("m"), A, 4), receiver.host.pool
    pinned = [page for first, stop in ((0, 5), (7, 9)) for page in pool.tier.pin(keys, first, stop)]
    while reclaimed := pool.tier.reclaim():
        pool.free(reclaimed)
    pool.tier.unpin(pinned)
    assert receiver.cache.peek(Namespace("m"), A) == 13
    assert receiver.num_computed(ask(receiver, A, source=WHOLE)) == 2
    assert peers.asked == [("a", 0, 10), ("a", 5, 2), ("a", 9, 1)]


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (3, 0), (11, 2), (40, 10), (10**9, 10), (-5, 0)])
def test_no_more_is_asked_for_than_the_prompt_has_and_the_source_reports(
    engine: Make, num_tokens: int, num_pages: int
) -> None:
    _, receiver, peers = pair(engine)
    name = ask(receiver, A, source=KVSource("a", num_tokens))
    assert sum(count for _, _, count in peers.asked) == num_pages
    assert receiver.num_computed(name) == 42 - 4 * num_pages


def test_a_source_that_has_less_than_reported_gives_its_part(engine: Make) -> None:
    source, receiver, peers = pair(engine)
    name = ask(receiver, [*A[:22], *range(800, 820)], source=WHOLE)
    assert receiver.num_computed(name) == 42 + 1 - 20
    assert peers.totals() == PeerTotals(5, 5, 1, 1) and nothing_lent(source)


def test_a_source_that_has_evicted_it_costs_nothing(engine: Make) -> None:
    source, receiver, _ = pair(engine)
    source.scheduler.reset_cache()
    name = ask(receiver, A, source=WHOLE)
    assert receiver.num_computed(name) == 42 and nothing_lent(source)


def test_pages_in_the_host_memory_of_a_source_come_too(engine: Make) -> None:
    source, receiver, peers = pair(engine)
    evict(source, B, C)
    ask(source, range(1, 20))
    name = receiver.arrive(A, max_tokens=2, source=WHOLE)
    peers.is_held = True
    receiver.step()
    ((_, lent),) = peers.loans
    assert lent.device and lent.host
    peers.is_held = False
    receiver.run()
    assert receiver.num_computed(name) == 2 and nothing_lent(source)


@pytest.mark.parametrize("most", [0, 1, 7])
def test_a_source_that_dies_midway_is_used_to_the_page(engine: Make, most: int) -> None:
    source, receiver, peers = pair(engine)
    peers.most = most
    name = ask(receiver, A, source=WHOLE)
    assert receiver.num_computed(name) == 42 - 4 * most
    assert peers.totals() == PeerTotals(most, 10 - most, 1, 1) and nothing_lent(source)


def test_an_unknown_source_stops_no_request(engine: Make) -> None:
    _, receiver, _ = pair(engine)
    assert receiver.num_computed(ask(receiver, A, source=KVSource("gone", 41))) == 42


def test_a_prompt_waits_no_longer_than_computing_takes(engine: Make) -> None:
    """What comes later is found by the next."""
    _, receiver, peers = pair(engine)
    ask(receiver, B)
    peers.at_once = 1
    name = receiver.arrive(A, max_tokens=2, source=WHOLE)
    receiver.step()
    peers.is_held = True
    receiver.run(most=100)
    assert 2 < receiver.num_computed(name) <= 42
    peers.is_held, peers.at_once = False, 10
    receiver.step()
    assert receiver.host.account().arriving == 0


def test_pages_that_are_computed_sooner_are_not_fetched(engine: Make) -> None:
    _, receiver, peers = pair(engine)
    ask(receiver, B)
    peers.page_seconds = 100.0
    assert receiver.num_computed(ask(receiver, A, source=WHOLE)) == 42 and not peers.asked


def test_others_run_while_a_prompt_waits(engine: Make) -> None:
    _, receiver, peers = pair(engine)
    peers.is_held = True
    waiting = receiver.arrive(A, max_tokens=2, source=WHOLE)
    other = receiver.arrive(range(700, 707), max_tokens=2)
    receiver.run(until=lambda: receiver.reason(other) is not None)
    assert not receiver.chunks(waiting) and receiver.host.account() == HostAccount(12, 0, 0, 10)
    assert receiver.scheduler.load(receiver.now).waiting_prefill_tokens == 1, "what comes need not be computed"
    peers.is_held = False
    receiver.run()
    assert receiver.num_computed(waiting) == 2


@pytest.mark.parametrize("second", [WHOLE, None])
def test_two_prompts_that_begin_alike_fetch_it_once(engine: Make, second: KVSource | None) -> None:
    _, receiver, peers = pair(engine)
    peers.is_held = True
    names = [
        receiver.arrive([*A, token], max_tokens=2, source=source) for token, source in ((1, WHOLE), (2, second))
    ]
    receiver.step()
    peers.is_held = False
    receiver.run()
    assert peers.asked == [("a", 0, 10)]
    assert [receiver.events[name][-1].num_cached for name in names] == [40, 40]


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_abort_while_pages_arrive_loses_none(engine: Make, at_once: int) -> None:
    source, receiver, peers = pair(engine)
    peers.at_once = at_once
    name = receiver.arrive(A, max_tokens=2, source=WHOLE)
    receiver.step()
    receiver.abort(name)
    receiver.run()
    while receiver.host.account().arriving:
        receiver.scheduler.take_in_transfers()
    assert nothing_lent(source) and receiver.num_computed(ask(receiver, A)) == 2


def test_pages_that_arrive_after_the_cache_was_emptied_are_not_found(engine: Make) -> None:
    source, receiver, peers = pair(engine)
    peers.is_held = True
    name = receiver.arrive(A, max_tokens=2, source=WHOLE)
    receiver.step()
    receiver.scheduler.reset_cache()
    peers.is_held = False
    receiver.run()
    assert receiver.num_computed(name) == 42 and nothing_lent(source)
    assert receiver.host.account().arriving == 0


def test_only_pages_that_fit_into_host_memory_are_fetched(engine: Make) -> None:
    """The pages of a preempted request, and those that the prompt has there itself, are not given up for it."""
    for host_pages in (0, 1, 4):
        _, receiver, peers = pair(engine, host_pages=host_pages)
        name = ask(receiver, A, source=WHOLE)
        assert receiver.num_computed(name) == 42 - 4 * host_pages
        assert peers.totals().loaded == host_pages
    _, receiver, peers = pair(engine, host_pages=6)
    ask(receiver, A[:17], source=KVSource("a", 16))
    receiver.cache.reset()
    assert receiver.num_computed(ask(receiver, A, source=WHOLE)) == 42 - 24, "four pages, and two that are fetched"


def test_pages_in_files_are_not_fetched_unless_the_files_are_slow(engine: Make) -> None:
    for page_seconds, fetched in ((0.0, [(4, 6)]), (100.0, [(0, 10)])):
        _, receiver, peers = pair(engine, has_lower_tier=True)
        ask(receiver, A[:17], source=KVSource("a", 16))
        while len(receiver.tier.pages) < 4:
            receiver.scheduler.take_in_transfers()
        receiver.cache.reset()
        receiver.host.pool.free(receiver.host.pool.tier.clear())
        peers.asked.clear()
        receiver.tier.page_seconds = page_seconds
        name = ask(receiver, A, source=WHOLE)
        assert [asked[1:] for asked in peers.asked] == fetched
        assert receiver.num_computed(name) == 2


def test_fetched_pages_are_also_written_to_files(engine: Make) -> None:
    _, receiver, _ = pair(engine, has_lower_tier=True)
    ask(receiver, A, source=WHOLE)
    receiver.scheduler.take_in_transfers()
    assert len(receiver.tier.pages) == 10


def test_salts_fetch_their_own(engine: Make) -> None:
    source, receiver, _ = pair(engine)
    assert receiver.num_computed(ask(receiver, A, source=WHOLE, salt="s")) == 42
    ask(source, A, salt="s")
    receiver.scheduler.reset_cache()
    assert receiver.num_computed(ask(receiver, A, source=WHOLE, salt="s")) == 2


def test_a_preempted_request_and_its_fetched_pages(engine: Make) -> None:
    """Two requests for which there is no room together continue with their own tokens."""
    source, receiver, _ = pair(engine, limits={"max_running": 3})
    names = [receiver.arrive([*A, n], max_tokens=24, source=WHOLE) for n in range(3)]
    receiver.run()
    assert sum(receiver.requests[name].num_preemptions for name in names) and nothing_lent(source)


KINDS = (
    *("ask", "ask", "fetch", "fetch", "fetch", "step", "step", "step", "lend", "return"),
    *("abort", "fail", "hold", "dies", "slow", "empty"),
)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(1, 45), st.integers(1, 12)), max_size=60
)


@settings(max_examples=examples(150), deadline=None)
@given(
    ACTIONS,
    st.sampled_from([(16, 4), (60, 1), (10, 16)]),
    st.sampled_from([30, 12, 3, 0]),
    st.booleans(),
    st.booleans(),
)
def test_two_engines_that_fetch_from_each_other_lose_nothing(
    actions: list[tuple[str, int, int, int]],
    shape: tuple[int, int],
    host_pages: int,
    overlap: bool,
    has_lower_tier: bool,
) -> None:
    """Pages add up after every step, answers are those of engines of their own, and in the end nothing is held."""
    num_pages, page_size = shape
    scripts = [
        Script(
            num_pages=num_pages,
            page_size=page_size,
            host_pages=host_pages,
            host_min_uses=1,
            overlap=overlap,
            limits={"max_running": 3, "max_step_tokens": 16},
            has_lower_tier=has_lower_tier,
        )
        for _ in range(2)
    ]
    peers = [ScriptedPeers(scripts[0], other=scripts[1]), ScriptedPeers(scripts[1], other=scripts[0])]
    for script, fetching in zip(scripts, peers, strict=True):
        script.host.connect(fetching)
    for family in range(4):
        ask(scripts[family % 2], [family * 50 + 1, *range(45)], salt=str(family % 2))
    lent: list[tuple[Script, int]] = []
    for action, family, length, number in actions:
        script, fetching = scripts[number % 2], peers[number % 2]
        prompt = [family * 50 + 1, *range(length)]
        if action in ("ask", "fetch"):
            source = (
                KVSource("other" if number < 12 else "gone", length + number - 6) if action == "fetch" else None
            )
            script.arrive(prompt, max_tokens=number, salt=str(family % 2), source=source)
        elif action == "lend":
            namespace = next((r.namespace for r in script.requests.values()), None)
            if namespace is not None:
                lent.append((script, script.scheduler.lender.lend(namespace, prompt, number % 4).number))
        elif action == "return" and lent:
            owner, loan = lent.pop(number % len(lent))
            owner.scheduler.lender.give_back(loan)
        elif action == "abort" and script.requests:
            script.abort(list(script.requests)[length % len(script.requests)])
        elif action == "fail":
            script.runner.fail_next = True
        elif action == "hold":
            fetching.is_held = not fetching.is_held
        elif action == "dies":
            fetching.most = number - 1
        elif action == "slow":
            fetching.at_once = 1 if fetching.at_once > 1 else 10**6
        elif action == "empty":
            script.scheduler.reset_cache()
        else:
            for _ in range(length):
                if script.loop.has_work:
                    script.step()
    for owner, loan in lent:
        owner.scheduler.lender.give_back(loan)
    for script, fetching in zip(scripts, peers, strict=True):
        script.runner.fail_next = fetching.is_held = False
    for script in scripts * 2:
        script.run()
        while script.host.account().arriving:
            script.scheduler.take_in_transfers()
    for script in scripts:
        for name in script.requests:
            tokens, _ = script.alone(name)
            assert script.tokens(name) == tokens[: len(script.tokens(name))]
            assert script.reason(name) in ("abort", "error") or script.tokens(name) == tokens
        assert script.nothing_held() and nothing_lent(script)
        script.scheduler.take_in_transfers()
        tier = script.host.pool.tier
        assert len(tier.wanted) == tier.num_idle == script.host.account().cached == tier.num_pages
        script.loop.stop()
