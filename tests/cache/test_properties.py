"""Random histories of the cache against the brute-force model: 12,000 operations, all checked after each."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import KVCacheManager
from tests.cache.support.world import NAMESPACES, Client, World

OPERATIONS = 400
HISTORIES = 30


class Driver:
    """Draws operations. Few distinct tokens and many old prompts make prefixes meet, split and diverge often."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.seen: list[list[int]] = [[]]
        self.longest = min(world.cache.page_size * 5 + 3, 60)
        self.operations = [
            (self.arrive, 20),
            (self.compute, 40),
            (self.insert, 15),
            (self.generate, 15),
            (self.finish, 10),
            (self.preempt, 4),
            (self.overtake, 4),
            (self.fork, 6),
            (self.evict, 3),
            (self.reset, 1),
            (self.reset_alone, 1),
        ]

    def step(self) -> None:
        operation = self.draw.choices(*zip(*self.operations, strict=True))[0]
        operation()

    def client(self) -> Client | None:
        return self.draw.choice(self.world.clients) if self.world.clients else None

    def more_tokens(self) -> list[int]:
        return [self.draw.randrange(2) for _ in range(self.draw.randint(1, self.longest // 2))]

    def arrive(self) -> None:
        old = self.draw.choice([*self.seen, *(client.tokens for client in self.world.clients)])
        tokens = old[: self.draw.randint(0, len(old))] if self.draw.random() < 0.5 else list(old)
        if not tokens or self.draw.random() < 0.6:
            tokens = tokens + self.more_tokens()
        del tokens[self.longest :]
        namespace = self.draw.choices(NAMESPACES, (6, 1, 1))[0]
        self.world.admit(namespace, tokens, drop_partial=self.draw.random() < 0.1)

    def compute(self) -> None:
        if client := self.client():
            whole = len(client.tokens) if self.draw.random() < 0.4 else self.draw.randint(1, 7)
            self.world.compute(client, whole)

    def insert(self) -> None:
        if client := self.client():
            shorter = self.draw.choice((0, 0, 0, 1, 3))
            self.world.insert(client, max(client.computed - shorter, 0))

    def generate(self) -> None:
        client = self.client()
        if client and client.computed == len(client.tokens) < self.longest:
            client.tokens.extend(self.more_tokens()[:3])

    def finish(self) -> None:
        if client := self.client():
            self.seen = [*self.seen[-15:], client.tokens]
            kept = self.draw.choice((client.computed, client.computed, self.draw.randint(0, client.computed), 0))
            self.world.finish(client, kept)

    def preempt(self) -> None:
        if client := self.client():
            self.world.finish(client, client.computed)
            self.world.admit(client.namespace, client.tokens)

    def overtake(self) -> None:
        """One client stops inside a page, another goes on from there first: both have written that page."""
        if client := self.client():
            self.world.compute(client, self.draw.randint(1, 7))
            self.world.insert(client, client.computed)
            tokens = (client.tokens + self.more_tokens())[: self.longest]
            if other := self.world.admit(client.namespace, tokens):
                self.world.compute(other, len(tokens))
                self.world.insert(other, other.computed)

    def fork(self) -> None:
        """Some of its tokens, or all; the fork goes on as it likes, as the first does."""
        if (client := self.client()) and len(self.world.clients) < 40:
            shorter = self.draw.choice((0, 0, 0, 1, 3))
            fork = self.world.fork(client, max(client.computed - shorter, 0))
            fork.tokens.extend(self.more_tokens()[: max(self.longest - len(fork.tokens), 1)])

    def evict(self) -> None:
        evictable = self.world.cache.account().evictable
        wanted = self.draw.randint(0, 6)
        num_free = self.world.cache.account().free
        evicted = self.world.cache.evict(wanted)
        assert min(wanted, evictable) <= evicted <= wanted + (wanted > 0)
        assert self.world.cache.account().free == num_free + evicted
        self.world.forget_evicted()

    def reset(self) -> None:
        evictable = self.world.cache.account().evictable
        assert self.world.cache.reset() >= evictable
        assert self.world.cache.account().evictable == 0
        self.world.forget_evicted()

    def reset_alone(self) -> None:
        """One client, the others having ended, can get all pages but those of its table."""
        if client := self.client():
            self.world.finish_copy(client)
            for other in [each for each in self.world.clients if each is not client]:
                self.world.finish(other, other.computed)
            self.reset()
            account, source = self.world.cache.account(), client.lease.source
            assert account.locked + account.private == len(client.lease.pages) or source is not None


def run_history(
    seed: int, page_size: int, num_pages: int, eviction: str, num_operations: int, *, prefix_cache: bool = True
) -> World:
    world = World(KVCacheManager(num_pages, page_size, eviction=eviction, prefix_cache=prefix_cache))
    driver = Driver(world, seed)
    for _ in range(num_operations):
        driver.step()
        world.check()
        world.check_locks()
    while world.clients:
        driver.finish()
        world.check()
    assert world.cache.account() == (*world.cache.account()[:2], 0, 0)
    world.cache.reset()
    assert world.cache.account() == (num_pages, 0, 0, 0)
    assert not world.cache._tree._roots
    return world


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 2, 3, 4, 4, 5, 8, 16, 256)),
    num_pages=st.integers(6, 60),
    eviction=st.sampled_from(("lru", "lfu", "priority")),
    prefix_cache=st.sampled_from((True, True, False)),
)
def test_any_history_reads_its_own_kv_and_loses_no_page(
    seed: int, page_size: int, num_pages: int, eviction: str, prefix_cache: bool
) -> None:
    run_history(seed, page_size, num_pages, eviction, OPERATIONS, prefix_cache=prefix_cache)
