"""Messages and outboxes of the wire, and bytes that are not messages."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import messages
from deployments.wire.outbox import Outbox
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.stream_delta import StreamDelta, Timings


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


def test_unsent_deltas_come_merged_and_only_once() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logs.mark_sent("ingress", logs.unsent("ingress"))
    for token in (1, 2, 3):
        logs.record(StreamDelta("a", [token]), 0.0)
    (output,) = logs.unsent("ingress")
    assert (output.start, output.token_ids) == (0, [1, 2, 3])
    logs.mark_sent("ingress", logs.unsent("ingress"))
    assert logs.unsent("ingress") == []
    logs.record(StreamDelta("a", [4]), 0.0)
    assert (logs.unsent("ingress")[0].start, logs.unsent("ingress")[0].token_ids) == (3, [4])


def test_a_stream_is_sent_again_from_the_last_token_received() -> None:
    logs = Outbox()
    logs.open("a", "ingress")
    logs.record(StreamDelta("a", [1, 2, 3], finish_reason="length"), 0.0)
    logs.mark_sent("ingress", logs.unsent("ingress"))
    assert logs.resume("ingress", {"a": 1, "never-heard-of": 0}) == ["never-heard-of"]
    (output,) = logs.unsent("ingress")
    assert (output.start, output.token_ids, output.finish_reason) == (1, [2, 3], "length")


def test_an_empty_delta_reports_an_accepted_request_unless_tokens_did() -> None:
    logs = Outbox()
    for request_id in ("slow", "fast"):
        logs.open(request_id, "ingress")
    assert logs.unsent("ingress") == []
    logs.record(StreamDelta("fast", [1]), 0.0)
    logs.mark_sent("ingress", logs.unsent("ingress"))
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


SCORE = b"12345678"


@given(st.data())
def test_a_backlog_comes_whole_and_in_order_however_small_its_messages(data: st.DataObject) -> None:
    """Streams with and without log-probabilities grow, are sent in part, and are asked for again."""
    logs, names = Outbox(), ("plain", "scored")
    for name in names:
        logs.open(name, "ingress")
    made, received = {name: StreamDelta(name) for name in names}, {name: StreamDelta(name) for name in names}
    scores = PackedLogprobs(1, 0, SCORE * data.draw(st.integers(1, 20)))
    logs.record(StreamDelta("scored", prompt_logprobs=scores), 0.0)
    for step in data.draw(st.lists(st.sampled_from(("grow", "send", "resume")), max_size=30)):
        if step == "send":
            take(logs, received, data.draw(st.integers(1, 300)))
        elif step == "resume":
            logs.resume("ingress", {name: received[name].end for name in names if received[name].end})
        else:
            for name in names:
                logs.record(grown(made[name], data.draw(st.integers(0, 20))), 0.0)
    for name in names:
        logs.record(StreamDelta(name, finish_reason="stop"), 0.0)
    while logs.has_unsent("ingress"):
        take(logs, received, 40)
    for name in names:
        assert received[name].token_ids == made[name].token_ids
        assert received[name].logprobs == (made[name].logprobs or None)
        assert received[name].finish_reason == "stop"
    assert received["scored"].prompt_logprobs == scores


def grown(stream: StreamDelta, count: int) -> StreamDelta:
    """Let a stream gain tokens; return them as an engine's delta."""
    ids = list(range(stream.end, stream.end + count))
    is_scored = stream.request_id == "scored" and count
    later = StreamDelta(
        stream.request_id, ids, logprobs=[TokenLogprobs(i, -1.5) for i in ids] if is_scored else None
    )
    stream.add(later)
    return later


def take(logs: Outbox, received: dict[str, StreamDelta], max_bytes: int) -> None:
    """Send a message of a size, and receive it, with what it repeats left out."""
    sent = logs.unsent("ingress", max_bytes)
    read = messages.decode_to_ingress(messages.encode(messages.Tokens(1, 0, sent)))
    assert isinstance(read, messages.Tokens)
    logs.mark_sent("ingress", sent)
    for delta in read.deltas:
        stream = received[delta.request_id]
        assert delta.start <= stream.end
        scores = stream.prompt_logprobs
        stream.add(delta.since(stream.end, 0 if scores is None else scores.end))


def test_a_stream_that_is_cut_goes_behind_the_others() -> None:
    logs = Outbox()
    for name in ("long", "short"):
        logs.open(name, "ingress")
        logs.record(StreamDelta(name, list(range(100 if name == "long" else 1))), 0.0)
    logs.mark_sent("ingress", logs.unsent("ingress", 50))
    assert [delta.request_id for delta in logs.unsent("ingress")] == ["short", "long"]
