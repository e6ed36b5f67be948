"""Finds the parts of a stream that replicas still have, to continue it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.api.base.errors import ApiError
from deployments.api.output.response_encoder import AnswerName
from deployments.api.streams.asked import AskedStream
from deployments.api.streams.position import wrong_id
from deployments.client.protocol import EngineClient, FoundPart, GenerateRequest

_MOST_AHEAD_S = 60
"""Seconds by which the clock of another ingress may be ahead."""


async def found_parts(
    client: EngineClient, stream: AskedStream, requests: Sequence[GenerateRequest]
) -> Mapping[int, FoundPart]:
    """Return the parts that can be continued, by the index of their request; the others are generated again.

    Raises `ApiError` 400 if the position is not one of a stream of these requests, each of one choice.
    """
    counts = [0] * len(requests) if stream.position is None else stream.position.counts
    if len(counts) != len(requests):
        raise wrong_id(
            f"Last-Event-ID belongs to a stream with {len(counts)} choices, but this request has {len(requests)}."
        )
    found = await client.find(stream.name.id, requests[0].tenant)
    if found is None:
        return {}
    return {
        index: part
        for index, part in found.parts.items()
        if index < len(requests) and _has_all(part, requests[index], counts[index] or 0)
    }


def _has_all(found: FoundPart, request: GenerateRequest, num_sent: int) -> bool:
    """Whether a replica has, or will have, all that a client with `num_sent` tokens is to get.

    It has no log-probabilities of earlier replicas' tokens. A part that was aborted, because it had no reader for
    too long, would end there; generated again, it has the same tokens and the rest.
    """
    sampling, part = request.sampling, found.part
    if part.output_ids and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        return False
    return part.finish_reason != "abort" and (part.finish_reason != "error" or num_sent <= part.num_tokens)


def check_age(name: AnswerName, now: float, most_s: float) -> None:
    """Raise `ApiError` 404 for a stream that was begun too long ago to be generated again, or in the future."""
    age = now - name.created
    if not -_MOST_AHEAD_S <= age <= most_s:
        raise ApiError(404, "The stream has ended and is no longer kept (streams.keep_s).", code="stream_expired")


def stream_differs() -> ApiError:
    """Create the 409 for a position whose check is not that of the stream."""
    message = (
        "Last-Event-ID does not belong to this stream: the request differs from the one that began it, or it had "
        "to be generated again and its text is not the same; send the request without Last-Event-ID."
    )
    return ApiError(409, message, param="Last-Event-ID", code="stream_differs")
