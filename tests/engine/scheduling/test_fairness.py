"""The promises of each policy, in steps, tokens and simulated seconds: no clock decides."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.values.plan import StepPlan
from engine.values.request import Status
from tests.engine.support.script import Script
from tests.engine.support.simulated_time import SimulatedEngine


def token_time(plan: StepPlan) -> float:
    """Return a step's cost, which is its number of tokens."""
    return float(plan.num_tokens)


# --- short prompts next to long ones ---------------------------------------------------------------------------


def test_short_prompts_have_their_first_token_five_times_sooner_than_first_come_whole_prompts() -> None:
    """Prompts of 2,000, 50 and 100 tokens arrive at once; a step has 256 tokens."""
    whole = SimulatedEngine(token_time, policy="fcfs", max_running=1, max_step_tokens=4096)
    chunked = SimulatedEngine(token_time, max_step_tokens=256)
    for engine in (whole, chunked):
        _, small, medium = (engine.arrive(n, max_tokens=4) for n in (2000, 50, 100))
        engine.run()
    assert [plan.num_prefill for plan in whole.plans if plan.num_prefill] == [2000, 50, 100]
    for name in (small, medium):
        assert whole.first_token(name) > 5 * chunked.first_token(name)
    assert chunked.first_token("r0") < 1.1 * 2150, "and the long one pays no more than what the short ones take"


@pytest.mark.parametrize("max_step_tokens", [256, 2048])
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_prompt_of_100k_delays_ten_of_1k_by_at_most_two_steps_each(
    max_step_tokens: int, comes_first: bool
) -> None:
    steps: list[list[float]] = []
    for has_long in (False, True):
        engine = SimulatedEngine(max_step_tokens=max_step_tokens)
        if has_long and comes_first:
            engine.arrive(100_000)
        short = [engine.arrive(1000, max_tokens=8) for _ in range(10)]
        if has_long and not comes_first:
            engine.arrive(100_000)
        engine.run(until=lambda: all(engine.token_times[name] for name in short))  # noqa: B023
        steps.append([engine.first_token(name) for name in short])
    delays = [with_others - alone for alone, with_others in zip(*steps, strict=True)]
    assert max(delays) <= 2.001


