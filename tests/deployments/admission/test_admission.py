"""Late binding in virtual time: which requests wait, are sent or refused, and leave nothing behind."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any

import pytest

from deployments.admission.admission import Admission, LoadView
from deployments.admission.fleet_load import FleetLoad
from deployments.client.model_client import ModelClient
from deployments.client.protocol import Engines, Generation, Overloaded, Rejected
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import Tenant
from deployments.wire.messages import Backlog
from tests.deployments.support.virtual_time import ObservedFleet, VirtualFleet, now, request, run

TENANTS = {"a": Tenant("a", priority=0), "b": Tenant("b", priority=0), "heavy": Tenant("heavy", 3.0, priority=5)}


class Admitting(ModelClient):
    """A client with its admission."""

    def __init__(
        self, fleet: Engines, load: LoadView, settings: AdmissionSettings, tenants: Mapping[str, Tenant] = TENANTS
    ) -> None:
        self.admission = Admission(load, settings, tenants)
        super().__init__(fleet, self.admission)

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting


def admitting(fleet: VirtualFleet, **settings: Any) -> Admitting:
    return Admitting(fleet, fleet, AdmissionSettings(**settings))


async def finish(generation: Generation) -> float:
    """Return the clock when the first token arrived."""
    try:
        async for _ in generation:
            pass
        return now()
    finally:
        await generation.aclose()


async def ask(client: Any, *args: Any, **fields: Any) -> float:
    """Return the seconds to the first token."""
    began = now()
    return await finish(await client.generate(request(*args, **fields))) - began


def assert_nothing_is_left(client: Admitting, fleet: VirtualFleet) -> None:
    assert (client.num_waiting, client.admission.num_waiting_tokens, fleet.open) == (0, 0, 0)
    assert client.admission.num_sending == 0


def test_requests_pass_while_an_engine_has_room_and_wait_when_none_has() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(2, rate=1000)
        client = admitting(fleet, ttft_target_s=1.0)
        tasks = [asyncio.create_task(ask(client, f"r{n}", tokens=500)) for n in range(40)]
        await asyncio.sleep(0.1)
        assert client.num_waiting > 30
        assert fleet.most_queued_s <= 1.5  # the target, and one request beyond it
        await asyncio.gather(*tasks)
        # Work conserving: 40 prompts of half a second on two engines.
        assert now() == pytest.approx(10, abs=0.1)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_engines_get_no_more_than_the_target_however_slowly_they_accept() -> None:
    """Requests that were sent but not accepted yet count."""

    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000, accept_s=0.4)
        client = admitting(fleet, ttft_target_s=1.0)
        await asyncio.gather(*(ask(client, f"r{n}", tokens=100) for n in range(50)))
        assert fleet.most_queued_s <= 1.1
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_a_slow_path_to_idle_engines_delays_no_request() -> None:
    """Prompts are mostly cached, so the time of their first tokens says nothing about the room."""

    async def scenario() -> None:
        fleet = VirtualFleet(2, rate=10_000, accept_s=0.4)
        observed = ObservedFleet(fleet)
        client = Admitting(observed, FleetLoad(observed.known, fleet.uncached_tokens), AdmissionSettings())
        heartbeats = asyncio.create_task(observed.send_heartbeats())
        for number in range(5):  # the first ones could mislead the estimate
            await ask(client, f"one {number}", tokens=10)
        tasks = [asyncio.create_task(ask(client, f"r{n}", tokens=10)) for n in range(100)]
        assert max(await asyncio.gather(*tasks)) < 0.6
        heartbeats.cancel()

    run(scenario())


def test_tenants_take_turns_by_weight_in_tokens_that_were_computed() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=10_000)
        fleet.cached = 50
        client = admitting(fleet, ttft_target_s=0.1, quantum_tokens=500)
        tasks = [
            asyncio.create_task(ask(client, f"{tenant}{n}", tenant, tokens))
            for n in range(300)
            for tenant, tokens in (("a", 100), ("b", 250), ("heavy", 150))
        ]
        await asyncio.sleep(3)
        computed = Counter[str]()
        for sent in fleet.order:
            computed[sent.tenant] += len(sent.prompt_ids) - 50
        assert computed["a"] == pytest.approx(computed["b"], rel=0.15)
        assert computed["heavy"] == pytest.approx(3 * computed["a"], rel=0.15)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_own_priority_orders_a_tenants_requests_and_the_operators_the_engines() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.1)
        tasks = [asyncio.create_task(ask(client, "first", "a", 500))]
        await asyncio.sleep(0.05)
        for name, priority in (("low", 1), ("later", 0), ("high", -9)):
            tasks.append(asyncio.create_task(ask(client, name, "a", 500, priority=priority)))
        tasks.append(asyncio.create_task(ask(client, "other", "heavy", 500, priority=100)))
        tasks.append(asyncio.create_task(ask(client, "nobody", "", 500, priority=7)))
        await asyncio.gather(*tasks)
        ours = [sent.request_id for sent in fleet.order if sent.tenant == "a"]
        assert ours == ["first", "high", "later", "low"]
        priorities = {sent.request_id: sent.priority for sent in fleet.order}
        assert (priorities["high"], priorities["other"], priorities["nobody"]) == (0, 5, 7)

    run(scenario())


def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    """A client may leave before, while or after its turn comes, or before an engine accepts or refuses."""

    async def scenario(seed: int) -> None:
        draw = random.Random(seed)
        fleet = VirtualFleet(2, rate=1000, accept_s=0.05)
        client = admitting(fleet, ttft_target_s=0.2)
        asked = [(f"r{n}", draw.choice("ab"), draw.randint(1, 300)) for n in range(60)]
        tasks = [asyncio.create_task(ask(client, *arguments)) for arguments in asked]
        for task in draw.sample(tasks, 40):
            await asyncio.sleep(draw.choice((0, 0, 0.01, 0.05, 0.1)))
            before = client.num_waiting
            task.cancel()
            await asyncio.sleep(0)
            assert client.num_waiting <= before
        await asyncio.gather(*tasks, return_exceptions=True)
        # Clients that left cost the others no more than what had been sent.
        assert now() <= sum(len(sent.prompt_ids) for sent in fleet.order) / 1000 + 1
        assert_nothing_is_left(client, fleet)

    for seed in range(30):
        run(scenario(seed))


def test_waiting_too_long_is_refused_with_a_time_to_come_back() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.5, max_wait_s=3)
        tasks = [asyncio.create_task(ask(client, f"r{n}", "a", 1000)) for n in range(20)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        assert len(refused) == 16 and {error.kind for error in refused} == {"deadline"}
        assert "within 3 s" in refused[0].reason
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_a_request_that_cannot_meet_its_deadline_at_the_measured_rate_is_refused_immediately() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.5, max_wait_s=100)
        tasks = [asyncio.create_task(ask(client, f"r{n}", "a", 1000)) for n in range(40)]
        await asyncio.sleep(10.2)
        began = now()
        with pytest.raises(Overloaded, match=r"about (29|30|31) s") as refused:
            await client.generate(request("late", "a", 100, max_wait_s=5))
        assert now() == began
        # 30 prompts of a second each remain, so in 25 s the rest fits the limit.
        assert refused.value.retry_after_s == pytest.approx(24, abs=4)
        # Another tenant shares the engine with the first, so its request fits the limit.
        assert await ask(client, "other", "b", 100, max_wait_s=5) < 5
        await asyncio.gather(*tasks)

    run(scenario())


def test_a_tenants_flood_is_refused_and_others_are_not() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.1, max_waiting=10, max_waiting_per_tenant=6)
        flood = [asyncio.create_task(ask(client, f"r{n}", "a", 200)) for n in range(20)]
        await asyncio.sleep(0.05)
        assert await ask(client, "other", "b", 100) < 1.5
        refused = [e for e in await asyncio.gather(*flood, return_exceptions=True) if isinstance(e, Overloaded)]
        assert len(refused) >= 12 and {error.kind for error in refused} == {"tenant_queue_full"}
        assert all(1 <= error.retry_after_s <= 600 for error in refused)

    run(scenario())


def test_the_backlog_counts_requests_that_wait_and_those_that_leave_without_an_engine() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.5, max_wait_s=3, max_waiting_per_tenant=8)
        backlog = client.admission.backlog
        assert backlog() == Backlog()
        tasks = [asyncio.create_task(ask(client, f"r{n}", "a", 1000)) for n in range(12)]
        await asyncio.sleep(0.1)
        assert backlog() == Backlog(8, 8000, 3, 3000)  # one runs, and for three there was no place
        tasks[5].cancel()
        await asyncio.sleep(0.1)
        assert backlog() == Backlog(7, 7000, 4, 4000)
        await asyncio.gather(*tasks, return_exceptions=True)  # three more run within the 3 s
        assert backlog() == Backlog(0, 0, 8, 8000)
        with pytest.raises(Overloaded, match="this request's limit"):
            busy = [asyncio.create_task(ask(client, f"s{n}", "a", 900)) for n in range(3)]
            await asyncio.sleep(0.1)
            await client.generate(request("hasty", "a", 500, max_wait_s=0.1))
        assert backlog().turned_away == 9
        await asyncio.gather(*busy)

    run(scenario())


def test_each_role_hears_of_the_work_that_it_will_do() -> None:
    """Prompts of more than 500 tokens go apart: they are computed there, and all requests end elsewhere."""

    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        settings = AdmissionSettings(ttft_target_s=0.5, max_wait_s=3, max_waiting_per_tenant=4)
        admission = Admission(fleet, settings, TENANTS, is_apart=lambda num_uncached: num_uncached > 500)
        client = ModelClient(fleet, admission)
        sizes = (1000, 1000, 400, 900, 100, 800, 200)  # the first one runs, and the last two find no place
        tasks = [asyncio.create_task(ask(client, f"r{n}", "a", size)) for n, size in enumerate(sizes)]
        await asyncio.sleep(0.1)
        assert admission.backlog("prefill") == Backlog(2, 1900, 1, 800)
        assert admission.backlog("decode") == Backlog(4, 500, 2, 200)
        assert admission.backlog() == Backlog(4, 2400, 2, 1000)
        tasks[1].cancel()
        await asyncio.sleep(0.1)
        assert admission.backlog("prefill") == Backlog(1, 900, 2, 1800)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [admission.backlog(role).num_tokens for role in ("prefill", "decode")] == [0, 0]

    run(scenario())


def test_a_request_that_an_engine_refuses_is_not_charged_and_delays_no_other() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.1)
        first = asyncio.create_task(ask(client, "first", "a", 1000))
        await asyncio.sleep(0.05)
        fleet.refuse_with = Rejected("too long")
        refused = [asyncio.create_task(ask(client, f"r{n}", "a", 1000)) for n in range(5)]
        outcomes = await asyncio.gather(*refused, return_exceptions=True)
        assert all(isinstance(outcome, Rejected) for outcome in outcomes)
        await first
        assert now() < 1.2
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_no_tenant_starves_behind_heavier_ones() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=10_000)
        tenants = {"light": Tenant("light", 0.1), **{f"t{n}": Tenant(f"t{n}", 10.0) for n in range(5)}}
        settings = AdmissionSettings(ttft_target_s=0.1, quantum_tokens=100, max_wait_s=1000)
        client = Admitting(fleet, fleet, settings, tenants)
        tasks = [asyncio.create_task(ask(client, f"r{n}", f"t{n % 5}", 1000)) for n in range(1000)]
        await asyncio.sleep(0.5)
        assert await ask(client, "light", "light", 1000) < 10  # one turn of each of the others
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


# --- the bar: one tenant floods at 20 times another's rate ------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


async def quiet_p95(flood: float, target_s: float) -> float:
    """Return the TTFT p95 of a tenant with a tenth of the load, beside one that sends `flood` times as much."""
    draw = random.Random(5)
    fleet = VirtualFleet(4, rate=12_000)
    observed = ObservedFleet(fleet)
    view: LoadView = FleetLoad(observed.known, fleet.uncached_tokens)
    client = Admitting(observed, view, AdmissionSettings(ttft_target_s=target_s))
    heartbeats = asyncio.create_task(observed.send_heartbeats())
    per_second = 0.1 * 4 * 12_000 / 4250
    times: dict[str, list[float]] = {"a": [], "b": []}
    numbers = count()

    async def one(tenant: str, number: int, tokens: int) -> None:
        try:
            times[tenant].append(await ask(client, f"{tenant}{number}", tenant, tokens))
        except Overloaded:
            assert tenant == "b"

    async def arrivals(tenant: str, rate: float) -> None:
        own = random.Random(draw.random())
        async with asyncio.TaskGroup() as group:
            while now() < 120:
                await asyncio.sleep(own.expovariate(rate))
                group.create_task(one(tenant, next(numbers), own.randint(500, 8000)))

    async with asyncio.TaskGroup() as group:
        group.create_task(arrivals("a", per_second))
        if flood:
            group.create_task(arrivals("b", per_second * flood))
    heartbeats.cancel()
    assert len(times["a"]) > 100
    return percentile(times["a"], 0.95)


def test_a_flood_of_20_times_the_rate_raises_another_tenants_ttft_by_at_most_half() -> None:
    alone = run(quiet_p95(0, 0.15))
    flooded = run(quiet_p95(20, 0.15))
    unfair = run(quiet_p95(20, 1e9))
    assert flooded <= 1.5 * alone, (alone, flooded)
    assert unfair > 10 * alone  # so the test would detect a failure


def test_deferrable_requests_take_the_capacity_that_others_leave_whatever_their_priority() -> None:
    """300 of one tenant wait first; each of the others' is sent as if it were alone."""

    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.5, max_wait_s=100)
        flood = [
            asyncio.create_task(ask(client, f"d{n}", "a", 100, priority=-100, is_deferrable=True))
            for n in range(300)
        ]
        await asyncio.sleep(2)
        assert client.num_waiting > 200
        for n in range(10):
            assert await ask(client, f"i{n}", "b", 100, priority=100) <= 0.21  # its own and the one that is begun
            await asyncio.sleep(0.05)
        await asyncio.gather(*flood)
        assert now() == pytest.approx(31, abs=3.1), "and they took what was left"
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_a_waiting_deferrable_request_makes_no_other_wait_or_be_refused() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.5, max_wait_s=3.0, max_waiting_per_tenant=20)
        urgent = [asyncio.create_task(ask(client, f"i{n}", "b", 100)) for n in range(20)]
        await asyncio.sleep(0.01)
        flood = [asyncio.create_task(ask(client, f"d{n}", "b", 100, is_deferrable=True)) for n in range(40)]
        answers = await asyncio.gather(*urgent)
        assert max(answers) == pytest.approx(2, abs=0.1)
        found = await asyncio.gather(*flood, return_exceptions=True)
        refused = [error for error in found if isinstance(error, Overloaded)]
        assert len(refused) >= 20 and all(isinstance(error, Overloaded | float) for error in found)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_tenants_take_turns_with_their_deferrable_requests() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, quantum_tokens=100)
        flood = [asyncio.create_task(ask(client, f"a{n}", "a", 100, is_deferrable=True)) for n in range(200)]
        await asyncio.sleep(1)
        assert await ask(client, "b", "b", 100, is_deferrable=True) < 0.6
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    run(scenario())


