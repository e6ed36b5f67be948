"""What the API is built from: handed in by whoever serves it, so that tests can hand in something else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from deployments.api.limits import Limits
from deployments.api.text_codec import TextCodec
from deployments.client import EngineClient
from monitoring.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, as far as clients are concerned."""

    id: str
    """Its name in requests and responses."""
    created: int
    """Unix seconds."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids lie below it."""
    owned_by: str = "raydix"


@dataclass(frozen=True, slots=True)
class ApiService:
    """All that the API needs. Nothing in it belongs to one request."""

    client: EngineClient
    codec: TextCodec
    model: ModelCard
    metrics_text: Callable[[], Awaitable[tuple[bytes, str]]]
    """The body and content type of /metrics."""
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics | None = None
    """Where this process counts; None counts nothing."""
    version: str = "0.1.0"
