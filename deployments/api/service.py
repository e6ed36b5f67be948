"""What the API is built from: handed in by whoever serves it, so that tests can hand in something else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from deployments.api.errors import invalid, model_not_found
from deployments.api.http.access import AccessControl
from deployments.api.report import Listener
from deployments.api.request.structured import GrammarChecker
from deployments.api.routes.cluster import ClusterSource
from deployments.api.text_codec import TextCodec
from deployments.client.protocol import EngineClient, ModelSwitch
from deployments.config.limits import Limits
from deployments.config.settings import SloSettings
from deployments.config.version import raydix_version
from monitoring.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model, as far as clients are concerned."""

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
class ServedModel:
    """A model with its engines and its tokenizer: what a request that names it is answered with."""

    card: ModelCard
    client: EngineClient
    codec: TextCodec
    metrics: Metrics | None = None
    """Where its requests are counted; None counts nothing."""
    switch: ModelSwitch | None = None
    """Loads and unloads the model; None: it is always loaded."""
    grammars: GrammarChecker | None = None
    """Checks what answers shall match; None leaves that to the engines."""


@dataclass(frozen=True, slots=True)
class ApiService:
    """All that the API needs. Nothing in it belongs to one request."""

    models: Mapping[str, ServedModel]
    """By the name in requests (`card.id`); at least one."""
    metrics_text: Callable[[], Awaitable[tuple[bytes, str]]]
    """The body and content type of /metrics. Raises `Unavailable` when there are none to show."""
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics | None = None
    """Where requests are counted that name no model served here; None counts nothing."""
    slo: SloSettings = field(default_factory=SloSettings)
    """Targets that requests are measured by."""
    version: str = field(default_factory=raydix_version)
    access: AccessControl = field(default_factory=AccessControl)
    """Keys, tenants and their limits; by default the service is open."""
    admin_key_hash: str | None = None
    """SHA-256 of the key that administration needs, in hex; None: it is off."""
    cluster: ClusterSource | None = None
    """Who knows the cluster; None: this service has none."""

    listeners: tuple[Listener, ...] = ()
    """Who hears of every generating request when its answer is out."""
    is_named_outside: bool = False
    """Whether the server around the API puts x-request-id on every answer, as Ray Serve does."""

    def find(self, asked: str | None) -> ServedModel:
        """The model that a request names; the only one when it names none. Raises `ApiError` 400 or 404."""
        if asked is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if asked is None:
            raise invalid(f"model is required: this server serves {', '.join(self.models)}.", "model")
        if asked not in self.models:
            raise model_not_found(asked, self.models)
        return self.models[asked]
