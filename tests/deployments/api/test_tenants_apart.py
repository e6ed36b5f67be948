"""Tenants learn nothing of each other's prompts: the real API over the real client, wire and engine loops."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from deployments.config.tenants import TenantSettings, hash_key
from tests.deployments.support.api_over_engines import ADMIN_KEY, PROMPT, Api, api_over


def tenant(name: str, **fields: Any) -> TenantSettings:
    return TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),), **fields)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {ADMIN_KEY if name == 'admin' else f'key-of-{name}'}"}


def reported_cached(answer: httpx.Response) -> int:
    """The cached tokens that an answer reports, in each of the places that report them."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    in_usage = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    places = {in_usage, body["timings"]["cached_tokens"], int(answer.headers["x-raydix-cached-tokens"])}
    assert len(places) == 1, places
    return int(places.pop())


async def cached(api: Api, name: str, prompt: list[int], **body: Any) -> int:
    return reported_cached(await api.complete(key(name), prompt=prompt, max_tokens=1, **body))


def test_two_tenants_see_no_hit_of_each_other() -> None:
    async def play() -> None:
        async with api_over(tenants=[tenant("a"), tenant("b")]) as api:
            assert [await cached(api, name, PROMPT) for name in ("a", "b", "admin")] == [0, 0, 0]
            assert [await cached(api, name, PROMPT) for name in ("a", "b", "admin")] == [len(PROMPT) - 1] * 3
            assert await cached(api, "a", PROMPT, cache_salt="user-1") == 0

    asyncio.run(play())


def test_no_guess_at_another_tenants_prompt_is_confirmed() -> None:
    """The victim's prompt is 20 tokens, of which the attacker knows 12; the right 13th looks like any other."""

    async def play() -> None:
        async with api_over(tenants=[tenant("victim"), tenant("attacker")]) as api:
            assert await cached(api, "victim", PROMPT) == 0
            known = PROMPT[:12]
            assert await cached(api, "attacker", [*known, 7, 7]) == 0
            guesses = {guess: await cached(api, "attacker", [*known, guess, 0]) for guess in range(105, 120)}
            assert PROMPT[12] in guesses and set(guesses.values()) == {12}

    asyncio.run(play())


def test_one_tenants_prompts_are_shared_as_without_tenants() -> None:
    async def play() -> None:
        async with api_over(tenants=[tenant("only")]) as api:
            assert [await cached(api, name, PROMPT) for name in ("only", "only", "admin")] == [0, 19, 19]

    asyncio.run(play())


def test_only_the_admin_or_a_single_tenant_gets_an_explanation_of_a_decision() -> None:
    """A single tenant is told too: there is nobody else."""

    async def play() -> None:
        explain = {"x-raydix-explain": "true"}
        async with api_over(tenants=[tenant("a"), tenant("b")]) as api:
            refused = await api.complete(key("a") | explain)
            assert refused.status_code == 403 and "admin_key_hash" in refused.json()["error"]["message"]
            assert (await api.complete(key("admin") | explain)).status_code == 200
        async with api_over(tenants=[tenant("only")]) as api:
            assert (await api.complete(key("only") | explain)).status_code == 200

    asyncio.run(play())


SHARED = list(range(500, 532))


@pytest.mark.parametrize("isolated", [True, False])
def test_a_shared_prefix_is_reported_as_cached_from_the_first_request_on(isolated: bool) -> None:
    async def play() -> None:
        tenants = [tenant("a", isolate_cache=isolated), tenant("b", isolate_cache=isolated)]
        async with api_over(tenants=tenants, shared=[SHARED]) as api:
            for name in ("a", "b"):
                assert await cached(api, name, [*SHARED, *PROMPT]) == len(SHARED)
                assert await cached(api, name, [*SHARED, 1]) == len(SHARED)
            # What came after it is each tenant's own.
            again = await cached(api, "a", [*SHARED, *PROMPT])
            assert again == (len(SHARED) + len(PROMPT) - 1 if isolated else len(SHARED))
            assert await cached(api, "b", [*SHARED, *PROMPT[:5], 1]) == len(SHARED) + (5 if isolated else 0)

    asyncio.run(play())


def test_answers_hide_the_recomputed_tokens_of_a_cache_that_tenants_share() -> None:
    """After a preemption or a loss, that may be what another tenant has computed."""

    async def play() -> None:
        tenants = [tenant("a", isolate_cache=False), tenant("b", isolate_cache=False), tenant("c")]
        async with api_over(tenants=tenants) as api:
            for name, recomputed in (("a", None), ("c", 0), ("admin", 0)):
                for n in (1, 2):
                    timings = (await api.complete(key(name), prompt=PROMPT, n=n)).json()["timings"]
                    assert [one["recomputed_tokens"] for one in (timings, *timings.get("choices", ()))] == [
                        recomputed
                    ] * (n if n == 1 else n + 1)

    asyncio.run(play())


def test_answers_report_only_configured_facts_about_a_cache_that_tenants_share() -> None:
    """The engine does find what the other computed: the metrics, for operators, say so."""

    async def play() -> None:
        sharing = [tenant("a", isolate_cache=False), tenant("b", isolate_cache=False), tenant("c")]
        async with api_over(tenants=sharing) as api:
            assert [await cached(api, name, PROMPT) for name in ("a", "b", "a", "c")] == [0, 0, 0, 0]
            stats = api.engines.replicas[0].engine.cache.stats
            assert stats.hit_tokens == 2 * (len(PROMPT) - 1)

    asyncio.run(play())
