"""Prefixes below host memory: what is written there, what a prompt waits for, and for how long."""

from __future__ import annotations

import pytest

from cache import Namespace
from cache.news.tier import Tier
from cache.prefix_hash import block_hashes, prefix_root
from engine.host_tier.host_pool import HostAccount
from engine.values.plan import StepPlan
from tests.engine.scenarios.conftest import Make
from tests.engine.scenarios.conftest import engine as engine
from tests.engine.support.evicted_prompts import A, B, C, D, ask, evict, made
from tests.engine.support.script import Script

E, F, G = (range(start, start + 41) for start in (400, 500, 600))


def with_files(engine: Make, **options: object) -> Script:
    """An engine whose host pages hold two prompts, and whose device holds two others. A token takes 0.25 s."""
    script = made(engine, **{"host_pages": 22, "host_min_uses": 1, "has_lower_tier": True, **options})

    def take_time(plan: StepPlan) -> None:
        script.now += 0.25 * sum(chunk.num_tokens for chunk in plan.chunks)

    script.runner.on_run = take_time
    return script


def forget(script: Script) -> None:
    """Have device and host give their pages to others."""
    evict(script, B, C, D, E, F, G)
    assert script.host.account().total == 22


def test_pages_that_the_host_gives_up_come_back_from_the_tier_below(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    assert script.scheduler.load(script.now).num_host_evicted > 0
    name = ask(script, A)
    assert len(script.tier.loaded) == 10
    assert script.events[name][-1].num_cached == 40
    assert script.num_computed(name) == 2


def test_routers_know_the_prefixes_that_came_from_the_tier_below(engine: Make) -> None:
    script = with_files(engine, block_tokens=4)
    chain = block_hashes(A, prefix_root(Namespace("m")), 4)
    log = script.cache.prefix_log
    assert log is not None
    ask(script, A)
    forget(script)
    log.drain()
    assert set(log.snapshot()).isdisjoint(chain)
    script.tier.is_held = True
    script.arrive(A, max_tokens=2)
    script.step()
    script.tier.is_held = False
    log.drain()
    log.drain_moves()
    assert set(log.snapshot()) >= set(chain) and set(log.tiers(chain)) == {Tier.HOST}
    script.run()
    log.drain()
    log.drain_moves()
    assert set(log.tiers(chain)) == {Tier.DEVICE}
    evict(script, B, C)
    log.drain()
    log.drain_moves()
    assert set(log.snapshot()) >= set(chain) and Tier.HOST in set(log.tiers(chain))


def test_an_engine_finds_the_pages_that_another_has_written(engine: Make) -> None:
    script, other = with_files(engine), with_files(engine)
    ask(script, A)
    forget(script)
    other.tier.pages = script.tier.pages
    assert other.num_computed(ask(other, A)) == 2


def test_a_prompt_waits_and_others_do_not(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.tier.is_held = True
    waiting, other = script.arrive(A, max_tokens=2), script.arrive(range(700, 707), max_tokens=2)
    script.run(until=lambda: script.reason(other) is not None)
    assert not script.chunks(waiting) and script.host.account().total == 22
    script.tier.is_held = False
    script.run()
    assert script.num_computed(waiting) == 2


def test_two_prompts_that_begin_alike_load_it_once(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.tier.is_held = True
    names = [script.arrive([*A, token], max_tokens=2) for token in (1, 2)]
    script.step()
    script.tier.is_held = False
    script.run()
    assert len(script.tier.loaded) == len(set(script.tier.loaded)) == 10
    assert [script.events[name][-1].num_cached for name in names] == [40, 40]


def test_a_prompt_waits_no_longer_than_computing_takes(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.tier.is_held = True
    name = script.arrive(A, max_tokens=2)
    script.run(most=100)
    assert script.num_computed(name) == 42
    script.tier.is_held = False
    script.step()


def test_pages_that_are_computed_sooner_are_not_loaded(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.tier.page_seconds = 100.0
    assert script.num_computed(ask(script, A)) == 42 and not script.tier.loaded


def test_tokens_from_the_first_unreadable_page_on_are_computed(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    before = list(script.tier.pages)
    wanted = ask(script, [*A, 1])
    lost = script.tier.loaded[6]
    assert lost in before
    forget(script)
    script.tier.broken.add(lost)
    assert script.num_computed(ask(script, A)) == 2 + 16
    assert script.num_computed(wanted) > 0


def test_a_page_stays_while_it_is_written(engine: Make) -> None:
    """Host memory is full of pages that nobody has written yet: nothing takes their place."""
    script = with_files(engine)
    script.tier.is_held = True
    for prompt in (A, B, C, D, E):
        ask(script, prompt)
    assert script.host.account() == HostAccount(0, 0, 22)
    assert script.host.pool.available == 0
    script.tier.is_held = False
    evict(script, F)
    assert len(script.tier.pages) >= 22


@pytest.mark.parametrize("held", [False, True])
def test_an_abort_while_pages_arrive(engine: Make, held: bool) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.tier.is_held = True
    name = script.arrive(A, max_tokens=2)
    script.step()
    script.abort(name)
    script.tier.is_held = held
    script.run()
    script.tier.is_held = False
    assert script.num_computed(ask(script, A)) == 2


def test_emptying_the_cache_empties_the_tier_below(engine: Make) -> None:
    script = with_files(engine)
    ask(script, A)
    forget(script)
    script.scheduler.reset_cache()
    assert script.num_computed(ask(script, A)) == 42
