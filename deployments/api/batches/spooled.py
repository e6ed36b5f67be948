"""Shared by the endpoints of files and batches: the spool, a tenant's part of it, and their errors."""

from __future__ import annotations

from starlette.requests import Request

from deployments.api.base.errors import ApiError, quoted
from deployments.api.http.access import tenant_of
from deployments.api.service.api_service import ApiService
from deployments.batch.spool import Spool, SpoolFull, TenantFolder


def spool_of(service: ApiService) -> Spool:
    """Return the spool. Raises `ApiError` 404 where there is none."""
    if service.spool is None:
        message = "This server keeps no files and runs no batches: files.directory says where, and is not set."
        raise ApiError(404, message, code="files_off")
    return service.spool


def folder_of(service: ApiService, request: Request) -> TenantFolder:
    """Return the part of the spool of the request's tenant. Raises `ApiError` 404."""
    return spool_of(service).of(tenant_of(request).name)


def no_room(error: SpoolFull) -> ApiError:
    """Create a 400 for a bound that is reached: sending the request again would not help."""
    return ApiError(400, str(error), code="storage_full")


def unknown_file(name: str, param: str | None = None) -> ApiError:
    """Create a 404 for a file that this tenant does not have."""
    message = f"There is no file {quoted(name)}: it was never uploaded, was deleted, or has expired."
    return ApiError(404, message, param=param, code="file_not_found")


def unknown_batch(name: str) -> ApiError:
    """Create a 404 for a batch that this tenant does not have."""
    message = f"There is no batch {quoted(name)}: it was never made, or ended long ago (files.keep_s)."
    return ApiError(404, message, code="batch_not_found")
