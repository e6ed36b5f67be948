"""Messages and outboxes of the wire, and bytes that are not messages."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import messages
from deployments.wire.outbox import Outbox
from engine.logprobs import TokenLogprobs
from engine.stream_delta import StreamDelta, Timings


def test_an_event_survives_the_wire_whole() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logprobs = [TokenLogprobs(5, -0.5, ((5, -0.5), (7, -1.25)))]
    timings = Timings(0.1, 0.2, 0.3, 1, 2)
    event = StreamDelta("a", [5], 0, 3, "stop", timings, logprobs, "why")
    logs.record(event, 0.0)
    tokens = messages.Tokens(1, 2, logs.unsent("ingress"), messages.Load(num_requests=4))
    read = messages.decode_to_ingress(messages.encode(tokens))
    assert isinstance(read, messages.Tokens)
    assert read.deltas[0] == event
    assert read.load == messages.Load(num_requests=4)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for decode in (messages.decode_to_replica, messages.decode_to_ingress):
        with contextlib.suppress(messages.MalformedMessage):
            decode(data)


def test_a_message_of_the_other_direction_is_malformed() -> None:
    with pytest.raises(messages.MalformedMessage):
        messages.decode_to_replica(messages.encode(messages.Refused("no")))
    with pytest.raises(messages.MalformedMessage):
        messages.decode_to_ingress(messages.encode(messages.Abort("a")))


def test_what_was_not_sent_comes_merged_and_only_once() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logs.mark_sent("ingress")
    for token in (1, 2, 3):
        logs.record(StreamDelta("a", [token]), 0.0)
    (output,) = logs.unsent("ingress")
    assert (output.start, output.token_ids) == (0, [1, 2, 3])
    logs.mark_sent("ingress")
    assert logs.unsent("ingress") == []
    logs.record(StreamDelta("a", [4]), 0.0)
    assert (logs.unsent("ingress")[0].start, logs.unsent("ingress")[0].token_ids) == (3, [4])


def test_a_stream_is_sent_again_from_what_was_received() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logs.record(StreamDelta("a", [1, 2, 3], finish_reason="length"), 0.0)
    logs.mark_sent("ingress")
    assert logs.resume("ingress", {"a": 1, "never-heard-of": 0}) == ["never-heard-of"]
    (output,) = logs.unsent("ingress")
    assert (output.start, output.token_ids, output.finish_reason) == (1, [2, 3], "length")


def test_an_empty_delta_tells_that_a_request_was_accepted_unless_tokens_told_it() -> None:
    logs = Outbox()
    for request_id in ("slow", "fast"):
        logs.open(request_id, "ingress")
    assert logs.unsent("ingress") == []
    logs.record(StreamDelta("fast", [1]), 0.0)
    logs.mark_sent("ingress")
    for request_id in ("slow", "fast", "unknown"):
        logs.accept(request_id)
    assert logs.unsent("ingress") == [StreamDelta("slow")]


def test_streams_of_one_ingress_cannot_be_asked_for_by_another() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    assert logs.resume("thief", {"a": 0}) == ["a"]
    assert logs.unsent("thief") == []
    assert not logs.owns("thief", "a")


def test_nothing_is_kept_of_streams_that_are_forgotten() -> None:
    logs = Outbox()
    for number in range(10):
        logs.open(f"s{number}", "ingress")
    for number in range(5):
        logs.record(StreamDelta(f"s{number}", [1], finish_reason="stop"), now=float(number))
    assert (logs.num_live, logs.num_live_of("ingress")) == (5, 5)
    assert sorted(logs.ended_before(3.0)) == ["s0", "s1", "s2"]
    logs.forget([f"s{number}" for number in range(10)])
    assert (logs.num_live, logs.ingresses(), logs.unsent("ingress")) == (0, set(), [])


def test_an_id_in_use_is_refused() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    with pytest.raises(ValueError, match="in use"):
        logs.open("a", "another")
