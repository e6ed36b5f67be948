"""Streams with ids, and the replicas that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.client.protocol import FoundPart, FoundStream
from deployments.wire.messages import StreamPart
from tests.deployments.support.scripted_api import ScriptedEngine

EVENTS = {"accept": "text/event-stream"}


def events_of(content: bytes) -> list[tuple[str, bytes]]:
    """Return a stream's events, each with its id."""
    events = []
    for event in content.split(b"\n\n")[:-1]:
        first, _, rest = event.partition(b"\n")
        assert first.startswith(b"id: "), event
        events.append((first[4:].decode(), rest))
    return events


def adoptable(
    engine: ScriptedEngine,
    last: str,
    num_parts: int = 1,
    *,
    record: bytes = b"",
    tenant: str = "anonymous",
    **part: Any,
) -> str:
    """Let replicas have the stream of an event's id, and return its name."""
    name = last.partition(":")[0]
    parts: Mapping[int, FoundPart] = {
        index: FoundPart("replica-1", StreamPart(index, f"{name}-{index}", **({"num_tokens": 100} | part)))
        for index in range(num_parts)
    }
    engine.found[name] = FoundStream(record, parts)
    engine.tenants[name] = tenant
    return name
