"""The endpoints of /v1/files: uploads for batches, and the answers of batches."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from deployments.api.base.errors import invalid, quoted
from deployments.api.batches.spooled import folder_of, no_room, unknown_file
from deployments.api.batches.upload import EXPIRY_SECONDS, FileForm, receive_form, ttl_in
from deployments.api.http.origins import undeclared
from deployments.api.http.paging import is_newest_first, page_of, page_size
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response
from deployments.api.http.unread import SMALL_BYTES
from deployments.api.service.api_service import ApiService
from deployments.batch.in_thread import in_thread
from deployments.batch.spool import SpoolFull
from deployments.batch.stored_files import FileRecord, StoredFiles
from engine.base.files import checked

PURPOSE = "batch"
_LARGEST_PAGE = 10_000
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "minLength": 1},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": EXPIRY_SECONDS,
                    },
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                }
            }
        },
    }
}


def add_file_routes(table: RouteTable, service: ApiService) -> None:
    """Register them."""
    routes = _FileRoutes(service)
    table.add("POST", "/v1/files", routes.create, body=lambda: _BODY)
    table.add("GET", "/v1/files", routes.list)
    table.add("GET", "/v1/files/{file_id}", routes.retrieve)
    table.add("DELETE", "/v1/files/{file_id}", routes.delete)
    table.add("GET", "/v1/files/{file_id}/content", routes.content)


class FileContent(FileResponse):
    """A file, which is read from disk only as fast as its client reads it."""

    chunk_size = SMALL_BYTES


class _FileRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Keep a file."""
        folder = folder_of(self._service, request)
        self._check_origin(request)
        files = StoredFiles(folder)
        try:
            form = await receive_form(request, files, self._service.limits, folder.settings.max_file_bytes)
        except SpoolFull as error:
            raise no_room(error) from None
        try:
            return json_response(shown(await in_thread(_kept, files, form)))
        finally:
            await in_thread(form.close)

    async def list(self, request: Request) -> Response:
        """List the tenant's files."""
        limit, newest_first = page_size(request, _LARGEST_PAGE, _LARGEST_PAGE), is_newest_first(request)
        found = await in_thread(self._files(request).all)
        purpose = request.query_params.get("purpose")
        kept = [file for file in found if purpose in (None, file.purpose)]
        if newest_first:
            kept.reverse()
        return json_response(page_of(request, kept, limit, lambda file: file.id, shown))

    async def retrieve(self, request: Request, file_id: str) -> Response:
        """Return the description of a file."""
        return json_response(shown(await self._find(request, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        """Return a file's content."""
        file = await self._find(request, file_id)
        path = self._files(request).content(file.id)
        try:
            found = await in_thread(checked, path)
        except FileNotFoundError:  # it was deleted meanwhile
            raise unknown_file(file_id) from None
        return FileContent(path, media_type="application/octet-stream", filename=file.filename, stat_result=found)

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file. Batches that read it continue."""
        if not await in_thread(self._files(request).delete, file_id):
            raise unknown_file(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    def _check_origin(self, request: Request) -> None:
        """Raise `ApiError` 403 for a page of another site: browsers send forms without asking first."""
        origin, declared = request.headers.get("origin"), self._service.cors_origins
        if origin is not None and origin not in declared and "*" not in declared:
            raise undeclared(origin.encode())

    def _files(self, request: Request) -> StoredFiles:
        return StoredFiles(folder_of(self._service, request))

    async def _find(self, request: Request, file_id: str) -> FileRecord:
        found = await in_thread(self._files(request).find, file_id)
        if found is None:
            raise unknown_file(file_id)
        return found


def shown(file: FileRecord) -> dict[str, Any]:
    """Return a file as OpenAI's API shows it."""
    return {"object": "file", **msgspec.structs.asdict(file), "status": "processed", "status_details": None}


def _kept(files: StoredFiles, form: FileForm) -> FileRecord:
    """Keep a form's file, if its fields are right. Raises `ApiError` 400."""
    purpose = form.fields.get("purpose")
    if purpose != PURPOSE:
        got = "none" if purpose is None else quoted(purpose)
        raise invalid(f"purpose must be {PURPOSE!r}, the only purpose here; got {got}.", "purpose")
    assert form.upload is not None
    if not form.upload.num_bytes:
        raise invalid("The file is empty; a batch needs a request on each line.", "file")
    return files.keep(form.upload, form.filename, PURPOSE, ttl_in(form.fields))
