"""A listener of an ingress's connection for tests in which nothing should reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.wire import messages
from engine.values.stream_delta import StreamDelta


class Silence:
    """A listener whose methods should not be called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_deltas(self, replica: str, deltas: list[StreamDelta]) -> None:
        self.calls.append("outputs")

    def on_unknown(self, replica: str, request_ids: list[str]) -> None:
        self.calls.append("unknown")

    def on_prefix_tiers(self, name: str, hashes: Sequence[int], tiers: bytes) -> None: ...

    def on_prefix_delta(self, name: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.calls.append("delta")

    def on_prefix_snapshot(
        self, name: str, hashes: Sequence[int], block_tokens: int, *, is_first: bool, is_last: bool
    ) -> None:
        self.calls.append("snapshot")

    def on_prefixes_unknown(self, replica: str, name: str) -> None:
        self.calls.append("unknown prefixes")

    def on_load(self, replica: str, load: messages.Load) -> None:
        self.calls.append("load")

    def on_answering(self, replica: str, is_answering: bool) -> None:
        self.calls.append("answering")

    def on_found(self, replica: str, message: messages.Found) -> None:
        """Ignore it."""

    def on_not_run(self, replica: str, message: messages.NotRun) -> None:
        self.calls.append("not run")

    def unanswered(self, replica: str) -> list[messages.Generate]:
        return []

    def received(self, replica: str) -> Mapping[str, int]:
        return {}
