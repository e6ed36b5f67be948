"""What an engine lends: the device's pages and the host's, as they are until they are given back."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any

import pytest

from cache import Namespace
from engine.base.errors import EngineStopped
from engine.host_tier.host_pool import HostAccount
from engine.host_tier.peers import LentPages
from engine.values.beam_search import BeamParams
from tests.engine.scenarios.conftest import Make
from tests.engine.scenarios.conftest import engine as engine
from tests.engine.support.evicted_prompts import A, B, C, D, ask, evict, made
from tests.engine.support.script import Script


def lend(script: Script, tokens: Sequence[int], first: int = 0) -> LentPages:
    return script.scheduler.lender.lend(Namespace("m"), tokens, first)


def content(script: Script, lent: LentPages) -> list[tuple[int, int, int]]:
    """Return (token, position, group) of each slot of what is lent, as its pages have it."""
    slots = range(script.page_size)
    device = [script.runner.memory[page, slot] for page in lent.device for slot in slots]
    return device + [script.runner.host[page, slot] for page in lent.host for slot in slots]


def kv(tokens: Sequence[int], first: int, stop: int) -> list[tuple[int, int, int]]:
    """Return what pages `first` to `stop` of a prompt must hold, with 4 tokens to a page."""
    return [(tokens[position], position, 0) for position in range(4 * first, 4 * stop)]


@pytest.mark.parametrize("first", [0, 3, 9])
def test_the_whole_pages_of_a_prompt_are_lent_from_where_it_is_asked(engine: Make, first: int) -> None:
    script = engine()
    ask(script, A)
    lent = lend(script, A, first)
    assert (lent.first, len(lent.device), lent.host) == (first, 10 - first, ())
    assert content(script, lent) == kv(A, first, 10)
    assert script.scheduler.account().lent == 10
    script.scheduler.lender.give_back(lent.number)
    assert script.scheduler.account().lent == 0


def test_the_host_continues_where_the_device_ends(engine: Make) -> None:
    script = made(engine, host_min_uses=1)
    ask(script, A)
    evict(script, B, C)
    ask(script, range(1, 20))
    held = script.cache.peek(Namespace("m"), A) // 4
    assert 0 < held < 10
    for first in (0, held - 1, held, held + 1):
        lent = lend(script, A, first)
        assert (len(lent.device), len(lent.host)) == (max(held - first, 0), 10 - max(held, first))
        assert content(script, lent) == kv(A, first, 10)
        assert script.host.account().lent == len(lent.host) and script.host.account().total == 40
        script.scheduler.lender.give_back(lent.number)
    assert script.host.account().lent == script.scheduler.account().lent == 0


def test_lent_pages_survive_pressure_and_a_reset(engine: Make) -> None:
    """Device and host are too small for what comes, and both are emptied meanwhile."""
    script = made(engine, host_min_uses=1, host_pages=14)
    ask(script, A)
    evict(script, B, C)
    ask(script, range(1, 20))
    lent = lend(script, A)
    assert lent.device and lent.host
    evict(script, B, D, range(400, 441))
    script.scheduler.reset_cache()
    evict(script, B, C)
    assert content(script, lent) == kv(A, 0, 10)
    script.scheduler.lender.give_back(lent.number)
    script.scheduler.lender.give_back(lent.number)
    assert script.scheduler.account().lent == script.host.account().lent == 0
    script.scheduler.reset_cache()
    assert script.host.account() == HostAccount(14), "what was lent can be given up"


def test_tokens_that_are_not_held_are_not_lent_and_need_no_return(engine: Make) -> None:
    script = made(engine)
    ask(script, A)
    for tokens, first in ((B, 0), (A[:3], 0), (A, 10), (A, 1000), ([], 0)):
        lent = lend(script, tokens, first)
        assert lent[1:] == (first, (), ())
        assert script.scheduler.account().lent == 0
        script.scheduler.lender.give_back(lent.number)
    with pytest.raises(ValueError, match="position 0 or later, got -1"):
        lend(script, A, -1)


def test_a_loan_is_no_hit(engine: Make) -> None:
    script = engine()
    ask(script, A)
    before = script.cache.stats.copy()
    lent = lend(script, A)
    script.scheduler.lender.give_back(lent.number)
    assert script.cache.stats == before


def test_the_computed_tokens_of_a_running_request_are_lent_while_it_runs(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 7})
    name = script.arrive(A, max_tokens=20)
    lengths = set()
    while script.loop.has_work:
        script.step()
        lent = lend(script, script.requests[name].tokens[:60])
        lengths.add(len(lent.device))
        tokens = [*A, *script.tokens(name)]
        assert content(script, lent) == kv(tokens, 0, len(lent.device))
        script.scheduler.lender.give_back(lent.number)
    assert len(lengths) > 4


@pytest.mark.parametrize(
    ("num_pages", "options"),
    [(16, {"max_tokens": 8}), (24, {"max_tokens": 20, "beams": BeamParams(2, 2)})],
    ids=["alone", "beams"],
)
def test_a_request_that_needs_lent_pages_waits_for_them(
    engine: Make, num_pages: int, options: dict[str, Any]
) -> None:
    """It starts, as nothing else runs, and goes on with its own tokens when the pages come back."""
    script = engine(num_pages=num_pages)
    ask(script, A)
    lent = lend(script, A)
    name = script.arrive(B, **options)
    for _ in range(60):
        script.step()
    assert script.reason(name) is None and content(script, lent) == kv(A, 0, 10)
    assert script.requests[name].num_preemptions == 0
    script.scheduler.lender.give_back(lent.number)
    script.run()
    assert script.reason(name) is not None


def test_the_loop_answers_a_lender_in_any_thread() -> None:
    script = Script()
    ask(script, A)
    script.loop.start(lambda events: None)
    lent = script.loop.lend(Namespace("m"), A, 2).result(60)
    assert content(script, lent) == kv(A, 2, 10)
    assert script.loop.load().pages.total == 64
    script.loop.give_back(lent.number)
    script.loop.give_back(lent.number)
    again = script.loop.lend(Namespace("m"), A, 10).result(60)
    assert again.device == () and script.scheduler.account().lent == 0
    with pytest.raises(ValueError, match="got -3"):
        script.loop.lend(Namespace("m"), A, -3).result(60)
    with pytest.raises(OverflowError):
        script.loop.lend(Namespace("m"), [*A[:20], 2**40], 0).result(60)
    assert script.loop.lend(Namespace("m"), A, 0).result(60).device, "the loop goes on"
    script.loop.stop()


def test_a_loop_that_has_ended_lends_nothing_and_takes_nothing_back() -> None:
    script = Script()
    script.loop.stop()
    with pytest.raises(EngineStopped, match="stopping"):
        script.loop.lend(Namespace("m"), A, 0)
    script.loop.give_back(1)


def test_a_loan_that_comes_too_late_is_cancelled() -> None:
    script = Script()
    asked: SimpleQueue[Future[LentPages]] = SimpleQueue()

    def ask_and_fail(events: object) -> None:
        asked.put(script.loop.lend(Namespace("m"), A, 0))
        script.loop.fail("the test says so")

    script.arrive(A)
    script.loop.start(ask_and_fail)
    with pytest.raises(CancelledError):
        asked.get(timeout=60).result(60)
