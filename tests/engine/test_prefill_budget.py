"""The prefill budget follows measured rates, and only beside running decodes."""

from __future__ import annotations

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
