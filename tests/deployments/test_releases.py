"""Processes of neighbouring releases understand each other: during an upgrade, some are new and some are old."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import msgspec
import pytest

from deployments.replica.kv_fetch import messages as kv
from deployments.wire import messages as wire
from monitoring.hub import Hub
from monitoring.metrics import Snapshot
from tests.deployments.support.recorded_messages import DIRECTORY, kinds, kv_messages, wire_messages

RELEASES = {path.stem: json.loads(path.read_text()) for path in sorted(DIRECTORY.glob("*.json"))}
GROWN = "a field of a later release"


def in_wire(data: bytes) -> Any:
    """Decode a message of the wire, which goes in one direction only."""
    try:
        return wire.decode_to_replica(data)
    except wire.MalformedMessage:
        return wire.decode_to_ingress(data)


def in_kv(data: bytes) -> Any:
    return kv.decode_to_sender(data) or kv.decode_to_fetcher(data)


def test_each_kind_of_message_is_recorded_with_all_its_fields() -> None:
    messages = [*wire_messages(), *kv_messages()]
    assert {type(message) for message in messages} == set(kinds())
    for message in messages:
        fields = msgspec.structs.fields(message)
        left_out = [field.name for field in fields if field.default == getattr(message, field.name)]
        assert left_out in ([], ["version"]), type(message)


@pytest.mark.parametrize("release", RELEASES)
def test_messages_of_a_release_are_understood(release: str) -> None:
    for name, decode in (("wire", in_wire), ("kv", in_kv)):
        for data in map(bytes.fromhex, RELEASES[release][name]):
            again = msgspec.msgpack.encode(decode(data))
            check_read(msgspec.msgpack.decode(data), msgspec.msgpack.decode(again))


def check_read(sent: Any, read: Any) -> None:
    """Check that all that was sent was read. Fields that have been added since are at the end."""
    if isinstance(sent, list) and isinstance(read, list):
        for one, other in zip_longest(sent, read[: len(sent)]):
            check_read(one, other)
    elif isinstance(sent, dict) and isinstance(read, dict):
        for name, value in sent.items():
            check_read(value, read[name])
    else:
        assert sent == read


@pytest.mark.parametrize("message", [*wire_messages(), *kv_messages()], ids=lambda message: type(message).__name__)
def test_a_message_that_has_grown_since_is_understood(message: msgspec.Struct) -> None:
    decode = in_wire if type(message) in map(type, wire_messages()) else in_kv
    data = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(message)), GROWN])
    assert decode(data) == message


@pytest.mark.parametrize("release", RELEASES)
def test_the_hub_counts_all_metrics_of_a_release(release: str) -> None:
    data = bytes.fromhex(RELEASES[release]["report"])
    hub = Hub()
    assert hub.push("a process", data, 0.0)
    page = hub.render(0.0).decode()
    reported = msgspec.msgpack.decode(data, type=Snapshot)
    for name in [*reported.values, *reported.histograms]:
        assert f"\nraydix_{name}" in page, name
