"""Draws random operations on a checked cache, so that prefixes meet, split and diverge in every way."""

from __future__ import annotations

import random

from tests.cache.support.checked_cache import NAMESPACES, CheckedCache, Client


class RandomOperations:
    """Draws operations. Few distinct tokens and many old prompts make prefixes meet, split and diverge often."""

    def __init__(self, checked: CheckedCache, seed: int) -> None:
        self.checked = checked
        self.draw = random.Random(seed)
        self.seen: list[list[int]] = [[]]
        self.longest = min(checked.cache.page_size * 5 + 3, 60)
        self.operations = [
            (self.arrive, 20),
            (self.compute, 40),
            (self.insert, 15),
            (self.generate, 15),
            (self.finish, 10),
            (self.preempt, 4),
            (self.overtake, 4),
            (self.fork, 6),
            (self.lend, 5),
            (self.take_back, 4),
            (self.evict, 3),
            (self.reset, 1),
            (self.reset_alone, 1),
        ]

    def step(self) -> None:
        operation = self.draw.choices(*zip(*self.operations, strict=True))[0]
        operation()

    def end(self) -> None:
        """End all that is under way."""
        while self.checked.clients:
            self.finish()
            self.checked.check()
        while self.checked.loans:
            self.take_back()
            self.checked.check()

    def client(self) -> Client | None:
        return self.draw.choice(self.checked.clients) if self.checked.clients else None

    def more_tokens(self) -> list[int]:
        return [self.draw.randrange(2) for _ in range(self.draw.randint(1, self.longest // 2))]

    def arrive(self) -> None:
        old = self.draw.choice(
            [*self.seen, *self.checked.shared, *(client.tokens for client in self.checked.clients)]
        )
        tokens = old[: self.draw.randint(0, len(old))] if self.draw.random() < 0.5 else list(old)
        if not tokens or self.draw.random() < 0.6:
            tokens = tokens + self.more_tokens()
        del tokens[self.longest :]
        namespace = self.draw.choices(NAMESPACES, (2, 1, 5) if self.checked.shared else (6, 1, 1))[0]
        self.checked.admit(namespace, tokens, drop_partial=self.draw.random() < 0.1)

    def compute(self) -> None:
        if client := self.client():
            whole = len(client.tokens) if self.draw.random() < 0.4 else self.draw.randint(1, 7)
            self.checked.compute(client, whole)

    def insert(self) -> None:
        if client := self.client():
            shorter = self.draw.choice((0, 0, 0, 1, 3))
            self.checked.insert(client, max(client.computed - shorter, 0))

    def generate(self) -> None:
        client = self.client()
        if client and client.computed == len(client.tokens) < self.longest:
            client.tokens.extend(self.more_tokens()[:3])

    def finish(self) -> None:
        if client := self.client():
            self.seen = [*self.seen[-15:], client.tokens]
            kept = self.draw.choice((client.computed, client.computed, self.draw.randint(0, client.computed), 0))
            self.checked.finish(client, kept)

    def preempt(self) -> None:
        if client := self.client():
            self.checked.finish(client, client.computed)
            self.checked.admit(client.namespace, client.tokens)

    def overtake(self) -> None:
        """One client stops inside a page, another goes on from there first: both have written that page."""
        if client := self.client():
            self.checked.compute(client, self.draw.randint(1, 7))
            self.checked.insert(client, client.computed)
            tokens = (client.tokens + self.more_tokens())[: self.longest]
            if other := self.checked.admit(client.namespace, tokens):
                self.checked.compute(other, len(tokens))
                self.checked.insert(other, other.computed)

    def fork(self) -> None:
        """Fork some of a client's tokens, or all; both then go on independently."""
        if (client := self.client()) and len(self.checked.clients) < 40:
            shorter = self.draw.choice((0, 0, 0, 1, 3))
            fork = self.checked.fork(client, max(client.computed - shorter, 0))
            fork.tokens.extend(self.more_tokens()[: max(self.longest - len(fork.tokens), 1)])

    def lend(self) -> None:
        """Lend what a client has, or had; what is lent may never be evicted, so there are few loans."""
        tokens = self.draw.choice([*self.seen, *(client.tokens for client in self.checked.clients)])
        if len(self.checked.loans) < 3:
            namespace = self.draw.choices(NAMESPACES, (6, 1, 3))[0]
            self.checked.lend(namespace, tokens[: self.draw.randint(0, len(tokens))])

    def take_back(self) -> None:
        if self.checked.loans:
            self.checked.take_back(self.draw.randrange(len(self.checked.loans)))

    def evict(self) -> None:
        evictable = self.checked.cache.account().evictable
        wanted = self.draw.randint(0, 6)
        num_free = self.checked.cache.account().free
        evicted = self.checked.cache.evict(wanted)
        assert min(wanted, evictable) <= evicted <= wanted + (wanted > 0)
        assert self.checked.cache.account().free == num_free + evicted
        self.checked.forget_evicted()

    def reset(self) -> None:
        evictable = self.checked.cache.account().evictable
        assert self.checked.cache.reset() >= evictable
        assert self.checked.cache.account().evictable == 0
        self.checked.forget_evicted()

    def reset_alone(self) -> None:
        """One client, the others having ended, can get all pages but those of its table."""
        if client := self.client():
            self.checked.finish_copy(client)
            while self.checked.loans:
                self.checked.take_back(0)
            for other in [each for each in self.checked.clients if each is not client]:
                self.checked.finish(other, other.computed)
            self.reset()
            account, source = self.checked.cache.account(), client.lease.source
            shared = self.checked.shared_pages()
            held = len(shared.union(client.lease.pages))
            assert account.locked + account.private == held or source is not None
