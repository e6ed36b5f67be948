"""When drafting pays off: measured cost, measured acceptance, pauses and new tries."""

from __future__ import annotations

import pytest

from engine.drafting.payoff import DraftCost, Payoff


def price_of(plain: float, with_drafts: float, num_requests: int = 4, num_drafts: int = 8) -> float:
    price = DraftCost()
    for _ in range(3):
        price.observe(num_requests, 0, plain)
        price.observe(num_requests, num_drafts, with_drafts)
    return price.per_draft_token(num_requests)


def test_the_price_is_extra_time_per_draft_in_tokens_of_a_plain_step() -> None:
    # A plain step makes 4 tokens in 40 ms: 10 ms each. 8 draft tokens take 16 ms more: 2 ms each.
    assert price_of(0.040, 0.056) == pytest.approx(0.2)
    assert price_of(0.040, 0.038) == 0.0


def test_one_slow_step_does_not_change_the_price() -> None:
    price = DraftCost()
    for seconds in (0.04, 0.04, 9.0, 0.04, 0.04):
        price.observe(4, 0, seconds)
    for seconds in (0.056, 0.056, 9.0, 0.056, 0.056):
        price.observe(4, 8, seconds)
    assert price.per_draft_token(4) == pytest.approx(0.2)


def test_batches_of_other_sizes_have_their_own_price() -> None:
    price = DraftCost()
    price.observe(1, 0, 0.01)
    for _ in range(3):
        price.observe(1, 4, 0.012)
    assert price.per_draft_token(1) == pytest.approx(0.05)
    assert price.per_draft_token(64) == 0.0


def test_a_measurement_of_the_cost_is_due_at_first_and_now_and_then() -> None:
    price = DraftCost()
    assert price.is_due(3)
    assert price.is_due(3)
    price.observe(3, 0, 0.01)
    assert sum(price.is_due(3) for _ in range(640)) == 10


@pytest.mark.parametrize(
    ("price", "expected"),
    [(0.0, 6), (0.1, 6), (0.2, 5), (0.5, 2), (0.7, 1), (0.75, 0), (0.9, 0), (2.0, 0)],
)
def test_a_draft_token_pays_while_its_chance_exceeds_its_price(price: float, expected: int) -> None:
    """A new request starts at three in four accepted: chances 0.75, 0.56, 0.42, 0.32, 0.24, 0.18."""
    assert Payoff().num_worthwhile(price, most=6) == expected


def test_a_drafter_that_is_right_more_often_is_asked_for_more_tokens() -> None:
    good, bad = Payoff(), Payoff()
    for _ in range(10):
        good.verified(4, 4)
        bad.verified(4, 0)
    assert good.num_worthwhile(0.5, most=8) == 8
    assert bad.num_worthwhile(0.5, most=8) == 0


@pytest.mark.parametrize("num_accepted", [0, 4])
def test_a_long_run_of_luck_or_of_none_stays_a_number(num_accepted: int) -> None:
    payoff = Payoff()
    for _ in range(20_000):
        payoff.verified(4, num_accepted)
    assert 0.0 <= payoff.chance < 1.0
    assert payoff.num_worthwhile(0.5, most=8) == (8 if num_accepted else 0)
    assert payoff.num_worthwhile(1e-9, most=8) >= (8 if num_accepted else 0)


def test_draft_tokens_after_the_first_wrong_one_do_not_count() -> None:
    short, long = Payoff(), Payoff()
    short.verified(2, 1)
    long.verified(9, 1)
    assert short.chance == long.chance


def test_pauses_grow_until_a_try_succeeds() -> None:
    payoff = Payoff()
    starts = []
    for _ in range(7):
        payoff.pause(100)
        starts.append(payoff.resumes_at - 100)
    assert starts == [16, 32, 64, 128, 256, 256, 256]
    payoff.verified(4, 4)
    payoff.pause(100)
    assert payoff.resumes_at == 116


def test_a_new_try_forgets_the_failed_one() -> None:
    payoff = Payoff()
    for _ in range(30):
        payoff.verified(4, 0)
    payoff.pause(10)
    assert payoff.chance == Payoff().chance


def test_a_silent_drafter_is_not_asked_for_ever() -> None:
    payoff = Payoff()
    for num_tokens in range(50, 57):
        payoff.silent(num_tokens)
    assert payoff.resumes_at == 0
    payoff.silent(57)
    assert payoff.resumes_at == 57 + 16