def test_a_long_prompt_gets_on_under_a_flood_of_short_ones() -> None:
    engine = SimulatedEngine(max_step_tokens=256)
    long = engine.arrive(4000)
    for _ in range(4000 // 16 + 1):
        for _ in range(4):
            engine.arrive(100)
        engine.step()
    assert engine.token_times[long]


# --- decodes keep their rhythm -----------------------------------------------------------------------------------


def machine(plan: StepPlan) -> float:
    """8 ms a step, 20 us for each decode and its share of context, 25 us a prompt token and 0.5 ns per pair."""
    decodes = [chunk for chunk in plan.chunks if chunk.num_tokens == 1]
    context = sum(chunk.start for chunk in decodes)
    pairs = plan.num_prefill * plan.prefill_context
    return 0.008 + 20e-6 * len(decodes) + 1e-9 * context + 25e-6 * plan.num_prefill + 0.5e-9 * pairs


def gaps(engine: SimulatedEngine, names: list[str]) -> list[float]:
    """Return the seconds between tokens, in order of size."""
    times = (engine.token_times[name] for name in names)
    return sorted(after - before for series in times for before, after in pairwise(series))


@pytest.mark.parametrize("num_streams", [1, 16])
def test_streams_keep_within_twice_the_time_per_token_while_a_long_prompt_is_computed(num_streams: int) -> None:
    percentiles = []
    for num_long in (0, 100_000):
        engine = SimulatedEngine(machine, max_step_ms=100.0, max_step_stretch=0.75)
        streams = [engine.arrive(100, max_tokens=1200) for _ in range(num_streams)]
        engine.run(until=lambda: all(len(engine.token_times[name]) >= 20 for name in streams))  # noqa: B023
        if num_long:
            long = engine.arrive(num_long)
            engine.run(until=lambda: bool(engine.token_times[long]))  # noqa: B023
            assert all(engine.requests[name].status is Status.RUNNING for name in streams)
            assert engine.now < 4 * num_long * (25e-6 + 0.5e-9 * num_long / 2), "it has nearly half of the time"
        else:
            engine.run()
        found = gaps(engine, streams)
        percentiles.append(found[int(0.99 * len(found))])
    alone, with_others = percentiles
    assert with_others <= 2 * alone


def test_no_request_is_admitted_to_a_step_that_is_full() -> None:
    """The step has room for tokens but not for time: only prompts that make progress take a row."""
    engine = SimulatedEngine(machine, max_step_ms=20.0)
    engine.arrive(100, max_tokens=1000)
    engine.run(until=lambda: len(engine.plans) > 20)
    for _ in range(60):
        engine.arrive(2000)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.load(engine.now).num_running <= 3


def test_many_prompts_together_may_take_all_of_max_step_ms() -> None:
    engine = SimulatedEngine(machine, max_step_ms=100.0, max_step_stretch=0.75)
    engine.arrive(100, max_tokens=1000)
    engine.run(until=lambda: len(engine.plans) > 20)
    for _ in range(40):
        engine.arrive(2000)
    engine.run(until=lambda: engine.plans[-1].num_prefill == 0 and len(engine.plans) > 25)
    longest = max(gaps(engine, ["r0"]))
    assert 0.05 < longest < 0.11


# --- priorities --------------------------------------------------------------------------------------------------


def test_a_flood_of_high_priority_starves_a_low_one_no_longer_than_its_half_lives() -> None:
    """One place in the batch, and every step a request of a priority two levels above comes for it."""
    engine = SimulatedEngine(max_running=1, priority_half_life_s=10.0)
    low = engine.arrive(10, max_tokens=4, priority=0)
    engine.step()
    for _ in range(60):
        engine.arrive(10, max_tokens=1, priority=-2)
        engine.step()
    assert engine.requests[low].num_preemptions == 1
    times = engine.token_times[low]
    assert times[1] < 3 and 20 <= times[2] <= 24, "what comes more than two half-lives later stands behind it"
    assert times[3] < times[2] + 1.1, "and does not push it out again"


def test_without_ageing_to_speak_of_it_would_starve() -> None:
    engine = SimulatedEngine(max_running=1, priority_half_life_s=1e6)
    low = engine.arrive(10, max_tokens=3, priority=0)
    for _ in range(60):
        engine.arrive(10, max_tokens=1, priority=-2)
        engine.step()
    assert not engine.token_times[low]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_priority_takes_a_place_in_a_full_batch_from_the_last_in_order(overlap: bool) -> None:
    script = Script(num_pages=200, limits={"max_running": 3}, overlap=overlap)
    low = [script.arrive([i + 1] * 12, max_tokens=20, priority=p) for i, p in enumerate((0, 1, 0))]
    for _ in range(3):
        script.step()
    high = script.arrive([9] * 12, max_tokens=5, priority=-1)
    script.run(until=lambda: bool(script.tokens(high)))
    assert [script.requests[name].num_preemptions for name in low] == [0, 1, 0]
    script.run()
    assert script.requests[high].num_preemptions == 0
    assert all(script.tokens(name) == script.undisturbed(name) for name in [*low, high])
    assert script.nothing_held()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_priority_takes_as_much_memory_as_it_needs_and_no_more(overlap: bool) -> None:
    """Three requests hold 8 of 28 pages each; one that needs 16 takes those of two of them."""
    script = Script(num_pages=28, page_size=4, overlap=overlap)
    low = [script.arrive([i + 1] * 28, max_tokens=8, priority=1) for i in range(3)]
    for _ in range(2):
        script.step()
    assert all(script.is_running(name) for name in low)
    high = script.arrive([9] * 60, max_tokens=2)
    script.run(until=lambda: bool(script.tokens(high)))
    assert [script.requests[name].num_preemptions for name in low] == [0, 1, 1]
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in [*low, high])
    assert script.nothing_held()


@pytest.mark.parametrize(("policy", "priority"), [("priority", 0), ("fcfs", -1), ("fair", 0)])
def test_a_request_that_may_preempt_none_waits(policy: str, priority: int) -> None:
    script = Script(num_pages=200, limits={"max_running": 2, "policy": policy})
    first = [script.arrive([i + 1] * 12, max_tokens=10, tenant=tenant) for i, tenant in enumerate("ac")]
    script.step()
    script.arrive([9] * 12, max_tokens=5, priority=priority, tenant="b")
    script.run()
    assert all(script.requests[name].num_preemptions == 0 for name in first)


