"""Requests are sent as fast as the API takes them, and again where that can help. Time is virtual."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from deployments.batch.errors import BatchStopped
from deployments.batch.runner import BatchCall, BatchRunner, NoReply, Reply
from deployments.config.settings import BatchSettings
from tests.deployments.support.virtual_time import run

OK = b'{"choices":[]}'


def error(status: int, code: str | None = None, retry_after_s: float | None = None) -> Reply:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    return Reply(status, body, retry_after_s=retry_after_s)


FINAL = replace(error(500, "ends_engines"), is_final=True)


class Api:
    """An API that has room for `capacity` requests and takes a second for each."""

    def __init__(self, capacity: int = 1000, retry_after_s: float | None = 1.0) -> None:
        self.capacity, self.retry_after_s = capacity, retry_after_s
        self.num_open = self.most_open = 0
        self.sent: Counter[str] = Counter()
        self.refused_at: list[float] = []
        self.answer: Callable[[str], Reply | Exception] = lambda name: Reply(200, OK)

    async def post(self, url: str, body: bytes) -> Reply:
        name = body.decode()
        self.sent[name] += 1
        if self.num_open >= self.capacity:
            self.refused_at.append(asyncio.get_running_loop().time())
            return error(429, "overloaded", self.retry_after_s)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.num_open -= 1
        answer = self.answer(name)
        if isinstance(answer, Exception):
            raise answer
        return answer


def calls(count: int) -> list[BatchCall[int]]:
    return [BatchCall(number, "/v1/completions", str(number).encode()) for number in range(count)]


async def answers(
    post: Callable[[str, bytes], Awaitable[Reply]], work: Iterable[BatchCall[int]], **settings: float
) -> dict[int, Reply | NoReply]:
    runner = BatchRunner(post, BatchSettings.model_validate(settings))
    async with aclosing(runner.run(work)) as found:
        return {call.key: reply async for replies in found for call, reply in replies}


def test_all_are_answered_with_at_most_so_many_in_flight() -> None:
    api = Api()
    found = run(answers(api.post, calls(50), max_in_flight=8))
    assert sorted(found) == list(range(50))
    assert set(found.values()) == {Reply(200, OK)}
    assert api.most_open == 8 and set(api.sent.values()) == {1}


def test_a_reader_that_takes_no_answers_stops_the_sending() -> None:
    read = itertools.count()
    endless: Iterator[BatchCall[int]] = (BatchCall(number, "", str(number).encode()) for number in read)

    async def scenario() -> None:
        async with aclosing(BatchRunner(Api().post, BatchSettings(max_in_flight=4)).run(endless)) as found:
            first = await anext(found)
            await asyncio.sleep(1000)
            # Besides those that were taken, as many wait for the reader as there are places, and each has one.
            assert next(read) <= len(first) + 4 + 4

    run(scenario())


def test_an_api_with_few_places_is_filled_and_not_flooded() -> None:
    api = Api(capacity=4)
    found = run(answers(api.post, calls(400), max_in_flight=64))
    assert {reply.status for reply in found.values() if isinstance(reply, Reply)} == {200} and len(found) == 400
    assert api.most_open == 4
    # All 64 come at once at first. Later each try for a fifth place is one refusal for a round of answers.
    assert len(api.refused_at) < 60 + 400 / 3


def test_an_api_without_capacity_is_asked_again_when_its_retry_after_ends() -> None:
    api = Api(capacity=0, retry_after_s=7.0)

    async def scenario() -> None:
        opening = asyncio.get_running_loop().call_later(30.0, lambda: setattr(api, "capacity", 1))
        assert len(await answers(api.post, calls(5), max_in_flight=1)) == 5
        assert not opening.cancelled()

    run(scenario())
    assert api.refused_at[:5] == [pytest.approx(7.0 * number) for number in range(5)]


@pytest.mark.parametrize("reply", [error(500), error(502), error(504), error(408), error(503, "engine_lost")])
def test_failures_are_tried_again_and_in_the_end_the_answer(reply: Reply) -> None:
    api = Api()
    api.answer = lambda name: reply if name == "1" or api.sent[name] == 1 else Reply(200, OK)
    found = run(answers(api.post, calls(3), max_attempts=3))
    assert found == {0: Reply(200, OK), 1: reply, 2: Reply(200, OK)}
    assert api.sent == {"0": 2, "1": 3, "2": 2}


@pytest.mark.parametrize("reply", [*map(error, (400, 403, 404, 413, 422)), FINAL])
def test_an_error_in_a_request_is_its_answer_without_a_retry(reply: Reply) -> None:
    api = Api()
    api.answer = lambda name: reply
    assert run(answers(api.post, calls(2))) == {0: reply, 1: reply}
    assert set(api.sent.values()) == {1}


@pytest.mark.parametrize("away", [NoReply("cannot connect", was_sent=False), error(503, "unavailable")])
def test_a_server_that_restarts_is_waited_for(away: Reply | NoReply) -> None:
    api = Api()

    def answer(name: str) -> Reply | Exception:
        return away if 5 <= asyncio.get_running_loop().time() < 300 else Reply(200, OK)

    api.answer = answer
    found = run(answers(api.post, calls(100), max_in_flight=4, max_attempts=3))
    assert set(found.values()) == {Reply(200, OK)} and len(found) == 100


def test_a_server_that_stays_away_ends_the_batch_after_the_patience() -> None:
    api = Api()
    api.answer = lambda name: NoReply("cannot connect", was_sent=False)
    with pytest.raises(BatchStopped, match=r"has accepted no request for 100 seconds.*cannot connect"):
        run(answers(api.post, calls(100), max_in_flight=4, patience_s=100))
    # Four were in flight; then one at a time, after pauses of 1, 2, 4, ... and at most 60 seconds.
    assert sum(api.sent.values()) == 4 + 7


def test_a_server_that_takes_few_long_requests_is_no_reason_to_stop() -> None:
    api = Api(capacity=1)
    found = run(answers(api.post, calls(300), max_in_flight=4, patience_s=2))
    assert set(found.values()) == {Reply(200, OK)} and len(found) == 300


def test_a_request_that_breaks_each_of_its_connections_does_not_hold_up_the_others_for_ever() -> None:
    api = Api()
    broken = NoReply("the connection broke", was_sent=True)
    api.answer = lambda name: broken if name == "0" else Reply(200, OK)
    found = run(answers(api.post, calls(20), max_in_flight=4, max_attempts=3))
    assert found.pop(0) is broken and api.sent["0"] == 3
    assert set(found.values()) == {Reply(200, OK)} and len(found) == 19


def test_a_refused_key_ends_the_batch() -> None:
    api = Api()
    api.answer = lambda name: error(401)
    with pytest.raises(BatchStopped, match="refuses the key: HTTP 401"):
        run(answers(api.post, calls(100), max_in_flight=2))
    assert sum(api.sent.values()) == 2


def test_closing_aborts_requests_in_flight() -> None:
    api = Api()

    async def scenario() -> None:
        async with aclosing(BatchRunner(api.post, BatchSettings(max_in_flight=4)).run(calls(100))) as found:
            await anext(found)
            await asyncio.sleep(0.5)
            assert api.num_open > 0
        assert api.num_open == 0

    run(scenario())


def test_a_defect_is_raised_and_ends_the_others() -> None:
    async def post(url: str, body: bytes) -> Reply:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(answers(post, calls(3)))
