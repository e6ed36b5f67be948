"""The prefill budget follows measured rates, and only beside running decodes."""

from __future__ import annotations

import random

import pytest

from engine.scheduling.prefill_budget import PrefillBudget, Room


def learned(seconds_per_token: float, decodes: float, max_stretch: float | None = None) -> PrefillBudget:
    budget = PrefillBudget(2048, max_step_seconds=0.1, max_stretch=max_stretch)
    for _ in range(50):
        budget.observe(8, 0, decodes)
        budget.observe(8, 1024, decodes + 1024 * seconds_per_token)
    budget.observe(8, 0, decodes)
    return budget


def tokens(budget: PrefillBudget, num_decodes: int, num_prompts: int = 1) -> int:
    return budget.room(num_decodes, num_prompts).most(0, 10**6)


def test_without_decodes_the_whole_step_is_prefill() -> None:
    assert tokens(learned(1.0, 1.0), 0) == 2048


def test_a_step_with_decodes_aims_at_its_time() -> None:
    assert 440 <= tokens(learned(0.0002, 0.01), 8) <= 450


def test_each_prompt_may_stretch_a_step_by_a_share_of_the_time_of_decodes() -> None:
    budget = learned(0.0002, 0.01, max_stretch=0.5)
    assert 24 <= tokens(budget, 8, 1) <= 25
    assert 49 <= tokens(budget, 8, 2) <= 50
    assert 440 <= tokens(budget, 8, 100) <= 450, "never beyond max_step_seconds"


def test_a_slow_machine_still_gets_on_and_a_fast_one_is_bound_by_tokens() -> None:
    assert tokens(learned(1.0, 0.2), 8) == 16
    assert tokens(learned(1e-7, 0.001), 48) == 2000


def test_a_step_that_takes_no_time_worth_mentioning_is_not_cut() -> None:
    assert tokens(learned(1e-7, 1e-5, max_stretch=0.5), 8) == 2040


def test_nothing_is_bound_when_nothing_is_asked_for() -> None:
    assert tokens(PrefillBudget(100), 40) == 60
    assert PrefillBudget(100).room(120, 1).is_full


def test_until_rates_are_known_prompts_wait_one_step_and_begin_small() -> None:
    budget = PrefillBudget(2048, 0.1, 0.75)
    assert tokens(budget, 8) == 0
    budget.observe(8, 0, 0.01)
    sizes = []
    for _ in range(5):
        sizes.append(tokens(budget, 8))
        budget.observe(8, sizes[-1], 0.01 + sizes[-1] * 1e-5)
    assert sizes == [64, 128, 256, 512, 749]


def test_the_time_of_steps_of_only_prompts_gives_the_first_number_of_tokens() -> None:
    budget = PrefillBudget(2048, 0.1, 0.75)
    for _ in range(3):
        budget.observe(0, 2000, 0.1)
    budget.observe(8, 0, 0.01)
    assert tokens(budget, 8) == 150


def test_prompts_get_on_even_if_no_step_without_them_is_ever_seen() -> None:
    budget = PrefillBudget(2048, 0.1, 0.75)
    sizes = []
    for _ in range(9):
        sizes.append(tokens(budget, 8))
        budget.observe(8, sizes[-1] or 1, 0.01)
    assert sizes[:3] == [0, 0, 64] and sum(size > 0 for size in sizes) == 3


def test_the_time_of_decodes_is_measured_again_while_prompts_never_end() -> None:
    budget = learned(0.0002, 0.01, max_stretch=0.75)
    alone = 0
    for _ in range(330):
        room = budget.room(8, 1)
        alone += room.tokens == 0
        num_tokens = room.most(0, 10**6)
        budget.observe(8, num_tokens, 0.03 + num_tokens * 0.0002)  # decodes became slower
    assert alone == 10
    assert 0.02 < budget.decode_seconds < 0.03


def test_a_step_that_holds_too_much_already_has_no_room() -> None:
    for tokens in (0, -2):
        room = PrefillBudget(100 + tokens).room(num_decodes=100, num_prompts=1)
        assert room.is_full and room.most(0, 1) <= 0


def test_a_room_takes_the_context_into_account() -> None:
    room = Room(tokens=2048, seconds=0.01, pace=1e-5, slope=1e-8)
    early, late = room.most(0, 10**6), room.most(9_000, 10**6)
    assert early == 732  # 732 * (1e-5 + 366e-8) = 0.01
    assert late == 99
    assert room.most(9_000, 10**6, share=0.5) == 49
    room.take(9_000, 49)
    assert room.most(9_049, 10**6) == 50
    room.take(9_049, 50)
    assert room.most(0, 10**6) <= 15
    assert room.most(0, 5) == 5
    assert not room.is_full
    room.take(0, room.most(0, 10**6))
    assert room.is_full, "of time, though not of tokens"