def test_no_request_is_preempted_for_one_that_would_still_not_fit() -> None:
    """An equal request holds 9 of 12 pages: the 3 of a lower one would not suffice."""
    script = Script(num_pages=12, page_size=4)
    equal = script.arrive([1] * 30, max_tokens=6, priority=-1)
    low = script.arrive([2] * 8, max_tokens=3, priority=0)
    script.step()
    high = script.arrive([3] * 20, max_tokens=2, priority=-1)
    script.run(until=lambda: script.reason(low) is not None)
    assert script.requests[low].num_preemptions == 0
    assert not script.tokens(high)
    script.run()
    assert all(script.tokens(name) == script.undisturbed(name) for name in (equal, low, high))


def test_a_preempted_request_keeps_its_place_before_younger_equals() -> None:
    engine = SimulatedEngine(max_running=1)
    low = engine.arrive(10, max_tokens=4)
    younger = engine.arrive(10, max_tokens=4)
    engine.step()
    engine.arrive(10, max_tokens=2, priority=-5)
    engine.run()
    assert engine.requests[low].num_preemptions == 1
    assert engine.token_times[low][-1] < engine.token_times[younger][0]


# --- tenants -----------------------------------------------------------------------------------------------------

QUANTUM = 64
STEP = 200


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 900), st.integers(1, 6), st.integers(-1, 1), st.integers(0, 3)
        ),
        min_size=2,
        max_size=60,
    )
)
def test_backlogged_tenants_get_the_same_computed_tokens(arrivals: list[tuple[str, int, int, int, int]]) -> None:
    """(tenant, prompt, output, priority, steps until the next comes): from the moment at which two tenants both
    have prompts to compute, and as long as they do, what they get differs by at most a quantum and the decodes of
    one step.
    """
    engine = SimulatedEngine(policy="fair", fair_quantum_tokens=QUANTUM, max_step_tokens=STEP, max_running=1000)
    got, since = Counter[str](), dict[tuple[str, str], int]()

    script = [*arrivals]
    while script or engine.loop.has_work:
        wait = 1
        if script:
            tenant, prompt, output, priority, wait = script.pop(0)
            engine.arrive(prompt, output, priority, tenant)
        for _ in range(wait):
            before = len(engine.plans)
            engine.step()
            for chunk in (chunk for plan in engine.plans[before:] for chunk in plan.chunks):
                got[chunk.request.tenant] += chunk.num_tokens
            backlogged = {
                r.tenant
                for r in engine.requests.values()
                if r.status is not Status.FINISHED and r.num_to_compute > 1
            }
            pairs = {(one, other) for one in backlogged for other in backlogged if one < other}
            since = {pair: since.get(pair, got[pair[0]] - got[pair[1]]) for pair in pairs}
            for (one, other), at_first in since.items():
                most_decodes = max(plan.num_decodes for plan in engine.plans)
                assert abs(got[one] - got[other] - at_first) <= QUANTUM + most_decodes


def test_one_tenants_flood_hardly_delays_another_ones_prompt() -> None:
    """Fifty prompts of 1k tokens wait; the other tenant's one goes next, or after those that have begun."""
    first: dict[str, float] = {}
    for policy in ("priority", "fair"):
        engine = SimulatedEngine(policy=policy, max_step_tokens=512)
        for _ in range(50):
            engine.arrive(1000, tenant="flood")
        engine.step()
        quiet = engine.arrive(1200, tenant="quiet")
        engine.run()
        first[policy] = engine.first_token(quiet)
    assert first["priority"] < 25
    assert first["fair"] <= 1 + 2 * 1200 / 512 + 2


def test_places_in_the_batch_go_round_too() -> None:
    """One tenant keeps ten requests waiting for four places: another's is admitted as soon as one ends."""
    engine = SimulatedEngine(policy="fair", max_running=4, fair_quantum_tokens=16)
    flood = [engine.arrive(20, max_tokens=5, tenant="flood") for _ in range(10)]
    engine.step()
    quiet = engine.arrive(20, max_tokens=5, tenant="quiet")
    engine.run()
    assert engine.first_token(quiet) <= engine.first_token(flood[4])
