"""Hot prefixes: exact shared beginnings, worth their uses, within bounds, apart by namespace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes

BLOCK = 4
HALF_LIFE = 100.0
M = Namespace("m")

# Few tokens and short blocks: prompts that share beginnings of every length.
prompts = st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=25)


def made(**limits: int) -> HotPrefixes:
    return HotPrefixes(BLOCK, half_life_s=HALF_LIFE, **limits)


def record(hot: HotPrefixes, prompt: Sequence[int], now: float = 0.0, namespace: Namespace = M) -> None:
    hot.record(namespace, prompt, block_hashes(prompt, prefix_root(namespace), BLOCK), now)


def blocks(prefixes: Sequence[HotPrefix]) -> set[tuple[int, ...]]:
    """Every beginning of whole blocks that these prefixes have."""
    return {
        tuple(prefix.token_ids[:end])
        for prefix in prefixes
        for end in range(BLOCK, len(prefix.token_ids) + 1, BLOCK)
    }


def uses_of(prompts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    """Count one by one how many prompts have each beginning of whole blocks."""
    return Counter(tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK))


def tokens_per_s(uses: float) -> float:
    return uses * math.log(2) / HALF_LIFE


@given(prompts)
def test_all_shared_beginnings_are_found_and_nothing_else(prompts: list[list[int]]) -> None:
    hot = made()
    for prompt in prompts:
        record(hot, prompt)
    shared = {beginning for beginning, count in uses_of(prompts).items() if count > 1}
    assert blocks(hot.top(10**6, 0.0)) == shared


@given(prompts, st.integers(0, 12))
def test_the_chosen_prefixes_have_the_most_uses_that_the_budget_can_buy(
    prompts: list[list[int]], max_blocks: int
) -> None:
    hot = made()
    for prompt in prompts:
        record(hot, prompt)
    top = hot.top(max_blocks * BLOCK, 0.0)
    uses = uses_of(prompts)
    best = sorted((count for count in uses.values() if count > 1), reverse=True)[:max_blocks]
    assert sorted((uses[beginning] for beginning in blocks(top)), reverse=True) == best


@given(prompts)
def test_the_value_is_the_tokens_that_uses_save(prompts: list[list[int]]) -> None:
    hot = made()
    for prompt in prompts:
        record(hot, prompt)
    saved = sum(BLOCK * count for count in uses_of(prompts).values() if count > 1)
    reported = sum(prefix.tokens_per_s for prefix in hot.top(10**6, 0.0))
    assert reported == pytest.approx(tokens_per_s(saved))


@given(prompts, prompts)
def test_merging_loses_no_use(ours: list[list[int]], theirs: list[list[int]]) -> None:
    first, second, merged = made(), made(), made()
    for hot, prompts in ((first, ours), (second, theirs)):
        for prompt in prompts:
            record(hot, prompt)
        for prefix in hot.top(10**6, 0.0):
            merged.merge(prefix, block_hashes(prefix.token_ids, prefix_root(M), BLOCK), 50.0)
    total = sum(prefix.tokens_per_s for hot in (first, second) for prefix in hot.top(10**6, 0.0))
    assert sum(prefix.tokens_per_s for prefix in merged.top(10**6, 50.0)) == pytest.approx(total)
    assert blocks(merged.top(10**6, 50.0)) == blocks(first.top(10**6, 0.0)) | blocks(second.top(10**6, 0.0))


@given(prompts)
def test_bounds_hold_after_every_prompt(prompts: list[list[int]]) -> None:
    hot = made(max_tokens=32, max_runs=3)
    for now, prompt in enumerate(prompts):
        record(hot, prompt, float(now))
        assert hot.num_tokens <= 32
        assert hot.num_runs <= 3


def test_a_prefix_that_is_used_stays_while_many_others_pass() -> None:
    hot = made(max_tokens=400)
    system = list(range(100, 140))
    for number in range(200):
        record(hot, [*system, *range(number * 8, number * 8 + 8)], now=float(number))
    (prefix,) = hot.top(1000, 200.0)
    assert list(prefix.token_ids) == system


def test_salted_prompts_are_kept_apart_and_keep_their_namespace() -> None:
    hot = made()
    salted = Namespace("m", salt="tenant")
    for namespace, count in ((M, 2), (salted, 3), (Namespace("m", salt="other"), 1)):
        for _ in range(count):
            record(hot, range(8), namespace=namespace)
    assert [(prefix.namespace, len(prefix.token_ids)) for prefix in hot.top(1000, 0.0)] == [(salted, 8), (M, 8)]


def test_uses_lose_half_their_weight_in_a_half_life() -> None:
    hot = made()
    for _ in range(8):
        record(hot, range(8), now=0.0)
    for _ in range(3):
        record(hot, range(50, 58), now=2 * HALF_LIFE)
    now, old = hot.top(1000, 2 * HALF_LIFE)
    assert [prefix.token_ids[0] for prefix in (now, old)] == [50, 0]
    assert now.tokens_per_s == pytest.approx(8 * tokens_per_s(3))
    assert old.tokens_per_s == pytest.approx(8 * tokens_per_s(8 / 4))


def test_years_without_prompts_overflow_nothing() -> None:
    hot = made()
    for now in (0.0, 0.0, 1e6, 1e6, 1e12, 1e12):
        record(hot, range(8), now)
    (prefix,) = hot.top(1000, 1e12)
    assert prefix.tokens_per_s == pytest.approx(8 * tokens_per_s(2))


def test_prompts_without_a_whole_block_are_nothing() -> None:
    hot = made()
    for _ in range(3):
        record(hot, [1, 2, 3])
    assert (hot.top(1000, 0.0), hot.num_runs) == ([], 0)


def test_a_prompt_larger_than_all_memory_is_cut() -> None:
    hot = made(max_tokens=16)
    for _ in range(2):
        record(hot, range(1000))
    assert hot.num_tokens <= 16


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, {"max_runs": 0}])
def test_impossible_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        made(**wrong)
