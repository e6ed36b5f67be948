"""The types of reports: models, health, the cluster, decisions."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from deployments.batch.stored_files import FileRecord
from deployments.client.protocol import HealthState, ModelState, ReplicaHealth, RolloutStage


class Model(Struct):
    """A served model; its state is null if it is not known now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    state: ModelState | None


class Models(Struct):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class ModelHealth(Struct):
    """The replicas of one model."""

    status: HealthState
    replicas_up: int
    replicas_expected: int


class Health(Struct):
    """The engines as this ingress sees them."""

    status: HealthState
    replicas_up: int
    replicas_expected: int
    replicas: list[ReplicaHealth]
    refuses_settings: bool
    """Whether the latest `user_config` was wrong, so that this ingress keeps the settings before it."""
    needs_key: bool
    """Whether requests without an API key are refused."""
    has_admin_key: bool
    """Whether there is a key for administration; without one, administration is off."""
    models: dict[str, ModelHealth]


class Ready(Struct):
    """Whether a load balancer should send requests to this ingress, and why not."""

    ready: bool
    reason: str | UnsetType = UNSET


class Load(Struct):
    """Generations that this ingress has not ended."""

    server_load: int


class Version(Struct):
    """The server's version."""

    version: str


class ServerInfo(Struct):
    """Facts about this application."""

    version: str
    models: list[Model]
    settings: dict[str, Any]


class EmptiedCache(Struct):
    """The pages that each replica of a model freed."""

    id: str
    object: Literal["prefix_cache.reset"]
    freed_pages: dict[str, int]


class EmptiedCaches(Struct):
    """The models whose prefix caches were emptied."""

    object: Literal["list"]
    data: list[EmptiedCache]


class RolloutReport(Struct):
    """The rollout of a new version."""

    version: str
    state: RolloutStage
    percent: float
    """Its share of the sessions."""
    steps: list[float]
    step: int
    """Number of steps that it has reached."""
    held_s: float | None
    """Seconds at this step; null where no step is held."""
    hold_s: float
    measured: dict[str, float | None] | None
    """The values that `limits` bounds, since the step began; null for one that was not observed."""
    num_requests: int | None
    """Requests that it has answered since the step began."""
    limits: dict[str, float]
    reason: str | None
    """Why it was rolled back, or what it waits for."""
    changed_at: int | None
    """Unix time of the last change; null before the first."""


class VersionedModel(Struct):
    """A model that has versions."""

    model: str
    weights: dict[str, float]
    """The share of the sessions of each version, 0 to 1."""
    rollout: RolloutReport | None


class RolloutList(Struct):
    """The models that have versions."""

    object: Literal["list"]
    data: list[VersionedModel]


class ListOfObjects(Struct):
    """Objects whose form is described in docs/api.md."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    missing: dict[str, str] | UnsetType = UNSET


class StoredFile(FileRecord, kw_only=True):
    """A file that batches read, or that one has answered."""

    object: Literal["file"]
    status: Literal["processed"]
    status_details: None


class FilePage(Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(Struct):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class Batch(Struct):
    """A batch in its present state."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchPage(Struct):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ErrorObject(Struct):
    """Says what was wrong, what was expected, and what to do; `param` is the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """An error of OpenAI's API."""

    error: ErrorObject


class MessageErrorObject(Struct):
    """Says what was wrong, what was expected, and what to do."""

    type: str
    message: str


class MessageError(Struct):
    """An error of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: str | None
