"""Evicted prefixes in host memory: what is copied out, what a prompt gets back, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import CachedPrefix, KVCacheManager, Namespace
from cache.node import Node
from cache.prefix_hash import block_hashes, prefix_root
from cache.tiers.page_keys import PageKeys
from engine.host_tier.host_kv import HostKV
from engine.host_tier.host_pool import HostAccount, HostMemory, HostTraffic
from tests.engine.scenarios.conftest import Make
from tests.engine.scenarios.conftest import engine as engine
from tests.engine.support.evicted_prompts import A, B, C, D, ask, evict, made
from tests.engine.support.script import Script
from tests.support.examples import examples


def test_a_prompt_used_twice_comes_back_from_the_host(engine: Make) -> None:
    script = made(engine)
    ask(script, A)
    ask(script, A)
    evict(script)
    name = ask(script, A)
    assert script.events[name][-1].num_cached == 40
    assert script.num_computed(name) == 2, "the prompt's last token, and one of the answer's"
    assert script.cache.stats.host_hit_tokens == 40
    assert script.cache.stats.hit_tokens == 40, "of the second"
    assert script.host.account().cached == 10


def test_copied_tokens_are_counted(engine: Make) -> None:
    script = made(engine)
    for _ in range(2):
        ask(script, A)
    evict(script)
    assert (
        script.host.traffic[:2] == (10, 0) == (len([0 for plan in script.runner.plans for _ in plan.swap_out]), 0)
    )
    ask(script, A)
    assert script.host.traffic[:2] == (10, 10)
    assert script.scheduler.load(script.now).host_traffic == script.host.traffic


def test_a_copy_saves_the_time_of_computing_less_its_own() -> None:
    """Ten pages of half a second each, beside forty tokens at two a second."""
    script = Script(num_pages=24, host_pages=40)
    host = HostKV(HostMemory(40, 0.5, 100), 4, "swap", 1)
    request = script.requests[script.arrive(A)]
    keys = PageKeys(request.namespace, request.tokens, 4)
    for page in range(10):
        host.pool.tier.add(keys[page], page)
    host.pool.tier.settle(range(10))
    assert host.start(request, CachedPrefix(0, 0), 2.0) == 40
    assert host.traffic == HostTraffic(0, 0, 100, 40 / 2.0 - 10 * 0.5)


def test_a_prompt_used_once_is_not_copied_unless_all_are(engine: Make) -> None:
    for min_uses, is_kept in ((2, False), (1, True)):
        script = made(engine, host_min_uses=min_uses)
        ask(script, A)
        evict(script)
        assert bool(script.host.account().cached) == is_kept
        assert script.num_computed(ask(script, A)) == (2 if is_kept else 42)


def test_pages_that_the_device_still_has_are_not_copied(engine: Make) -> None:
    script = made(engine, num_pages=28)
    ask(script, A)
    ask(script, A)
    evict(script, B, C)
    held = script.cache.peek(Namespace("m"), A)
    assert 0 < held < 40
    ask(script, A)
    assert sum(len(plan.swap_in) for plan in script.runner.plans) == 10 - held // 4


def test_pages_that_are_evicted_again_are_on_the_host_already(engine: Make) -> None:
    script = made(engine)
    for _ in range(3):
        ask(script, A)
        ask(script, A)
        evict(script)
    pages = {host for plan in script.runner.plans for _, host in plan.swap_out}
    assert sum(len(plan.swap_out) for plan in script.runner.plans) == len(pages)


def test_tenants_do_not_find_each_others(engine: Make) -> None:
    script = made(engine, host_pages=200, host_min_uses=1)
    ask(script, A, salt="a")
    evict(script)
    assert script.num_computed(ask(script, A, salt="b")) == 42
    evict(script)
    assert script.num_computed(ask(script, A, salt="a")) == 2


def test_the_prefixes_used_least_recently_go_first(engine: Make) -> None:
    script = made(engine, host_pages=20, host_min_uses=1)
    for prompt in (A, B, C, A, range(300, 341), range(400, 441)):
        ask(script, prompt)
    assert script.num_computed(ask(script, A)) == 2
    assert script.num_computed(ask(script, B)) > 2
    assert script.scheduler.load(script.now).num_host_evicted > 0


def test_a_preempted_request_takes_the_pages_of_prefixes(engine: Make) -> None:
    script = made(engine, host_pages=12, host_min_uses=1)
    ask(script, A)
    evict(script)
    assert script.host.account() == HostAccount(0, 0, 12)
    b = script.arrive(range(500, 532), max_tokens=30)
    c = script.arrive(range(600, 632), max_tokens=30)
    script.run(until=lambda: script.requests[b].num_preemptions + script.requests[c].num_preemptions > 0)
    assert script.host.account().held > 0
    script.run()


def test_pages_that_a_failed_step_should_have_copied_are_not_found(engine: Make) -> None:
    script = made(engine, host_min_uses=1)
    ask(script, A)
    script.runner.fail_if = lambda plan: bool(plan.swap_out)
    evict(script)
    script.runner.fail_if = lambda plan: False
    evict(script)
    before = script.num_computed(ask(script, A))
    assert before > 2, "the pages whose copies were never made"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_on_the_way_back(engine: Make, steps: int) -> None:
    script = made(engine, host_min_uses=1, limits={"max_running": 2, "max_step_tokens": 4})
    ask(script, A)
    evict(script)
    name = script.arrive([*A, *range(700, 720)], max_tokens=4)
    for _ in range(steps):
        script.step()
    script.abort(name)
    script.run()
    assert script.num_computed(ask(script, A)) <= 3


def test_a_copy_that_takes_longer_than_computing_is_not_made() -> None:
    """Ten pages of a second each, beside forty tokens at five a second."""
    script = Script(num_pages=24, host_pages=40)
    host = HostKV(HostMemory(40, 1.0), 4, "swap", 1)
    request = script.requests[script.arrive(A)]
    keys = PageKeys(request.namespace, request.tokens, 4)
    for page in range(10):
        host.pool.tier.add(keys[page], page)
    host.pool.tier.settle(range(10))
    assert [host.reach(request, CachedPrefix(0, 0), rate) for rate in (0.0, 3.0, 5.0)] == [40, 40, 0]


def test_keys_tell_namespaces_and_prefixes_apart_and_may_begin_anywhere() -> None:
    tokens = list(range(40))
    keys = PageKeys(Namespace("m"), tokens, 4)
    assert [keys[page] for page in range(10)] == [keys[page] for page in range(10)]
    assert PageKeys(Namespace("m"), tokens, 4, first=6)[8] == keys[8]
    others = [
        PageKeys(Namespace("m", salt="s"), tokens, 4)[1],
        PageKeys(Namespace("mm"), tokens, 4)[1],
        PageKeys(Namespace("m"), [9, *tokens[1:]], 4)[1],
        keys[0],
    ]
    assert len({keys[1], *others}) == 5


def test_emptying_the_cache_empties_the_host(engine: Make) -> None:
    """What a step in flight copies there is not found afterwards either."""
    script = made(engine, host_min_uses=1)
    for prompt in (A, B, C):
        ask(script, prompt)
    script.arrive(D, max_tokens=2)
    script.run(until=lambda: any(plan.swap_out for plan in script.runner.plans[-1:]))
    assert script.scheduler.reset_cache() > 0
    script.run()
    assert script.num_computed(ask(script, A)) == 42
    script.scheduler.reset_cache()
    assert script.host.account() == HostAccount(40, 0, 0)


def told(script: Script) -> set[int]:
    """Return the blocks that a router knows of."""
    assert script.cache.prefix_log is not None
    script.cache.prefix_log.drain()
    return set(script.cache.prefix_log.snapshot())


@pytest.mark.parametrize("block_tokens", [1, 2, 4])
def test_routers_know_the_prefixes_in_host_memory_until_they_are_given_up(engine: Make, block_tokens: int) -> None:
    script = made(engine, host_min_uses=1, host_pages=11, block_tokens=block_tokens)
    ask(script, A)
    chain = block_hashes(A, prefix_root(Namespace("m")), block_tokens)
    evict(script)
    assert script.cache.peek(Namespace("m"), A) == 0
    assert not told(script).isdisjoint(chain[:1])
    for start in range(400, 900, 50):
        ask(script, range(start, start + 41))
    assert told(script).isdisjoint(chain)
    ask(script, A)
    assert told(script) >= set(chain)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=10),
    st.sampled_from([4, 5, 16]),
)
def test_every_whole_computed_page_is_found_after_its_eviction(
    prompts: list[tuple[int, int, int]], page_size: int
) -> None:
    """Prompts part and end within pages, so that tree nodes share these."""
    script = Script(
        num_pages=30, page_size=page_size, host_pages=600, host_min_uses=1, block_tokens=page_size,
        limits={"max_running": 1},
    )  # fmt: skip
    asked = []
    for family, common, own in prompts:
        asked.append([*range(1, common + 2), *range(100 * family + 200, 100 * family + 200 + own)])
        ask(script, asked[-1])
    for start in range(1000, 8000, 1000):
        ask(script, range(start, start + 9 * page_size))
    for prompt in asked:
        assert script.cache.peek(Namespace("m"), prompt) == 0
        keys, num_whole = PageKeys(Namespace("m"), prompt, page_size), len(prompt) // page_size
        assert script.host.pool.tier.count(keys, 0, num_whole) == num_whole
        assert told(script) >= set(block_hashes(prompt, prefix_root(Namespace("m")), page_size))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "step", "step", "abort", "fail", "hold", "break"]),
        st.integers(0, 4),
        st.integers(1, 45),
        st.integers(1, 12),
    ),
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    ACTIONS,
    st.sampled_from([(16, 4), (60, 1), (10, 16)]),
    st.integers(0, 30),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_by_itself(
    actions: list[tuple[str, int, int, int]],
    shape: tuple[int, int],
    host_pages: int,
    overlap: bool,
    is_pressed: bool,
    has_lower_tier: bool,
) -> None:
    """The runner compares each page that a request reads with the request's own tokens."""
    num_pages, page_size = shape
    limits = {"max_running": 4 if is_pressed else 1, "max_step_tokens": 16}
    script = Script(
        num_pages=num_pages,
        page_size=page_size,
        host_pages=host_pages,
        host_min_uses=1,
        overlap=overlap,
        limits=limits,
        block_tokens=page_size,
        has_lower_tier=has_lower_tier,
    )
    for action, family, length, number in actions:
        if action == "ask":
            script.arrive([family * 50 + 1, *range(length)], max_tokens=number, salt=str(family % 2))
        elif action == "abort" and script.requests:
            script.abort(list(script.requests)[number % len(script.requests)])
        elif action == "fail":
            script.runner.fail_next = True
        elif action == "hold":
            script.tier.is_held = not script.tier.is_held
        elif action == "break":
            script.tier.broken.update(list(script.tier.pages)[number::3])
        elif script.loop.has_work:
            script.step()
    script.runner.fail_next = script.tier.is_held = False
    script.run()
    for name in script.requests:
        tokens, _ = script.alone(name)
        assert script.tokens(name) == tokens[: len(script.tokens(name))]
        assert script.reason(name) in ("abort", "error") or script.tokens(name) == tokens
    assert script.nothing_held()
    held = {block for node in nodes(script.cache) if node.tokens for block in node.blocks}
    tier = script.host.pool.tier
    assert told(script) == held | {block for page in tier.wanted for block in page.blocks}
    assert len(tier.wanted) == tier.num_idle == tier.num_pages == script.host.account().cached
    script.scheduler.reset_cache()
    assert told(script) == set()


def nodes(cache: KVCacheManager) -> list[Node]:
    """Return all nodes of the tree."""
    found = list(cache.tree.roots.values())
    for node in found:
        found += node.children.values()
    return found
