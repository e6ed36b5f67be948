"""The prefill budget follows measured rates, and only beside running decodes."""

from __future__ import annotations

import pytest

from engine.prefill_budget import PrefillBudget


def learned(seconds_per_token: float, base: float) -> PrefillBudget:
    budget = PrefillBudget(max_step_tokens=2048, max_step_seconds=0.1)
    for _ in range(50):
        budget.observe(8, 0, base)
        budget.observe(8, 512, base + 512 * seconds_per_token)
    return budget


def test_without_decodes_the_whole_step_is_prefill() -> None:
    assert learned(1.0, 1.0).tokens(0) == 2048


def test_beside_decodes_a_step_aims_at_its_time() -> None:
    assert 400 <= learned(0.0002, 0.01).tokens(8) <= 500


def test_a_slow_machine_still_gets_on_and_a_fast_one_is_bound_by_tokens() -> None:
    assert learned(1.0, 0.2).tokens(8) == 64
    assert learned(1e-7, 0.001).tokens(48) == 2000


def test_until_rates_are_known_tokens_alone_bound() -> None:
    assert PrefillBudget(100, 0.1).tokens(40) == 60


def test_the_prefill_rate_is_that_of_whole_steps_which_small_ones_do_not_distort() -> None:
    budget = PrefillBudget(2048)
    assert (budget.prefill_rate, budget.decode_seconds) == (0, 0)
    budget.observe(0, 10, 0.01)
    assert budget.prefill_rate == pytest.approx(1000)  # all that is known
    for _ in range(50):
        budget.observe(8, 1000, 0.1)
        budget.observe(8, 2, 0.02)
        budget.observe(8, 0, 0.02)
    assert budget.prefill_rate == pytest.approx(10_000)
    assert budget.decode_seconds == pytest.approx(0.02)


def test_a_clock_that_stands_still_gives_a_finite_rate() -> None:
    budget = PrefillBudget(100)
    for num_tokens in (1, 100):
        budget.observe(0, num_tokens, 0.0)
        assert 0 < budget.prefill_rate < 1e9


def test_steps_that_are_held_up_and_the_first_do_not_distort_the_rate() -> None:
    budget = PrefillBudget(2048)
    budget.observe(0, 154, 0.17)
    for number in range(30):
        budget.observe(0, 154, 0.5 if number % 7 == 3 else 0.025)
        assert budget.prefill_rate == pytest.approx(154 / 0.025)
