"""Precomputing prompts: their KV stays, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache import Namespace
from engine.program.precompute import precompute
from engine.values.beam_search import BeamParams
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.script import Script


def prompts(script: Script, token_ids: Sequence[Sequence[int]], salt: str = "") -> list[Request]:
    return [
        Request.make(
            f"p{number}",
            list(ids),
            SamplingParams(max_tokens=1),
            arrival=script.now,
            seed=0,
            namespace=Namespace("m", salt=salt),
        )
        for number, ids in enumerate(token_ids)
    ]


def test_a_request_finds_precomputed_prefixes_and_the_totals_are_its_own() -> None:
    script = Script(num_pages=64)
    system = list(range(1, 41))
    done = precompute(script.loop, prompts(script, [system, [*system, *range(50, 60)]]), 1e9)
    assert (done.num_prompts, done.num_tokens) == (2, 50)
    load = script.loop.load()
    assert (load.num_steps, load.num_finished, load.cache.query_tokens) == (0, 0, 0)
    assert load.pages.evictable == 13  # 50 tokens in pages of 4
    name = script.arrive([*system, 99, 98])
    script.run()
    assert script.requests[name].num_cached == 40
    assert script.tokens(name) == script.undisturbed(name)
    assert script.loop.load().cache.hit_tokens == 40
    assert script.nothing_held()


def test_salts_stay_apart() -> None:
    script = Script()
    precompute(script.loop, prompts(script, [range(1, 41)], salt="tenant"), 1e9)
    name = script.arrive(range(1, 41))
    salted = script.arrive(range(1, 41), salt="tenant")
    script.run()
    assert (script.requests[name].num_cached, script.requests[salted].num_cached) == (0, 39)


def test_when_the_time_is_up_computed_prefixes_stay_and_nothing_keeps_running() -> None:
    script = Script(num_pages=200, limits={"max_step_tokens": 10})
    clock = iter(range(10**6))
    script.loop.clock = lambda: float(next(clock))  # every look at it is a second later
    done = precompute(script.loop, prompts(script, [range(1, 101), range(201, 301)]), 30.0)
    assert done.num_prompts < 2
    assert 10 <= done.num_tokens < 200
    assert not script.loop.has_work
    assert script.nothing_held()


def test_prompts_that_never_fit_are_left_out_and_a_short_queue_is_no_bound() -> None:
    script = Script(num_pages=64, limits={"max_waiting": 1, "max_model_len": 50})
    done = precompute(
        script.loop, prompts(script, [range(1, 200), range(1, 9), range(11, 19), range(21, 29)]), 1e9
    )
    assert (done.num_prompts, done.num_tokens) == (3, 24)


def test_a_running_loop_keeps_its_totals() -> None:
    script = Script()
    script.loop.start(lambda events: None)
    with pytest.raises(RuntimeError, match="running"):
        script.loop.forget_totals()
    script.loop.stop()


def test_a_shared_prefix_is_found_under_every_salt_from_the_first_request_on() -> None:
    """Its pages are held once; what follows it is each salt's own, also for beams and after a preemption."""
    script = Script(num_pages=40)
    system = list(range(1, 41))
    (request,) = prompts(script, [system])
    precompute(script.loop, [request], 1e9)
    assert script.scheduler.share(request.namespace, system) == 40
    assert (script.scheduler.max_model_len, script.scheduler.account().locked) == ((40 - 10) * 4, 10)
    question = [*system, 50, 51, 52, 53, 54]
    for salt, found in (("a", 40), ("b", 40), ("a", 44), ("", 40)):
        name = script.arrive(question, salt=salt, max_tokens=30)
        script.run()
        assert (script.requests[name].num_cached, script.tokens(name)) == (found, script.undisturbed(name))
    crowd = [script.arrive([*question, number], salt=f"s{number}", max_tokens=60) for number in range(4)]
    script.run()
    for name in crowd:
        assert (script.requests[name].num_cached, script.tokens(name)) == (40, script.undisturbed(name))
    assert script.scheduler.allocator.num_preemptions > 0
    beams = script.arrive(question, salt="beams", beams=BeamParams(3), max_tokens=6)
    script.run()
    assert script.found(beams) == script.found_alone(beams)
    account = script.scheduler.account()
    assert (account.locked, account.private) == (10, 0)
    script.cache.reset()
    assert script.scheduler.account() == (30, 0, 10, 0, 0)
