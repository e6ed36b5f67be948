"""Continues to read the stream of a response in the background, if this ingress generates or stores it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import Response

from deployments.api.base.errors import invalid
from deployments.api.http.transport import EventStream
from deployments.api.responses.background import ResponseJob
from deployments.api.streams.asked import AskedStream
from deployments.api.streams.found import stream_differs

NO_STREAM = "This response cannot be read as a stream: only one that was asked for with background and stream can."


async def of_job(
    job: ResponseJob, stream: AskedStream, slow_reader_timeout_s: float, headers: dict[str, str]
) -> Response:
    """Read the stream of a job, after the event that the client has. Raises `ApiError`."""
    if not job.keeps_events:
        raise invalid(NO_STREAM, "stream")
    after = stream.after
    if stream.position is not None:
        found = await job.number_of(stream.position.text)
        if found is None:
            raise stream_differs()
        after = found
    return EventStream(job.events(after), nothing, slow_reader_timeout_s, headers, job.num_kept)


def of_stored(events: bytes, stream: AskedStream, slow_reader_timeout_s: float) -> Response:
    """Read the stream of a response that has ended, after the event that the client has. Raises `ApiError`."""
    if not events:
        raise invalid(NO_STREAM, "stream")
    after = stream.after
    if stream.position is not None:
        at = events.find(b"id: %b\n" % stream.position.text.encode())
        if at < 0:
            raise stream_differs()
        after = events.count(b"\n\n", 0, at)
    return EventStream(_after(events, after), nothing, slow_reader_timeout_s, {}, len(events))


async def nothing() -> None:
    """Close nothing, because a response in the background continues without its readers."""


async def _after(stored: bytes, after: int) -> AsyncGenerator[bytes, None]:
    begin = number = 0
    while (end := stored.find(b"\n\n", begin) + 2) >= 2:
        if number > after:
            yield stored[begin:end]
        begin, number = end, number + 1
