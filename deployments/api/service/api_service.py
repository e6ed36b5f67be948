"""The parts from which the API is built. Its server passes them in, so that tests can pass in others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.api.base.errors import invalid, model_not_found
from deployments.api.http.access import AccessControl
from deployments.api.record.request_record import Listener
from deployments.api.responses.kept import KeptResponses
from deployments.api.served.served_model import ServedModel
from deployments.api.served.versions import Versions
from deployments.batch.spool import Spool
from deployments.client.protocol import RolloutControl
from deployments.config.limits import Limits
from deployments.config.settings import SloSettings, StreamSettings
from deployments.config.version import raydix_version
from monitoring.metrics import Metrics


class ClusterSource(Protocol):
    """Reports the cluster's state within a bounded time; unknown parts are listed under "missing"."""

    async def status(self) -> dict[str, Any]:
        """Return versions, resources, replicas by model, and totals."""

    async def nodes(self) -> dict[str, Any]:
        """Return the nodes with their GPUs and replicas."""


@dataclass(frozen=True, slots=True)
class ApiService:
    """Everything the API needs that does not belong to one request."""

    models: Mapping[str, ServedModel]
    """At least one model or version of one, by its name (`ServedModel.name`)."""
    metrics_text: Callable[[], Awaitable[tuple[bytes, str]]]
    """Returns the body and content type of /metrics. Raises `Unavailable` when there are no metrics yet."""
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics | None = None
    """Where requests that name no served model are counted; None counts nothing."""
    slo: SloSettings = field(default_factory=SloSettings)
    """Latency targets that requests are measured against."""
    streams: StreamSettings = field(default_factory=StreamSettings)
    """How long streams outlive their readers."""
    version: str = field(default_factory=raydix_version)
    access: AccessControl = field(default_factory=AccessControl)
    """Keys, tenants and their limits; by default the service is open."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts that requests may name; None: any."""
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may use the API."""
    responses: KeptResponses = field(default_factory=KeptResponses)
    """The stored responses of the Responses API, and those that run in the background."""
    spool: Spool | None = None
    """Files and batches that clients have left here; None: there are no endpoints for them."""
    admin_key_hash: str | None = None
    """SHA-256 of the admin key, in hex; None turns administration off."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The part of the configuration that /server_info shows."""
    shows_tokenizer: bool = True
    """Whether there is /tokenizer_info."""
    versions: Mapping[str, Versions] = field(default_factory=dict)
    """The models that have versions, by their names in requests."""
    rollouts: RolloutControl | None = None
    """Reports and controls rollouts of versions; None if this service has none that decides them."""
    cluster: ClusterSource | None = None
    """Reports the cluster's state; None if this service has no cluster."""

    listeners: tuple[Listener, ...] = ()
    """Called with the report of every generating request once its response is complete."""
    write_line: Callable[[str], None] | None = None
    """Takes a line for each answered request; None: there are none."""
    is_named_outside: bool = False
    """Whether the server around the API adds x-request-id to every response, as Ray Serve does."""
    on_named: Callable[[str], None] = lambda name: None
    """Called with each request's id in the request's own context, for log records to bear it."""
    max_open: int | None = None
    """Most concurrent requests that generate; more are refused. None: the server around the API bounds them."""

    is_stopping: Callable[[], bool] = lambda: False
    """Whether the server is being stopped, so that clients should connect to another one."""
    ready_without_engines_s: float = 0.0
    """Seconds for which /ready answers 200 after the last engine was lost, as requests wait for another one."""

    refuses_settings: Callable[[], bool] = lambda: False
    """Whether the latest settings for the running process were wrong, so that it keeps the previous ones."""

    @property
    def names(self) -> list[str]:
        """The models' names in requests; versions of a model have one."""
        return list(dict.fromkeys(served.card.id for served in self.models.values()))

    def named(self, asked: str | None) -> str:
        """Return the name of the model that a request names, or of the only one. Raises `ApiError` 400 or 404."""
        names = self.names if asked is None else ()
        if len(names) == 1:
            return names[0]
        if asked is None:
            raise invalid(f"model is required; this server serves {', '.join(names)}.", "model")
        if asked not in self.models and asked not in self.versions:
            raise model_not_found(asked, self.names)
        return asked

    def find(self, asked: str | None) -> ServedModel:
        """Return the model that a request names, or the only one; of its versions, the one with the most sessions.

        Raises `ApiError` 400 or 404.
        """
        name = self.named(asked)
        return self.models[self.versions[name].choose(None) if name in self.versions else name]

    def find_all(self, asked: str | None) -> list[ServedModel]:
        """Return the model that a request names with all its versions; None: all models. Raises `ApiError` 404."""
        if asked is None:
            return list(self.models.values())
        name = self.named(asked)
        labels = self.versions[name].labels if name in self.versions else [name]
        return [self.models[label] for label in labels]
