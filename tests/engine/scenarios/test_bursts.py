"""Equal and similar prompts at once: what is computed once, what is counted, and what may not be shared."""

from __future__ import annotations

from tests.engine.scenarios.conftest import Make
from tests.engine.support import hash_model


def test_several_answers_to_one_question_compute_it_once(engine: Make) -> None:
    """Eight times 4,000 tokens would be 2,000 pages; eight answers fit in the memory of one question."""
    script = engine(num_pages=300, page_size=16, limits={"max_step_tokens": 512})
    names = [script.arrive([5] * 4000, max_tokens=12, seed=seed) for seed in range(8)]
    script.run()
    assert len({tuple(script.tokens(name)) for name in names}) == 8
    assert script.num_computed(*names) <= 4000 + 8 * (16 + 11), "none computes more than its last page of it"
    assert script.scheduler.load(script.now).num_preemptions == 0


def test_each_prompt_counts_once_as_a_query_and_its_cached_tokens_once_as_hits(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 8})
    names = [script.arrive(range(1, 34), max_tokens=3, seed=seed) for seed in range(4)]
    script.run()
    stats = script.cache.stats
    assert stats.query_tokens == 4 * 33
    assert stats.hit_tokens == sum(script.events[name][-1].num_cached for name in names)
    assert script.num_computed(*names) == 4 * (33 + 2) - stats.hit_tokens


def test_a_burst_larger_than_the_batch_reuses_the_pages_of_the_first_requests(engine: Make) -> None:
    script = engine(num_pages=40, limits={"max_running": 2})
    names = [script.arrive(range(1, 34), max_tokens=3, seed=seed) for seed in range(7)]
    script.run()
    assert [script.events[name][-1].num_cached for name in names][2:] == [32] * 5


def test_tenants_that_share_nothing_wait_for_no_others_page(engine: Make) -> None:
    script = engine(num_pages=100, limits={"max_step_tokens": 64})
    names = [script.arrive(range(1, 25), max_tokens=2, salt=salt) for salt in ("a", "b", "a", "b")]
    script.step()
    assert script.scheduler.load(script.now).num_deferred == 2
    script.run()
    assert [script.events[name][-1].num_cached for name in names[:2]] == [0, 0]
    assert min(script.events[name][-1].num_cached for name in names[2:]) >= 20


def test_a_prompt_that_is_scored_takes_nothing_and_gives_all(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 4})
    plain = script.arrive(range(1, 34), max_tokens=3)
    script.run()
    scored = script.arrive(range(1, 34), max_tokens=3, prompt_logprobs=1)
    beside = script.arrive(range(1, 34), max_tokens=3)
    script.run()
    assert [script.events[name][-1].num_cached for name in (plain, scored, beside)] == [0, 0, 32]
    assert script.scores(scored) == hash_model.scores(range(1, 34), 1, 1)
    assert script.scheduler.account().evictable == -(-(33 + 2) // 4), "one copy stays"


def test_two_prompts_that_are_scored_are_computed_twice(engine: Make) -> None:
    script = engine(limits={"max_step_tokens": 8, "max_running": 4})
    names = [script.arrive(range(1, 34), max_tokens=2, prompt_logprobs=top) for top in (0, 3)]
    script.run()
    for name, top in zip(names, (0, 3), strict=True):
        assert script.scores(name) == hash_model.scores(range(1, 34), 1, top)
    assert script.num_computed(*names) == 2 * 34


def test_tokens_scored_elsewhere_are_not_scored_again_and_may_be_found(engine: Make) -> None:
    """A resumed request had 20 tokens' scores reported, so their KV is of use, and the others' is not."""
    script = engine(limits={"max_step_tokens": 8, "max_running": 4})
    script.arrive(range(1, 34), max_tokens=1)
    script.run()
    a = script.arrive(range(1, 34), max_tokens=3, prompt_logprobs=2, num_prompt_reported=20)
    script.run()
    assert script.scores(a) == hash_model.scores(range(1, 34), 20, 2)
    assert script.num_computed(a) == 33 - 19 + 2


def test_a_request_that_comes_while_the_first_one_decodes_finds_its_prompt(engine: Make) -> None:
    script = engine()
    a = script.arrive(range(1, 22), max_tokens=12)
    script.run(until=lambda: len(script.tokens(a)) == 4)
    b = script.arrive(range(1, 22), max_tokens=12)
    script.run()
    assert script.events[b][-1].num_cached == 20


def test_two_requests_continue_one_conversation_at_the_same_time(engine: Make) -> None:
    script = engine(num_pages=40)
    a = script.arrive(range(1, 22), max_tokens=10)
    script.run()
    history = [*range(1, 22), *script.tokens(a)]
    names = [script.arrive([*history, word, 5], max_tokens=8) for word in (70, 80)]
    script.run()
    assert [script.events[name][-1].num_cached for name in names] == [30, 30]


def test_a_request_that_waited_for_a_preempted_ones_page_computes_it(engine: Make) -> None:
    script = engine(num_pages=30, limits={"max_step_tokens": 8, "max_running": 3})
    a = script.arrive(range(1, 61), max_tokens=2)
    b = script.arrive([*range(1, 31), 99], max_tokens=2)
    script.run(until=lambda: script.scheduler.load(script.now).num_deferred == 1)
    assert script.is_running(a) and not script.is_running(b)
    high = script.arrive(range(200, 300), max_tokens=4, priority=-3)
    script.run(until=lambda: bool(script.tokens(high)))
    assert script.requests[a].num_preemptions == 1
    script.run()
    assert script.reason(a) == script.reason(b) == "length"
