"""A request's reported timings and recomputed tokens, compared with the steps that the runner executed."""

from __future__ import annotations

from engine.values.beam_search import BeamParams
from engine.values.stream_delta import Timings
from tests.engine.support.script import Script


def timings_of(script: Script, name: str) -> dict[int, Timings]:
    """Return timings by the number of tokens after which they were reported."""
    by_tokens, count = {}, 0
    for event in script.events[name]:
        count += len(event.token_ids)
        if event.timings is not None:
            by_tokens[count] = event.timings
    return by_tokens


def num_computed(script: Script, name: str) -> int:
    """Tokens that the runner computed for a request, some of them several times."""
    return sum(
        chunk.num_tokens
        for plan in script.runner.plans
        for chunk in plan.chunks
        if chunk.request.request_id == name
    )


def test_the_first_delta_has_timings_and_so_has_the_last() -> None:
    script = Script(limits={"max_step_tokens": 4})
    a = script.arrive(range(1, 11), max_tokens=5)
    script.run()
    timings = timings_of(script, a)
    assert list(timings) == [1, 5]
    assert (timings[1].prefill, timings[1].decode) == (2, 0)  # three steps, admitted at the first
    assert (timings[5].prefill, timings[5].decode) == (2, 4)
    assert timings[5].num_preemptions == timings[5].num_recomputed == 0
    assert num_computed(script, a) == 10 + 5 - 1


def test_a_preempted_request_reports_its_recomputed_tokens() -> None:
    script = Script(num_pages=24, page_size=4)
    a = script.arrive(range(1, 33), max_tokens=30)
    b = script.arrive(range(100, 132), max_tokens=30)
    script.run()
    timings = timings_of(script, b)
    assert min(timings) == 1 and max(timings) == 30
    last = timings[30]
    assert last.num_preemptions == script.requests[b].num_preemptions > 0
    assert last.num_recomputed == num_computed(script, b) - (32 + 30 - 1) > 0
    # A client that stops at the first token after the preemption knows of it as well.
    assert any(
        0 < count < 30 and timing.num_preemptions == last.num_preemptions for count, timing in timings.items()
    )
    assert timings_of(script, a)[30].num_preemptions == timings_of(script, a)[30].num_recomputed == 0


def test_tokens_that_another_engine_had_computed_count_as_recomputed() -> None:
    """40 prompt and 5 output ids; the cache knows the first 17 of the prompt."""
    script = Script(page_size=4)
    script.arrive([*range(1, 18), 900], max_tokens=1)
    script.run()
    resumed = script.arrive(range(1, 41), output_ids=[50, 51, 52, 53, 54], max_tokens=8)
    script.run()
    (last,) = [timings for count, timings in timings_of(script, resumed).items() if count == 3]
    assert script.requests[resumed].num_cached == 17
    assert last.num_recomputed == 40 + 5 - 1 - 17
    assert num_computed(script, resumed) == last.num_recomputed + 1 + 3 - 1


def test_an_aborted_request_has_all_timings_but_its_decode() -> None:
    script = Script()
    a = script.arrive(range(1, 11), max_tokens=50)
    script.run(until=lambda: len(script.tokens(a)) == 7)
    assert list(timings_of(script, a)) == [1]
    script.abort(a)
    script.run()
    assert script.reason(a) == "abort"
    assert script.events[a][-1].timings is not None


def test_the_most_pages_that_a_request_held_are_reported_though_it_gave_them_up() -> None:
    """Shared pages count: the second request finds the first one's prompt in the cache."""
    script = Script(num_pages=24, page_size=4)
    a = script.arrive(range(1, 33), max_tokens=30)
    b = script.arrive(range(100, 132), max_tokens=30)
    script.run()
    assert script.requests[b].num_preemptions > 0
    assert timings_of(script, a)[1].kv_pages_peak == 32 // 4
    assert (
        timings_of(script, a)[30].kv_pages_peak
        == timings_of(script, b)[30].kv_pages_peak
        == -(-(32 + 30 - 1) // 4)
    )
    again = script.arrive(range(1, 33), max_tokens=1)
    script.run()
    assert timings_of(script, again)[1].kv_pages_peak == 32 // 4


def test_beams_share_pages_and_each_page_counts_once() -> None:
    script = Script(page_size=4)
    name = script.arrive(range(1, 33), max_tokens=4, beams=BeamParams(3, 1))
    script.run()
    (peak,) = (timings.kv_pages_peak for timings in timings_of(script, name).values())
    assert 32 // 4 < peak <= 32 // 4 + 3
