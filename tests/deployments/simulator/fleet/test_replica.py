"""One simulated replica: its queue, its cache and its decodes, worked out by hand."""

from __future__ import annotations

import pytest

from deployments.simulator.fleet.replica import Job, SimulatedReplica
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.trace import TraceRequest

SPEED = ServiceModel(prefill_rate=1000.0, decode_base_s=0.01, decode_per_request_s=0.01)


def replica(num_pages: int = 100) -> SimulatedReplica:
    return SimulatedReplica("r", SPEED, num_pages, 100)


def job(num_tokens: int, num_output: int, *blocks: int, at: float = 0.0) -> Job:
    return Job(TraceRequest(at, num_tokens, num_output, blocks), blocks, 0, at)


def run(one: SimulatedReplica, until: float = float("inf")) -> list[tuple[float, Job]]:
    done = []
    while one.next_event() <= until and one.next_event() != float("inf"):
        now = one.next_event()
        done += [(now, finished) for finished in one.advance(now)]
    return done


def test_a_request_waits_for_its_prefill_and_then_decodes() -> None:
    one, request = replica(), job(500, 11, 1, 2, 3, 4, 5)
    one.submit(request, 0.0)
    ((end, _),) = run(one)
    assert request.first_token_at == pytest.approx(0.5)
    assert end == pytest.approx(0.5 + 10 * 0.02)
    assert one.prefill_seconds == pytest.approx(0.5)


def test_prompts_are_computed_one_after_the_other_and_found_by_the_next() -> None:
    """The second shares 4 blocks with the first, which is still in work when it comes."""
    one, first, second = replica(), job(500, 1, 1, 2, 3, 4, 5), job(600, 1, 1, 2, 3, 4, 8, 9)
    one.submit(first, 0.0)
    one.submit(second, 0.1)
    run(one)
    assert first.first_token_at == pytest.approx(0.5)
    assert second.hit_tokens == 400
    assert second.first_token_at == pytest.approx(0.7)


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    one = replica()
    for at in (0.0, 1.0):
        again = job(450, 1, 1, 2, 3, 4, 5)
        one.submit(again, at)
        run(one)
    assert again.hit_tokens == 449
    assert again.first_token_at == pytest.approx(1.001)


def test_decodes_slow_each_other_down() -> None:
    """Alone a step takes 20 ms, two at once 30: the second joins for 10 of the first's 30 steps."""
    one, first, second = replica(), job(100, 31, 1), job(100, 11, 2)
    one.submit(first, 0.0)
    run(one, until=0.2)
    one.submit(second, 0.2)
    ends = {id(finished): now for now, finished in run(one)}
    joined = 0.3
    assert ends[id(second)] == pytest.approx(joined + 10 * 0.03)
    steps_before, steps_with = (joined - 0.1) / 0.02, 10
    assert ends[id(first)] == pytest.approx(joined + 0.3 + (30 - steps_before - steps_with) * 0.02)


def test_the_head_of_the_queue_waits_for_memory() -> None:
    """5 pages: a prompt of 2 and answers of 1 page each take 3, so the second begins when the first is done."""
    one, first, second = replica(5), job(200, 100, 1, 2), job(200, 100, 3, 4)
    one.submit(first, 0.0)
    one.submit(second, 0.0)
    (end, _), _ = run(one)
    assert end == pytest.approx(0.2 + 99 * 0.02)
    assert second.first_token_at == pytest.approx(end + 0.2)


def test_unused_prefixes_are_evicted_and_reported() -> None:
    one = replica(4)
    one.submit(job(200, 1, 1, 2), 0.0)
    run(one)
    stored, evicted = one.drain_news()
    assert len(stored) == 2
    assert not evicted
    one.submit(job(300, 1, 3, 4, 5), 1.0)
    run(one)
    again, gone = one.drain_news()
    assert len(again) == 3
    assert set(gone) <= set(stored)
    assert len(gone) >= 1


def test_a_request_larger_than_the_memory_never_fits() -> None:
    assert replica(4).fits(job(390, 10, 1, 2, 3, 4))
    assert not replica(4).fits(job(390, 11, 1, 2, 3, 4))


def test_a_lost_replica_gives_back_its_unfinished_requests() -> None:
    one = replica()
    decoding, prefilling, waiting = job(100, 50, 1), job(1000, 5, *range(2, 12)), job(100, 5, 20)
    one.submit(decoding, 0.0)
    one.submit(prefilling, 0.0)
    one.submit(waiting, 0.0)
    run(one, until=0.5)
    lost = one.lose(0.5)
    assert {id(each) for each in lost} == {id(each) for each in (decoding, prefilling, waiting)}
    assert decoding.emitted == 21  # 0.4 s of steps of 20 ms after its first token
    assert prefilling.first_token_at is None
    elsewhere = replica()
    elsewhere.submit(decoding, 1.0)
    ((end, _),) = run(elsewhere)
    assert decoding.first_token_at == pytest.approx(0.1)  # its client has had that
    assert end == pytest.approx(1.0 + 0.121 + 28 * 0.02)


def test_reports_give_the_load_at_each_change() -> None:
    one = replica()
    one.submit(job(500, 1, 1, 2, 3, 4, 5), 0.0)
    one.submit(job(300, 1, 6, 7, 8), 0.1)
    report = one.reports[-1]
    assert report.time == 0.1
    assert report.waiting_tokens == 300
    assert report.prefill_ends == pytest.approx(0.5)
    assert report.num_running == 2
