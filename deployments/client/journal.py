"""The journal of a stream: its request and all tokens received, from which another replica can resume it.

    prompt | t0 t1 t2 t3   t4 t5 ...
             replica A ──▶ replica B resumes with prompt + t0..t3 and sends t4 first

Sampling noise is a function of (seed, position), so B continues as A would have. The memory is 8 bytes per token
plus the ints themselves, until the stream has ended.
"""

from __future__ import annotations

from msgspec import structs

from deployments.client.protocol import GenerateRequest
from engine.values.stream_delta import StreamDelta


class Journal:
    """Records one stream's request and tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        """All tokens received, whether or not the client has read them."""
        self.num_prompt_reported = max(1, request.num_prompt_reported)
        """Leading prompt tokens whose log-probabilities were received, if requested; the first has none."""
        self.num_cached = 0
        """Cached prompt tokens as the first replica reported them."""
        self.last_token_at: float | None = None
        """Clock when the last token arrived; None before the first."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return len(self.token_ids)

    def is_next(self, delta: StreamDelta) -> bool:
        """Return whether no token is missing before `delta`, which may repeat tokens already received."""
        scores, reported = delta.prompt_logprobs, self.num_prompt_reported
        if delta.start > len(self.token_ids) or (scores is not None and scores.start > reported):
            return False
        if scores is not None:
            reported = max(reported, scores.end)
        is_scored = self.request.sampling.prompt_logprobs is not None
        return not (is_scored and delta.token_ids and reported < len(self.request.prompt_ids))

    def record(self, fresh: StreamDelta, now: float) -> None:
        """Append a delta that starts where the journal ends."""
        if fresh.token_ids:
            self.token_ids += fresh.token_ids
            self.last_token_at = now
        if fresh.prompt_logprobs is not None:
            self.num_prompt_reported = fresh.prompt_logprobs.end

    def resumed(self, request_id: str) -> GenerateRequest:
        """Return the request to send to the next replica, under its own id."""
        stream = self.request.stream
        if stream is not None and self.token_ids:
            stream = structs.replace(stream, num_cached=self.num_cached)
        return structs.replace(
            self.request,
            stream=stream,
            request_id=request_id,
            output_ids=self.request.output_ids + self.token_ids,
            num_prompt_reported=self.num_prompt_reported,
            block_hashes=None if self.token_ids else self.request.block_hashes,
        )
