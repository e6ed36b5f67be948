"""Pages that run out, prefixes that end anywhere, and which pages are given up for which request."""

from __future__ import annotations

import pytest

from cache import Namespace
from tests.engine.scenarios.conftest import Make
from tests.engine.support.script import Script


def held(script: Script, tokens: list[int]) -> int:
    """Return how many of the tokens a prompt that continues them would find in the tree."""
    return script.cache.peek(Namespace("m"), [*tokens, 999])


def test_the_second_of_two_prompts_that_do_not_fit_together_waits(engine: Make) -> None:
    script = engine(num_pages=8)
    a, b = script.arrive(range(1, 21), max_tokens=4), script.arrive(range(50, 70), max_tokens=4)
    script.run(until=lambda: script.reason(a) is not None)
    assert script.chunks(b) == []
    script.run()
    assert all(script.requests[name].num_preemptions == 0 for name in (a, b))


def test_a_prefix_just_matched_is_not_evicted_for_the_request_that_matched_it(engine: Make) -> None:
    """The request needs all eight pages: four of them are found, and the rest of the first one's are evicted."""
    script = engine(num_pages=8)
    script.arrive(range(1, 17), max_tokens=8)
    script.run()
    b = script.arrive([*range(1, 17), *range(100, 113)], max_tokens=3)
    script.run()
    assert script.events[b][-1].num_cached == 16
    assert script.cache.stats.evicted_pages > 0


def test_a_match_inside_a_page_is_given_up_where_its_copy_finds_no_room(engine: Make) -> None:
    """Another request runs: the page in which the match ends would be one more to keep."""
    script = engine(num_pages=8)
    script.arrive(range(1, 12), max_tokens=1)
    script.run()
    script.arrive(range(50, 62), max_tokens=4)
    script.step()
    b = script.arrive([*range(1, 11), *range(70, 75)], max_tokens=1)
    script.run()
    assert script.events[b][-1].num_cached == 8


def test_the_prefix_used_last_is_evicted_last(engine: Make) -> None:
    script = engine(num_pages=12)
    first, second = list(range(1, 14)), list(range(50, 63))
    for prompt in (first, second, first):
        script.arrive(prompt, max_tokens=1)
        script.run()
    script.arrive(range(100, 128), max_tokens=1)
    script.run()
    assert held(script, first) >= 12
    assert held(script, second) <= 8


def test_an_answer_goes_before_the_prompt_that_others_share(engine: Make) -> None:
    script = engine(num_pages=16)
    system = list(range(1, 17))
    answers = []
    for turn in (50, 60):
        name = script.arrive([*system, turn], max_tokens=8)
        script.run()
        answers.append([*system, turn, *script.tokens(name)])
    script.arrive(range(100, 140), max_tokens=1)
    script.run()
    assert held(script, system) == 16
    assert min(held(script, answer) for answer in answers) < 24


def test_the_prefix_of_a_running_request_is_never_evicted(engine: Make) -> None:
    script = engine(num_pages=16, limits={"max_running": 2})
    script.arrive(range(1, 17), max_tokens=1)
    script.run()
    a = script.arrive([*range(1, 17), 90], max_tokens=12)
    script.step()
    for i in range(4):
        script.arrive([100 + i] * 20, max_tokens=2)
    script.run(until=lambda: len(script.tokens(a)) == 10)
    assert held(script, list(range(1, 17))) == 16
    script.run()
    assert script.requests[a].num_preemptions == 0


def test_two_that_part_inside_a_page_get_a_copy_each(engine: Make) -> None:
    script = engine()
    script.arrive(range(1, 12), max_tokens=1)
    script.run()
    names = [script.arrive([*range(1, 11), last], max_tokens=9) for last in (50, 60)]
    script.step()
    (plan,) = [plan for plan in script.runner.plans if plan.copies]
    assert len({copy.source for copy in plan.copies}) == 1
    assert len({copy.target for copy in plan.copies}) == 2
    script.run()
    assert [script.events[name][-1].num_cached for name in names] == [10, 10]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_prompts_that_end_near_the_border_of_a_page_are_found(engine: Make, page_size: int, beyond: int) -> None:
    """A prompt runs fresh, again, and as the beginning of another: all but its last token is found."""
    script = engine(num_pages=200 // page_size, page_size=page_size)
    prompt = list(range(1, 2 * page_size + beyond + 1)) or [1]
    found = []
    for asked in (prompt, prompt, [*prompt, 77, 78]):
        name = script.arrive(asked, max_tokens=page_size + 1)
        script.run()
        found.append(script.events[name][-1].num_cached)
    assert found == [0, len(prompt) - 1, len(prompt)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_conversation_computes_every_token_once(engine: Make, page_size: int) -> None:
    script = engine(num_pages=512 // page_size, page_size=page_size)
    history, names = [1, 2, 3], []
    for turn in range(12):
        names.append(script.arrive(history, max_tokens=5 + turn))
        script.run()
        history += [*script.tokens(names[-1]), 100 + turn, 200 + turn]
    assert script.num_computed(*names) == len(history) - 3, (
        "all but the last answer's last token and what was added"
    )


def test_pages_that_two_requests_computed_alike_are_kept_once(engine: Make) -> None:
    """Equal prompts run side by side; neither could share what the other was about to compute."""
    script = engine()
    names = [script.arrive(range(1, 4), max_tokens=20) for _ in range(2)]
    script.run()
    assert script.tokens(names[0]) == script.tokens(names[1])
    assert script.scheduler.account().evictable == -(-(3 + 20 - 1) // 4)


def test_a_request_of_all_the_memory_gets_it_from_a_full_cache(engine: Make) -> None:
    script = engine(num_pages=9)
    for i in range(4):
        script.arrive([10 * i + 1] * 9, max_tokens=2, salt=str(i % 2))
        script.run()
    a = script.arrive(range(100, 130), max_tokens=6)
    script.run()
    assert script.reason(a) == "length" and script.cache.stats.evicted_pages >= 9


def test_without_a_prefix_cache_a_burst_shares_nothing_and_leaves_nothing(engine: Make) -> None:
    script = engine(prefix_cache=False, num_pages=40, limits={"max_step_tokens": 16, "max_running": 8})
    names = [script.arrive(range(1, 20), max_tokens=6) for _ in range(5)]
    script.run()
    assert script.num_computed(*names) == 5 * (19 + 5)
    assert script.scheduler.account().free == 40


def test_another_namespace_makes_way_but_is_never_found(engine: Make) -> None:
    script = engine(num_pages=8)
    found = []
    for salt in ("one", "two", "one"):
        name = script.arrive(range(1, 25), max_tokens=4, salt=salt)
        script.run()
        found.append(script.events[name][-1].num_cached)
    assert found[:2] == [0, 0] and 0 < found[2] < 23