def test_where_there_are_no_tenants_addresses_take_turns() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=0.2, quantum_tokens=100, max_wait_s=100)
        flood = [asyncio.create_task(ask(client, f"f{n}", "anonymous", 100, address="a")) for n in range(200)]
        await asyncio.sleep(1)
        for n in range(5):
            assert await ask(client, f"one {n}", "anonymous", 100, address="b") < 0.7
        await asyncio.gather(*flood)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_a_higher_target_lets_requests_through_that_wait_already() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, ttft_target_s=1.0)
        tasks = [asyncio.create_task(ask(client, f"r{n}", tokens=500)) for n in range(10)]
        await asyncio.sleep(0.1)
        assert client.num_waiting >= 6
        client.admission.take_over(AdmissionSettings(ttft_target_s=100.0), {})
        await asyncio.sleep(0.1)
        assert client.num_waiting == 0
        await asyncio.gather(*tasks)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_other_bounds_and_weights_hold_for_deferrable_requests_too() -> None:
    async def scenario() -> None:
        fleet = VirtualFleet(1, rate=1000)
        client = admitting(fleet, quantum_tokens=100)
        flood = [asyncio.create_task(ask(client, f"a{n}", "a", 100, is_deferrable=True)) for n in range(100)]
        await asyncio.sleep(0)
        client.admission.take_over(
            AdmissionSettings(quantum_tokens=100, max_waiting_per_tenant=60), {"b": Tenant("b", 4.0)}
        )
        with pytest.raises(Overloaded):
            await ask(client, "one more", "a", 100, is_deferrable=True)
        others = [asyncio.create_task(ask(client, f"b{n}", "b", 100, is_deferrable=True)) for n in range(40)]
        await asyncio.gather(*others)
        assert sum(task.done() for task in flood) == pytest.approx(10, abs=3)  # of five turns, four were b's
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert_nothing_is_left(client, fleet)

    run(scenario())


def test_a_full_batch_delays_no_tenant_for_which_the_engine_makes_room() -> None:
    """Another tenant's requests fill the batch for as long as their answers take."""

    class Full(VirtualFleet):
        def queue_seconds(self, num_sending: int) -> float:
            return 30.0

        def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
            return {"b"} & set(tenants) if num_sending < 2 else set()

    async def scenario() -> None:
        fleet = Full(1, accept_s=10.0)
        client = admitting(fleet, ttft_target_s=1.0)
        asks = [asyncio.create_task(ask(client, f"r{n}", tenant=tenant)) for n, tenant in enumerate("aabbb")]
        await asyncio.sleep(5.0)
        assert client.num_waiting == 3, "the first two of the other tenant are on their way"
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        assert_nothing_is_left(client, fleet)

    run(scenario())
