"""Delivery of log-probabilities of outputs and prompts: merged, lost, sent again, and from another replica."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deployments.client.journal import Journal
from deployments.client.protocol import GenerateRequest
from deployments.client.stream import Stream
from deployments.wire import messages
from deployments.wire.outbox import Outbox
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined
from engine.values.plan import Step, StepPlan
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.in_process_engines import (
    SILENCE,
    ClientAndEngines,
    CountingRunner,
    until,
)
from tests.deployments.support.lossy_link import Noted
from tests.deployments.support.time_limit import run_scenario

PROMPT = list(range(40))
SMALL_STEPS: dict[str, Any] = {"max_running": 2, "max_step_tokens": 8, "max_step_ms": None}


def request(request_id: str = "a") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=30, seed=1, logprobs=2, prompt_logprobs=0)
    return GenerateRequest(request_id, "m", PROMPT, sampling)


def part(start: int, end: int) -> PackedLogprobs:
    """Return scores of the tokens from `start` to `end`, whose bytes encode their positions."""
    return PackedLogprobs(start, 0, b"".join(at.to_bytes(8, "little") for at in range(start, end)))


def check(events: list[StreamDelta]) -> None:
    """Assert that each prompt and output token has its log-probability once and in order, prompts first."""
    scores = None
    for event in events:
        if event.prompt_logprobs is not None:
            assert not any(before.token_ids for before in events[: events.index(event)])
        scores = joined(scores, event.prompt_logprobs)
    assert scores is not None and scores.start == 1
    read = scores.read(PROMPT[1:])
    assert [(at.logprob, at.rank) for at in read] == [(-at / 8, at) for at in range(1, len(PROMPT))]
    logprobs = [at for event in events for at in event.logprobs or ()]
    assert logprobs == [TokenLogprobs(n, -n / 8, ((n, -n / 8), (0, -9.0))) for n in range(1, 31)]


# --- through engines ------------------------------------------------------------------------------------------


def test_all_come_in_order_and_merge_for_a_slow_reader() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, **SMALL_STEPS) as (client, _):
            eager = await client.generate(request())
            check([event async for event in eager])
            slow = await client.generate(request("b"))
            await until(lambda: slow.has_ended)
            merged = [event async for event in slow]
            assert len(merged) == 1
            check(merged)

    run_scenario(scenario())


@pytest.mark.parametrize("num_steps", [3, 15])
def test_another_replica_continues_the_log_probabilities_where_the_first_was_lost(num_steps: int) -> None:
    """The replica is lost in the middle of the prompt, and in the middle of the output."""

    async def scenario() -> None:
        async with ClientAndEngines(2, **SMALL_STEPS, health=SILENCE) as (client, engines):
            hang_after(engines.runners[0], num_steps)
            stream = await client.generate(request())
            events = [await anext(stream)]
            await until(lambda: stream.journal.num_tokens > 0 or num_steps == 3)
            engines.fall_silent(0)
            reported = stream.journal.num_prompt_reported
            assert (reported < len(PROMPT)) == (num_steps == 3)
            events += [event async for event in stream]
            check(events)
            assert engines.calls == ["r0", "r1"]

    run_scenario(scenario())


def test_lost_scores_are_requested_again() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, **SMALL_STEPS) as (client, engines):
            engines.runners[0].step_s = 0.01
            engines.links["r0"].to_ingress = scores = Noted(_has_scores, num_lost=2)
            stream = await client.generate(request())
            check([event async for event in stream])
            assert len(scores.messages) > 2

    run_scenario(scenario())


def _has_scores(message: object) -> bool:
    return isinstance(message, messages.Tokens) and message.deltas[0].prompt_logprobs is not None


def hang_after(runner: CountingRunner, num_steps: int) -> None:
    """Make the runner hang after about `num_steps` steps."""
    prepare, steps = runner.prepare, iter(range(num_steps))

    def counted(plan: StepPlan) -> Step:
        if next(steps, None) is None:
            runner.gate.clear()
        return prepare(plan)

    runner.prepare = counted  # type: ignore[method-assign]


# --- what a replica keeps -------------------------------------------------------------------------------------


def test_a_log_sends_scores_again_only_to_an_ingress_without_tokens() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logs.record(StreamDelta("a", prompt_logprobs=part(1, 5)), 0.0)
    logs.mark_sent("ingress", logs.unsent("ingress"))
    logs.record(StreamDelta("a", prompt_logprobs=part(5, 9)), 0.0)
    logs.record(StreamDelta("a", [7]), 0.0)
    (output,) = logs.unsent("ingress")
    assert output.prompt_logprobs == part(5, 9) and output.token_ids == [7]
    logs.mark_sent("ingress", logs.unsent("ingress"))
    logs.resume("ingress", {"a": 0})
    assert logs.unsent("ingress")[0].prompt_logprobs == part(1, 9)
    logs.mark_sent("ingress", logs.unsent("ingress"))
    logs.resume("ingress", {"a": 1})
    assert logs.unsent("ingress")[0].prompt_logprobs is None


def test_log_probabilities_survive_the_wire() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    events = [
        StreamDelta("a", prompt_logprobs=part(1, 4)),
        StreamDelta("a", [5], logprobs=[TokenLogprobs(5, -0.5, ((5, -0.5), (7, -1.25)))]),
        StreamDelta("a", [6], num_cached=3, finish_reason="stop", logprobs=[TokenLogprobs(6, -2.5)]),
    ]
    for event in events:
        logs.record(event, 0.0)
    read = messages.decode_to_ingress(messages.encode(messages.Tokens(1, 2, logs.unsent("ingress"))))
    assert isinstance(read, messages.Tokens)
    whole = read.deltas[0]
    assert whole.prompt_logprobs == part(1, 4)
    assert whole.logprobs == [*(events[1].logprobs or ()), *(events[2].logprobs or ())]


def test_scores_that_are_no_whole_records_are_a_malformed_message() -> None:
    delta = ["a", [], 0, 0, None, None, [], None, [1, 0, b"123"]]
    with pytest.raises(messages.MalformedMessage, match="3 bytes"):
        messages.decode_to_ingress(msgspec.msgpack.encode([12, 1, 2, [delta], None]))


# --- what an ingress accepts ------------------------------------------------------------------------------------


def test_a_journal_takes_no_delta_after_a_missing_one() -> None:
    journal = Journal(request())
    assert not journal.is_next(StreamDelta("a", prompt_logprobs=part(2, 9)))
    assert not journal.is_next(StreamDelta("a", [1]))
    assert not journal.is_next(StreamDelta("a", [1], prompt_logprobs=part(1, 39)))
    assert journal.is_next(StreamDelta("a", [1], prompt_logprobs=part(1, 40)))
    assert journal.is_next(StreamDelta("a", finish_reason="abort"))
    journal.record(StreamDelta("a", prompt_logprobs=part(1, 11)), 0.0)
    assert journal.resumed("b").num_prompt_reported == 11
    unscored = Journal(GenerateRequest("b", "m", PROMPT, SamplingParams(max_tokens=3, seed=1)))
    assert unscored.is_next(StreamDelta("b", [1]))


def test_a_stream_drops_log_probabilities_that_it_has_already() -> None:
    async def scenario() -> None:
        stream = Stream(request(), lambda _: None)
        assert stream.feed(StreamDelta("a", prompt_logprobs=part(1, 20)), 0.0)
        assert stream.feed(StreamDelta("a", prompt_logprobs=part(1, 30)), 0.0)
        assert (await anext(stream)).prompt_logprobs == part(1, 30)
        assert not stream.feed(StreamDelta("a", prompt_logprobs=part(31, 40)), 0.0)
        last = StreamDelta("a", [1], finish_reason="length", prompt_logprobs=part(28, 40))
        assert stream.feed(last, 0.0)
        assert (await anext(stream)).prompt_logprobs == part(30, 40)

    run_scenario(scenario())
