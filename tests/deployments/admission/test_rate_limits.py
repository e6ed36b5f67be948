"""Rate limits: buckets refill, prompts are charged once, and errors say when to retry."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission.rate_limits import Bucket, RateLimited, TenantLimits
from deployments.config.tenants import Tenant


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, num_shares: int = 1, **fields: Any) -> TenantLimits:
    return TenantLimits(Tenant("a", **fields), clock, num_shares)


def refused(limits: TenantLimits, *admit: int) -> RateLimited:
    with pytest.raises(RateLimited) as error:
        limits.start().admit(*admit)
    return error.value


@given(
    st.floats(0.5, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 500)), max_size=60),
)
def test_a_bucket_gives_no_more_than_its_rate_and_one_minutes_worth(
    per_minute: float, asked: list[tuple[float, float]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0.0
    for pause, amount in asked:
        now += pause
        wait = bucket.seconds_until(amount, now)
        if wait:
            # The time it returns is right; a copy is asked, because asking advances the bucket's time.
            assert copy(bucket).seconds_until(amount, now + wait) == 0
            continue
        bucket.take(amount, now)
        taken += min(amount, bucket.capacity)
        assert taken <= bucket.capacity + per_minute * now / 60 + 1e-3 * len(asked)


def test_requests_per_minute() -> None:
    clock = Clock()
    tenant = limits(clock, requests_per_minute=3)
    for _ in range(3):
        tenant.start()
    error = refused(tenant, 1, 10)
    assert error.kind == "requests_per_minute" and error.retry_after_s == pytest.approx(20)
    assert "'a'" in error.message and "3 requests per minute" in error.message and "20 s" in error.message
    assert error.headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 20
    tenant.start()


def test_a_request_counts_as_many_as_the_answers_it_generates() -> None:
    clock = Clock()
    tenant = limits(clock, requests_per_minute=60)
    tenant.start().admit(59, 10)
    assert tenant.headers()["x-ratelimit-remaining-requests"] == "1"
    error = refused(tenant, 16, 10)
    assert error.kind == "requests_per_minute" and error.retry_after_s == pytest.approx(16)
    assert "counts as 16" in error.message
    clock.now += error.retry_after_s
    tenant.start().admit(16, 10)
    assert refused(tenant, 1, 1).retry_after_s == pytest.approx(1)


def test_answers_that_no_engine_took_are_given_back_and_the_request_is_not() -> None:
    tenant = limits(Clock(), requests_per_minute=60)
    ticket = tenant.start()
    ticket.admit(40, 10)
    for _ in range(3):
        ticket.refuse()
    assert tenant.headers()["x-ratelimit-remaining-requests"] == "59"


@given(st.integers(1, 200))
def test_more_answers_than_a_minutes_requests_need_a_full_bucket_and_leave_a_debt(count: int) -> None:
    clock = Clock()
    tenant = limits(clock, requests_per_minute=60)
    tenant.start().admit(count, 1)
    clock.now += max(0, count - 60) + 1 + 1e-6
    tenant.start()


def test_a_call_that_generates_nothing_counts_as_one_request() -> None:
    tenant = limits(Clock(), requests_per_minute=60)
    tenant.start().admit(0, 10)
    assert tenant.headers()["x-ratelimit-remaining-requests"] == "59"


def test_prompts_are_charged_immediately_and_generated_tokens_as_they_come() -> None:
    clock = Clock()
    tenant = limits(clock, tokens_per_minute=600)
    ticket = tenant.start()
    ticket.admit(1, 500)
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "100"
    for _ in range(40):
        ticket.generated(10)
    ticket.close()
    error = refused(tenant, 1, 100)  # 300 in debt
    assert error.kind == "tokens_per_minute" and error.retry_after_s == pytest.approx(30.1)
    clock.now += 31
    assert refused(tenant, 1, 100).retry_after_s == pytest.approx(9)
    clock.now += 9.1
    tenant.start().admit(1, 100)


def test_a_refused_request_is_refunded_once() -> None:
    clock = Clock()
    tenant = limits(clock, tokens_per_minute=600)
    kept, returned = tenant.start(), tenant.start()
    kept.admit(1, 200)
    returned.admit(1, 300)
    for _ in range(3):
        returned.refuse()
        returned.close()
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "400"


def test_a_prompt_larger_than_a_minutes_tokens_needs_a_full_bucket_and_leaves_a_debt() -> None:
    clock = Clock()
    tenant = limits(clock, tokens_per_minute=60)
    tenant.start().admit(1, 120)
    assert refused(tenant, 1, 1).retry_after_s == pytest.approx(61)


def test_concurrency_counts_every_choice_until_it_is_over() -> None:
    tenant = limits(Clock(), max_concurrency=4)
    first, second = tenant.start(), tenant.start()
    first.admit(3, 10)
    with pytest.raises(RateLimited, match="4 generations at once here, and 3 are open"):
        second.admit(2, 10)
    second.admit(1, 10)
    assert refused(tenant, 1, 1).kind == "max_concurrency"
    first.close()
    first.close()
    third = tenant.start()
    third.admit(3, 10)
    with pytest.raises(ValueError, match="the request needs 5 concurrent choices, but this tenant may have 4"):
        limits(Clock(), max_concurrency=4).start().admit(5, 10)


def test_several_ingresses_share_a_limit_and_each_lets_a_request_through() -> None:
    clock = Clock()
    shares = [limits(clock, 4, requests_per_minute=2, tokens_per_minute=400, max_concurrency=2) for _ in range(4)]
    for share in shares:
        share.start().admit(2, 100)
        assert refused(share, 1, 1).kind in ("max_concurrency", "tokens_per_minute")
    clock.now += 30
    assert refused(shares[0], 1, 1).kind == "max_concurrency"


def test_an_ingress_that_comes_takes_its_share_and_one_that_goes_leaves_it() -> None:
    clock = Clock()
    tenant = limits(clock, requests_per_minute=600, tokens_per_minute=6000, max_concurrency=6)
    tenant.start().admit(3, 1500)
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "4500"
    tenant.divide(3)  # three quarters full as before, of a third
    assert tenant.headers()["x-ratelimit-limit-tokens"] == "2000"
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "1500"
    assert tenant.headers()["x-ratelimit-limit-requests"] == "200"
    assert refused(tenant, 1, 1).kind == "max_concurrency"  # 2 at once here, and 3 are open
    tenant.divide(2)
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "2250"
    assert refused(tenant, 1, 1).kind == "max_concurrency"
    tenant.divide(1)
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "4500"
    tenant.start().admit(3, 100)


def test_a_debt_is_not_divided() -> None:
    clock = Clock()
    tenant = limits(clock, tokens_per_minute=600)
    ticket = tenant.start()
    ticket.admit(1, 600)
    ticket.generated(300)
    tenant.divide(4)
    assert refused(tenant, 1, 1).retry_after_s == pytest.approx(301 / (600 / 4 / 60))
    tenant.divide(1)
    assert refused(tenant, 1, 1).retry_after_s == pytest.approx(30.1)


def test_a_limit_that_was_divided_refills_at_its_share() -> None:
    clock = Clock()
    tenant = limits(clock, requests_per_minute=60)
    tenant.start().admit(60, 1)
    tenant.divide(4)
    clock.now += 8
    tenant.start()
    tenant.start()
    assert refused(tenant, 1, 1).retry_after_s == pytest.approx(4)


@given(
    st.floats(0.5, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 8), st.floats(0, 500)), max_size=60),
)
def test_ingresses_that_come_and_go_give_nothing_away(
    per_minute: float, changes: list[tuple[float, int, float]]
) -> None:
    """Whatever the numbers of ingresses, one of them gives no more than the whole limit."""
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0.0
    for pause, num_shares, amount in changes:
        now += pause
        bucket.resize(per_minute / num_shares, now)
        if not bucket.seconds_until(amount, now):
            taken += min(amount, bucket.capacity)
            bucket.take(amount, now)
        assert taken <= max(per_minute, 1.0) + max(per_minute, 1.0) * now / 60 + 1e-3 * len(changes)


def test_a_tenant_without_limits_has_none() -> None:
    tenant = limits(Clock())
    tenant.divide(3)
    for _ in range(1000):
        tenant.start().admit(8, 10**6)
    assert tenant.headers() == {}


@pytest.mark.parametrize(
    ("used", "shown"), [(0, "0ms"), (1, "20ms"), (100, "2s"), (120, "2.4s"), (3000, "1m0s"), (4500, "1m30s")]
)
def test_times_are_written_as_openai_does(used: int, shown: str) -> None:
    tenant = limits(Clock(), tokens_per_minute=3000)
    ticket = tenant.start()
    ticket.admit(1, 0)
    ticket.generated(used)
    assert tenant.headers()["x-ratelimit-reset-tokens"] == shown


def test_new_limits_keep_the_use_of_the_old_ones() -> None:
    clock = Clock()
    tenant = limits(clock, 2, requests_per_minute=60, max_concurrency=4)
    tenant.start().admit(2, 1)
    tenant.enforce(Tenant("a", requests_per_minute=120, tokens_per_minute=200, max_concurrency=2), 2)
    assert tenant.headers()["x-ratelimit-limit-requests"] == "60"
    assert tenant.headers()["x-ratelimit-remaining-requests"] == "56"  # of 30 and of 60, two fifteenths are gone
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "100"  # a limit that there was not is unused
    assert refused(tenant, 1, 1).kind == "max_concurrency"
    tenant.enforce(Tenant("a"), 2)
    for _ in range(1000):
        tenant.start().admit(8, 10**6)
