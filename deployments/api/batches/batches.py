"""The endpoints of /v1/batches. The work is done by the `BatchWorker` of an ingress, this one's or another's."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import invalid, quoted
from deployments.api.batches.files import PURPOSE
from deployments.api.batches.spooled import folder_of, no_room, spool_of, unknown_batch, unknown_file
from deployments.api.batches.upload import EXPIRY_SECONDS, checked_ttl
from deployments.api.fields.metadata import checked_metadata
from deployments.api.fields.openapi import body_of
from deployments.api.fields.protocol import Int, parse
from deployments.api.fields.strict_model import StrictModel
from deployments.api.http.access import tenant_of
from deployments.api.http.body import ReadBody
from deployments.api.http.paging import page_of, page_size
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response, name_ignored
from deployments.api.service.api_service import ApiService
from deployments.batch.in_thread import in_thread
from deployments.batch.input_file import URLS
from deployments.batch.spool import SpoolFull, TenantFolder
from deployments.batch.stored_batches import BatchRecord, StoredBatches, new_batch_id
from deployments.batch.stored_files import StoredFiles

PAGE, LARGEST_PAGE = 20, 100
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
"""Units of a `completion_window`, in seconds."""
MAX_UNITS = 999_999


class OutputExpiry(StrictModel):
    """For how long a batch's files are kept."""

    anchor: Annotated[str, Field(json_schema_extra={"enum": ["created_at"]})]
    seconds: Annotated[Int, Field(json_schema_extra=EXPIRY_SECONDS)]


class NewBatch(StrictModel):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": [*URLS]})]
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


def add_batch_routes(table: RouteTable, service: ApiService, read: ReadBody) -> None:
    """Register them."""
    routes = _BatchRoutes(service, read)
    table.add("POST", "/v1/batches", routes.create, body=partial(body_of, NewBatch))
    table.add("GET", "/v1/batches", routes.list)
    table.add("GET", "/v1/batches/{batch_id}", routes.retrieve)
    table.add("POST", "/v1/batches/{batch_id}/cancel", routes.cancel)


class _BatchRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService, read: ReadBody) -> None:
        self._service, self._read = service, read

    async def create(self, request: Request) -> Response:
        """Leave a batch to be worked on."""
        folder = folder_of(self._service, request)
        asked, ignored = parse(await self._read(request), self._service.limits, NewBatch)
        if ignored:
            name_ignored(request.scope, ignored)
        record = _new_record(asked, folder, tenant_of(request).name)
        await in_thread(_create, folder, record)
        spool_of(self._service).changed()
        return json_response(shown(record))

    async def list(self, request: Request) -> Response:
        """List the tenant's batches, the newest first."""
        limit = page_size(request, PAGE, LARGEST_PAGE)
        found = await in_thread(StoredBatches(folder_of(self._service, request)).all)
        return json_response(page_of(request, found, limit, lambda record: record.id, shown))

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """Return a batch as it is."""
        return json_response(shown(await self._find(request, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch early; its answers until then are kept."""
        record = await self._find(request, batch_id)
        if record.has_ended:
            message = (
                f"The batch has the status {record.status!r}, and only one that has not ended can be cancelled."
            )
            raise invalid(message, "batch_id")
        await in_thread(StoredBatches(folder_of(self._service, request)).cancel, batch_id)
        spool_of(self._service).changed()
        return json_response(shown(await self._find(request, batch_id)))

    async def _find(self, request: Request, batch_id: str) -> BatchRecord:
        found = await in_thread(StoredBatches(folder_of(self._service, request)).find, batch_id)
        if found is None:
            raise unknown_batch(batch_id)
        return found


def _new_record(asked: NewBatch, folder: TenantFolder, tenant: str) -> BatchRecord:
    """Return the record of a new batch. Raises `ApiError` 400."""
    if asked.endpoint not in URLS:
        raise invalid(f"endpoint is {quoted(asked.endpoint)}; it must be {' or '.join(URLS)}.", "endpoint")
    now, expiry = int(folder.clock()), asked.output_expires_after
    ttl_s = None if expiry is None else checked_ttl(expiry.anchor, expiry.seconds, "output_expires_after")
    return BatchRecord(
        id=new_batch_id(),
        tenant=tenant,
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + _seconds(asked.completion_window, folder.settings.max_window_s),
        metadata=checked_metadata(asked.metadata),
        output_ttl_s=ttl_s,
    )


def _create(folder: TenantFolder, record: BatchRecord) -> None:
    """Keep a new batch. Raises `ApiError` 400 or 404."""
    files = StoredFiles(folder)
    file = files.find(record.input_file_id)
    if file is None:
        raise unknown_file(record.input_file_id, "input_file_id")
    if file.purpose != PURPOSE:
        raise invalid(
            f"input_file_id names a file with the purpose {file.purpose!r}; it must be {PURPOSE!r}.",
            "input_file_id",
        )
    try:
        StoredBatches(folder).create(record, files.content(file.id))
    except SpoolFull as error:
        raise no_room(error) from None
    except FileNotFoundError:
        raise unknown_file(record.input_file_id, "input_file_id") from None


def _seconds(window: str, most_s: float) -> int:
    found = _WINDOW.fullmatch(window)
    if found is None:
        raise invalid(
            f'completion_window must be a time such as "24h", got {quoted(window)}.', "completion_window"
        )
    seconds = int(found[1]) * UNIT_S[found[2]]
    if seconds > most_s:
        raise invalid(
            f"completion_window is {quoted(window)}; it must be at most {most_s:g} seconds (files.max_window_s).",
            "completion_window",
        )
    return seconds


def shown(record: BatchRecord) -> dict[str, Any]:
    """Return a batch as OpenAI's API shows it."""
    status, ended_at = record.status, record.ended_at
    problems = [msgspec.structs.asdict(problem) for problem in record.errors]
    has_files = record.has_ended
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status,
        "output_file_id": record.output_file_id if has_files else None,
        "error_file_id": record.error_file_id if has_files else None,
        "created_at": record.created_at,
        "in_progress_at": record.in_progress_at,
        "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at,
        "completed_at": ended_at if status == "completed" else None,
        "failed_at": ended_at if status == "failed" else None,
        "expired_at": ended_at if status == "expired" else None,
        "cancelling_at": record.cancelling_at,
        "cancelled_at": ended_at if status == "cancelled" else None,
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "metadata": record.metadata,
    }
