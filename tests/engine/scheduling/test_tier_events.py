"""Events of blocks, of a whole scheduler with host memory: they tell what lies where, whatever happens."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.news.tier import Tier
from cache.prefix_hash import block_hashes, prefix_root
from tests.cache.support.block_mirror import Mirror, prefixes
from tests.engine.support.script import Script


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    pages_per_block=st.sampled_from((1, 2)),
    host_pages=st.sampled_from((0, 6, 30)),
    min_uses=st.sampled_from((1, 2)),
)
def test_a_mirror_has_the_blocks_on_the_device_and_on_the_host(
    seed: int, pages_per_block: int, host_pages: int, min_uses: int
) -> None:
    """Prompts that are evicted, copied out and loaded back, aborted, preempted, failed and emptied."""
    draw = random.Random(seed)
    script = Script(
        num_pages=24,
        page_size=4 * pages_per_block,
        host_pages=host_pages,
        host_min_uses=min_uses,
        block_tokens=4,
        limits={"max_running": 3},
    )
    events, mirror = script.cache.follow_blocks(), Mirror(4)
    tiers: dict[int, int] = {}  # by block, as a router of Raydix's knows it

    def check() -> None:
        mirror.read(events.drain())
        pages = script.host.pool.tier.wanted
        salted = [request for request in script.requests.values() if request.namespace.salt]
        hidden = {block for one in salted for block in block_hashes(one.tokens, prefix_root(one.namespace), 4)}
        assert mirror.held[Tier.HOST] == {block for page in pages for block in page.blocks} - hidden
        log = script.cache.prefix_log
        assert log is not None
        stored, evicted = log.drain()
        for block in evicted:
            del tiers[block]
        assert not tiers.keys() & set(stored)
        tiers.update(dict.fromkeys(stored, Tier.DEVICE))
        moves = log.drain_moves()
        assert all(tiers[block] != tier for block, tier in moves.items()), "told twice"
        tiers.update(moves)
        held = list(log.snapshot())
        assert tiers == dict(zip(held, log.tiers(held) or bytes(len(held)), strict=True))
        open_ones = {block: tier for block, tier in tiers.items() if block not in hidden}
        device = mirror.held[Tier.DEVICE]
        assert open_ones == {
            block: Tier.DEVICE if block in device else Tier.HOST for block in device | mirror.held[Tier.HOST]
        }
        told = {mirror.prompts[block] for block in mirror.held[Tier.DEVICE]}
        assert told == prefixes(script.cache, 4, salted=False)

    names: list[str] = []
    for _ in range(60):
        begin = draw.choice((0, 100, 200, 300)) * pages_per_block
        prompt = [*range(begin, begin + draw.randint(9, 40)), *range(900, 900 + draw.randint(0, 9))]
        salt = draw.choice(("", "", "", "s"))
        names.append(script.arrive(prompt, max_tokens=draw.randint(1, 12), salt=salt))
        script.runner.fail_next = draw.random() < 0.05
        for _ in range(draw.randint(0, 12)):
            script.step()
        if draw.random() < 0.1:
            script.abort(draw.choice(names))
        if draw.random() < 0.1:
            script.loop.empty_cache()
        if draw.random() < 0.4:
            check()
    script.run()
    check()
