"""The cost: properties that hold for any replica and any prompt."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.cost import Candidate, CostSettings, RouteQuery, cost, decode_slowdown, evict_price, prefill_weight
from tests.router.support.fleets import candidate, candidates, queries, query

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(queries(), candidates(), st.integers(0, 200_000), st.integers(0, 200_000))
def test_more_overlap_never_costs_more(prompt: RouteQuery, replica: Candidate, one: int, other: int) -> None:
    less, more = sorted((min(one, prompt.num_tokens), min(other, prompt.num_tokens)))
    with_less = cost(replace(prompt, overlap={"a": less}), replica)
    with_more = cost(replace(prompt, overlap={"a": more}), replica)
    assert with_more.total <= with_less.total


@unhurried
@given(queries(), candidates(), st.floats(0.01, 100.0))
def test_twice_the_rates_halve_the_cost(prompt: RouteQuery, replica: Candidate, factor: float) -> None:
    faster = replace(
        replica,
        prefill_rate=replica.prefill_rate * factor,
        decode_tokens_per_s=replica.decode_tokens_per_s * factor,
        evict_price=replica.evict_price / factor,
    )
    assert cost(prompt, faster).total * factor == pytest.approx(cost(prompt, replica).total)


@unhurried
@given(queries(), candidates(), st.floats(0, 1e6), st.integers(0, 5000))
def test_more_queue_or_less_memory_never_costs_less(
    prompt: RouteQuery, replica: Candidate, queued: float, taken: int
) -> None:
    worse = replace(
        replica,
        queued_prefill_tokens=replica.queued_prefill_tokens + queued,
        pages_free=max(replica.pages_free - taken, 0),
    )
    assert cost(prompt, worse).total >= cost(prompt, replica).total


@unhurried
@given(queries(), candidates())
def test_terms_are_never_negative_and_add_up(prompt: RouteQuery, replica: Candidate) -> None:
    terms = cost(prompt, replica)
    parts = (terms.queue, terms.prefill, terms.decode, terms.evict)
    assert min(parts) >= 0.0
    assert terms.total == pytest.approx(sum(parts))


def test_the_terms_of_a_busy_replica() -> None:
    """Worked by hand: 2 s of queue, 700 uncached tokens at w = 4, 10 of 20 pages left after 160 of 1000 tokens."""
    replica = candidate(queued_prefill_tokens=20_000, evict_price=1e-3, pages_free=25, pages_total=30,
                        num_running=5, decode_tokens_per_s=100.0)  # fmt: skip
    terms = cost(query(160, {"a": 60}, utilisation=0.75), replica)
    assert terms.queue == pytest.approx(2.0)
    assert terms.prefill == pytest.approx(4 * 100 / 10_000)
    assert terms.decode == pytest.approx(0.05 * 0.25 / 0.5)  # 15 of 30 pages are left: half full
    assert terms.evict == pytest.approx(0.1)
    assert terms.overlap == 60


def test_the_last_token_is_always_computed() -> None:
    assert cost(query(1000, {"a": 1000}), candidate()).prefill == pytest.approx(2 * 1 / 10_000)


@pytest.mark.parametrize(
    ("utilisation", "weight"), [(0.0, 1.0), (0.5, 2.0), (0.9, 10.0), (0.99, 10.0), (1.3, 10.0)]
)
def test_the_weight_of_work_grows_with_utilisation_up_to_its_cap(utilisation: float, weight: float) -> None:
    assert prefill_weight(utilisation, 10.0) == pytest.approx(weight)


def test_decodes_cost_little_in_a_half_full_memory_and_much_in_a_full_one() -> None:
    half = candidate(num_running=20, pages_free=500, decode_tokens_per_s=1000.0)
    full = replace(half, pages_free=5)
    assert decode_slowdown(16, half) < 0.05
    assert decode_slowdown(16, full) > 1.0
    assert decode_slowdown(160_000, half) == decode_slowdown(16, replace(half, pages_free=0))  # both at the cap


def test_a_page_that_was_not_used_for_long_is_cheap_to_evict() -> None:
    assert evict_price(None, 1000.0) == 0.0  # pages are free
    assert evict_price(60.0, 0.0) == 0.0  # no rate is known
    assert evict_price(300.0, 1000.0, reuse_s=300.0) == pytest.approx(0.5 / 1000.0)
    assert evict_price(600.0, 1000.0, reuse_s=300.0) == pytest.approx(0.25 / 1000.0)


def test_a_rate_that_is_not_positive_is_named() -> None:
    with pytest.raises(ValueError, match="prefill rate of a must be above 0"):
        cost(query(), candidate(prefill_rate=0.0))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_weight"):
        CostSettings(max_weight=0.5)
    with pytest.raises(ValueError, match="max_pressure"):
        CostSettings(max_pressure=0.0)