@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize(
    ("seconds_per_token", "per_context_token", "fixed"),
    [(25e-6, 0.15e-9, 0.0), (25e-6, 0.15e-9, 0.002), (2e-4, 5e-9, 0.0), (2e-5, 1e-8, 0.0)],
    ids=["gpu", "gpu with a cost per step", "cpu", "attention above all"],
)
def test_decodes_keep_their_rhythm_whatever_a_step_costs(
    num_decodes: int, seconds_per_token: float, per_context_token: float, fixed: float
) -> None:
    """A prompt of 30k tokens on machines whose steps take a known time, now and then held up by something else."""
    budget, rng = PrefillBudget(2048, 0.1, 0.75), random.Random(1)
    alone = 0.008 + 1e-4 * num_decodes
    done, ratios = 0, []
    for _ in range(20):
        budget.observe(num_decodes, 0, alone)
    while done < 30_000:
        room = budget.room(num_decodes, 1)
        size = room.most(done, 30_000 - done)
        room.take(done, size)
        context = done + size / 2
        seconds = alone + (fixed + size * (seconds_per_token + per_context_token * context)) * (size > 0)
        ratios.append(seconds / alone)
        held_up = 20.0 if rng.random() < 0.01 else 1.0
        budget.observe(num_decodes, size, seconds * held_up, context)
        done += size
    ratios.sort()
    assert ratios[int(0.99 * len(ratios))] <= 2
    assert ratios[len(ratios) // 2] >= 1.5, "and prompts get what is theirs"


class Machine:
    """Any prompts in a step cost 10 ms beside decodes of 1.5 ms, as those of a small model on a GPU."""

    ALONE, FIXED, PER_TOKEN = 0.0015, 0.01, 8e-6

    def __init__(self) -> None:
        self.budget, self._rng = PrefillBudget(2048, 0.1, 0.75), random.Random(1)
        for _ in range(20):
            self.budget.observe(4, 0, self.ALONE)

    def compute(self, num_tokens: int, num_prompts: int) -> tuple[list[int], list[float]]:
        """Compute prompts beside decodes, the next step always planned before the last one is known; return the
        steps' prompt tokens and seconds.
        """
        sizes: list[int] = []
        times: list[float] = []
        while num_tokens > 0:
            room = self.budget.room(4, num_prompts)
            size = room.most(0, num_tokens)
            room.take(0, size)
            if sizes:
                self.budget.observe(4, sizes[-1], times[-1])
            sizes.append(size)
            noise = max(0.5, self._rng.gauss(1, 0.1))
            times.append(noise * (self.ALONE + (self.FIXED + size * self.PER_TOKEN) * (size > 0)))
            num_tokens -= size
        return sizes, times


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_where_any_prompt_makes_a_step_long_few_steps_have_prompts(num_prompts: int) -> None:
    """Steps of 16 tokens would keep to no bound either, and take 20 s for what takes 1.5."""
    sizes, times = Machine().compute(30_000, num_prompts)
    assert sum(size > 0 for size in sizes) < 60, "some 700 tokens at a time"
    stretch = sum(times) / len(times) / Machine.ALONE - 1
    assert 0.6 * num_prompts < stretch < 0.9 * num_prompts, "as much as prompts may add, on the average"


def test_where_prompts_may_add_more_than_their_fixed_cost_no_step_is_without_them() -> None:
    sizes, _ = Machine().compute(45_000, num_prompts=50)
    assert 0 not in sizes and sizes.count(2044) > 10


def test_a_step_that_is_held_up_at_first_does_not_keep_prompts_waiting() -> None:
    """It looks as if any prompts took seconds, and yet they get on."""
    machine = Machine()
    machine.budget.observe(4, 16, 2.0)
    machine.budget.observe(4, 64, machine.ALONE + machine.FIXED)
    sizes, times = machine.compute(10_000, num_prompts=1)
    waits = "".join("x" if size else "." for size in sizes).split("x")
    assert max(map(len, waits)) <= 100 and sum(times) < 5


def test_prompts_of_one_size_also_separate_the_fixed_cost_from_the_cost_of_tokens() -> None:
    """Requests of 40 prompt tokens come one by one, and later a long prompt."""
    machine = Machine()
    for _ in range(200):
        machine.compute(40, num_prompts=1)
    sizes, _ = machine.compute(30_000, num_prompts=1)
    assert sum(size > 0 for size in sizes) < 60


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
