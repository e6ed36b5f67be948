"""The stream of one request while replicas keep it: what they have when it is continued, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from deployments.api.output.choice import Group
from deployments.api.output.response_encoder import ResponseContext
from deployments.api.streams.asked import AskedStream
from deployments.api.streams.event_ids import EventIds
from deployments.api.streams.found import check_age, found_parts
from deployments.api.streams.position import StreamPosition
from deployments.client.protocol import EngineClient, FoundPart, GenerateRequest


class Continuation:
    """A stream that any ingress can continue, or an answer that none can."""

    def __init__(
        self,
        stream: AskedStream | None,
        client: EngineClient,
        requests: Sequence[GenerateRequest],
        timeout_s: float,
    ) -> None:
        """None for `stream`: nothing can be continued. Answers take `timeout_s` seconds at most."""
        self._stream, self._client, self._requests, self._timeout_s = stream, client, requests, timeout_s
        self.position: StreamPosition | None = None if stream is None else stream.position
        """Where the client stopped reading; None: it has no events."""
        self.is_continued = stream is not None and stream.is_continued
        self.is_adopted = False
        """Whether replicas have all of it, so that nothing has to be generated again."""
        self.outlives_reader = False
        """Whether it is generated further when its reader leaves: the client can come back."""
        self._num_known: dict[int, int] = {}

    def begin(self) -> None:
        """Note that the client will have an id by which it can come back, or has one already."""
        self.outlives_reader = self._stream is not None

    @property
    def is_kept(self) -> bool:
        """Whether it is to be generated further now that its reader has left."""
        return self.outlives_reader and self._stream is not None and self._stream.is_wanted

    @property
    def outcome(self) -> Literal["adopted", "regenerated"]:
        """How it was continued."""
        return "adopted" if self.is_adopted else "regenerated"

    def ids(self, answer: ResponseContext, tenant: str) -> EventIds | None:
        """Return the ids of its events; None if they have none."""
        if self._stream is None or not self._stream.has_ids:
            return None
        return EventIds(answer.name, tenant, [prompt.token_ids for prompt in answer.prompts], answer.num_choices)

    async def found(self) -> Mapping[int, FoundPart]:
        """Return the parts of a stream that is continued which replicas still have. Raises `ApiError`."""
        if self._stream is None or not self.is_continued:
            return {}
        found = await found_parts(self._client, self._stream, self._requests)
        if not found:
            check_age(self._stream.name, time.time(), self._timeout_s + self._stream.keep_s)
        self.is_adopted = len(found) == len(self._requests)
        if self.position is None:
            self._num_known = {index: part.part.num_tokens for index, part in found.items()}
        return found

    def num_new(self, group: Group) -> int:
        """Return how many tokens of the next group were not generated for an earlier reader."""
        if not self._num_known:
            return len(group.token_ids)
        num_known = min(self._num_known.get(group.index, 0), len(group.token_ids))
        self._num_known[group.index] = self._num_known.get(group.index, 0) - num_known
        return len(group.token_ids) - num_known
