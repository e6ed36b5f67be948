"""What an ingress makes of parts and deltas is what the replica's cache holds, whatever happens between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.news.prefix_log import PrefixLog
from cache.news.tier import Tier
from deployments.wire import messages, prefix_feed
from deployments.wire.prefix_feed import NoPrefixes, PrefixFeed
from deployments.wire.session import Session
from tests.support.count_calls import count_calls


class Listening:
    """An ingress that hears a feed, but for messages that get lost, and asks when it pleases."""

    def __init__(self, feed: PrefixFeed) -> None:
        self.feed, self.session = feed, Session(b"i")
        self.known: set[int] = set()
        self.tiers: dict[int, int] = {}
        self.state = "unknown"
        self.sizes: list[int] = []
        self.is_congested = False

    def post(self, ingress_id: str, session: Session, data: bytes) -> bool:
        if self.is_congested:
            return False
        session.seq += 1
        message = messages.decode_to_ingress(data)
        if isinstance(message, messages.PrefixSnapshot):
            hashes = messages.unpack_hashes(message.hashes)
            self.sizes.append(len(hashes))
            if message.is_first:
                self.known, self.tiers = set(), {}
            self.known.update(hashes)
            self.tiers.update(zip(hashes, message.tiers or bytes(len(hashes)), strict=True))
            self.state = "whole" if message.is_last else "begun"
        elif isinstance(message, messages.PrefixDelta) and self.state != "unknown":
            stored, evicted = messages.unpack_hashes(message.stored), messages.unpack_hashes(message.evicted)
            moved = messages.unpack_hashes(message.moved)
            self.sizes.append(len(stored) + len(evicted) + len(moved))
            self.known.update(stored)
            self.known.difference_update(evicted)
            self.tiers.update(dict.fromkeys([*stored, *evicted], 0))
            self.tiers.update(zip(moved, message.tiers, strict=True))
        return True

    def ask(self, *, from_start: bool) -> None:
        known = self.session.cache
        known.wants_first = known.wants_first or from_start
        part = self.feed.next_part(self.session)
        self.feed.sent(self.session, part, self.post("i", self.session, part.encoded(1, self.session.seq)))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_parts_and_changes_together_give_the_blocks_that_the_cache_holds(seed: int) -> None:
    draw, log, held, on_host = random.Random(seed), PrefixLog(), set[int](), set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_feed, "PART_BLOCKS", 5)
        feed = PrefixFeed(log, period_s=1.0)
        ingresses = {name: Listening(feed) for name in ("a", "b")}
        now = 0.0
        for _ in range(200):
            match draw.choice(
                ("store", "store", "evict", "keep", "drop", "tick", "ask", "ask", "from_start", "congestion")
            ):
                case "store":
                    new = [block for block in draw.sample(range(60), 7) if block not in held]
                    log.store(new)
                    held.update(new)
                case "evict":
                    gone = [block for block in draw.sample(range(60), 4) if block in held]
                    log.evict(gone)
                    held.difference_update(gone)
                case "keep":
                    log.keep(kept := draw.sample(sorted(held - on_host), min(3, len(held - on_host))))
                    on_host.update(kept)
                case "drop":
                    log.drop(dropped := draw.sample(sorted(on_host), min(2, len(on_host))))
                    on_host.difference_update(dropped)
                case "tick":
                    now += 1.0
                    feed.send_due(
                        now,
                        1,
                        {name: ingress.session for name, ingress in ingresses.items()},
                        lambda name, session, data: ingresses[name].post(name, session, data),
                    )
                case "ask":
                    draw.choice(list(ingresses.values())).ask(from_start=False)
                case "from_start":
                    if draw.random() < 0.2:
                        draw.choice(list(ingresses.values())).ask(from_start=True)
                case _:
                    draw.choice(list(ingresses.values())).is_congested = draw.random() < 0.3
            published = set(log.snapshot())
            for ingress in ingresses.values():
                if ingress.session.cache.knowledge == "current":
                    assert ingress.known <= published
                    if ingress.state == "whole" and not ingress.session.cache.snapshot:
                        assert ingress.known == published
                        told = log.tiers(list(published)) or bytes(len(published))
                        assert {block: ingress.tiers[block] for block in published} == dict(
                            zip(published, told, strict=True)
                        )
            log_now = {block: 0 if block in held else Tier.HOST for block in held | on_host}
        log.drain()
        log.drain_moves()
        everything = list(log.snapshot())
        assert dict(zip(everything, log.tiers(everything) or bytes(len(everything)), strict=True)) == log_now
        for ingress in ingresses.values():
            assert max(ingress.sizes, default=0) <= 5


def test_an_ingress_that_missed_a_change_begins_again_at_its_own_pace() -> None:
    log = PrefixLog()
    log.store(range(1, 20_001))
    feed = PrefixFeed(log, period_s=1.0)
    ingress = Listening(feed)
    sessions = {"i": ingress.session}
    feed.send_due(1.0, 1, sessions, ingress.post)
    while ingress.state != "whole":
        ingress.ask(from_start=False)
    log.store([77_777])
    ingress.is_congested = True
    feed.send_due(2.0, 1, sessions, ingress.post)
    feed.send_due(3.0, 1, sessions, ingress.post)
    assert 77_777 not in ingress.known
    ingress.is_congested, ingress.sizes = False, []
    feed.send_due(4.0, 1, sessions, ingress.post)
    assert (ingress.sizes, ingress.state, ingress.known) == ([0], "begun", set())
    while ingress.state != "whole":
        ingress.ask(from_start=False)
    assert ingress.known == {*range(1, 20_001), 77_777}


def test_a_cache_that_is_not_reported_is_known_immediately() -> None:
    ingress = Listening(PrefixFeed(NoPrefixes(), period_s=1.0))
    ingress.ask(from_start=True)
    assert (ingress.state, ingress.known) == ("whole", set())


def test_a_part_takes_as_many_steps_from_a_large_cache() -> None:
    def steps(num_blocks: int) -> int:
        log = PrefixLog()
        log.store(range(num_blocks))
        log.drain()
        ingress = Listening(PrefixFeed(log, period_s=1.0))
        ingress.ask(from_start=True)
        return count_calls(lambda: ingress.ask(from_start=False))

    assert steps(160_000) <= steps(10_000) + 100
