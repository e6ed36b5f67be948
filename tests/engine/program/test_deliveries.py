"""Tokens of short steps are delivered together, first tokens and ends at once, and nothing is lost or late."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.program.deliveries import Deliveries
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import random_ids, save_tiny
from tests.engine.support.whole_engines import engine_for

INTERVAL = 1.0


class Received:
    """What was delivered, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[tuple[float, dict[str, list[int]]]] = []
        self.deliveries = Deliveries(INTERVAL)
        self.deliveries.deliver = lambda deltas: self.at.append(
            (self.now, {delta.request_id: list(delta.token_ids) for delta in deltas})
        )

    def step(self, seconds: float, *deltas: StreamDelta, next_takes: float | None = None) -> None:
        self.now += seconds
        self.deliveries.add(deltas)
        self.deliveries.settle(self.now, self.now + (seconds if next_takes is None else next_takes))


def token(name: str, number: int, reason: str | None = None) -> StreamDelta:
    return StreamDelta(name, [number], finish_reason=reason)  # type: ignore[arg-type]


def test_tokens_of_short_steps_go_together_but_not_the_first_and_the_last() -> None:
    received = Received()
    for number in range(9):
        received.step(0.25, token("a", number, "length" if number == 8 else None))
    assert received.at == [(0.25, {"a": [0]}), (1.25, {"a": [1, 2, 3, 4]}), (2.25, {"a": [5, 6, 7, 8]})]


def test_steps_that_take_as_long_as_the_interval_deliver_each_token() -> None:
    received = Received()
    for number in range(4):
        received.step(1.0, token("a", number))
    assert [tokens for _, tokens in received.at] == [{"a": [number]} for number in range(4)]


def test_nothing_waits_for_a_long_step_or_when_none_comes() -> None:
    received = Received()
    received.step(0.25, token("a", 0))
    received.step(0.25, token("a", 1))
    assert len(received.at) == 1
    received.deliveries.settle(received.now, received.now + 0.8)  # a prompt joins
    assert received.at[1:] == [(0.5, {"a": [1]})]


def test_an_urgent_delivery_takes_along_those_that_wait() -> None:
    received = Received()
    received.step(0.25, token("a", 0))
    received.step(0.25, token("a", 1))
    received.step(0.25, token("a", 2), token("b", 7))
    assert received.at[1:] == [(0.75, {"a": [1, 2], "b": [7]})]


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.sets(st.sampled_from("abc"))), max_size=60))
def test_every_token_comes_in_order_and_none_waits_for_longer_than_the_interval(
    steps: list[tuple[float, set[str]]],
) -> None:
    received = Received()
    made: dict[str, list[tuple[float, int]]] = {name: [] for name in "abc"}
    for index, (seconds, names) in enumerate(steps):
        next_takes = steps[index + 1][0] if index + 1 < len(steps) else 100.0
        received.now += seconds
        for name in names:
            made[name].append((received.now, len(made[name])))
        received.deliveries.add([token(name, made[name][-1][1]) for name in sorted(names)])
        received.deliveries.settle(received.now, received.now + next_takes)
    for name in "abc":
        came = [(at, number) for at, tokens in received.at for number in tokens.get(name, ())]
        assert [number for _, number in came] == [number for _, number in made[name]]
        assert all(at - done <= INTERVAL for (at, _), (done, _) in zip(came, made[name], strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_delivers_the_same_tokens_less_often(tmp_path: Path, overlap: bool) -> None:
    model, found = save_tiny("qwen3", tmp_path), []
    for interval_ms in (0.0, 9_000.0):
        engine = engine_for(model, 16, 320, max_running=4, overlap=overlap, stream_interval_ms=interval_ms)
        counts: dict[str, int] = {}
        tokens: dict[str, list[int]] = {}
        ended = threading.Semaphore(0)

        def deliver(deltas: list[StreamDelta], counts=counts, tokens=tokens, ended=ended) -> None:  # type: ignore[no-untyped-def]
            for delta in deltas:
                counts[delta.request_id] = counts.get(delta.request_id, 0) + 1
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    ended.release()

        for name in "ab":
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            engine.loop.submit(engine.new_request(name, random_ids(ord(name), 20), params))
        engine.loop.start(deliver)
        for _ in "ab":
            assert ended.acquire(timeout=100)
        engine.close()
        found.append(tokens)
        assert all(count == 40 for count in counts.values()) == (interval_ms == 0.0)
    assert found[0] == found[1] and [len(ids) for ids in found[0].values()] == [40, 40]
