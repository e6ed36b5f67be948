"""Chooses the version of a model for a request: that of its session, or of the stream that it continues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from deployments.api.http.access import tenant_of
from deployments.api.http.scopes import header, request_id
from deployments.api.responses.ids import is_response_id
from deployments.api.responses.stored import StoredResponse
from deployments.api.served.served_model import ServedModel
from deployments.api.service.api_service import ApiService
from deployments.api.streams.asked import AskedStream


async def version_for(
    service: ApiService, request: Request, fields: Mapping[str, Any], stream: AskedStream | None
) -> ServedModel:
    """Return the model that a body names; of several versions, the one for this request.

    Raises `ApiError` 400 or 404.
    """
    asked = fields.get("model")
    name = service.named(asked if isinstance(asked, str) else None)
    versions = service.versions.get(name)
    if versions is None:
        return service.models[name]
    tenant = tenant_of(request).name
    if stream is not None and stream.is_continued:
        having = [service.models[label] for label in versions.labels]
        for served, found in zip(
            having, await asyncio.gather(*(one.client.find(stream.name.id, tenant) for one in having)), strict=True
        ):
            if found is not None and found.parts:
                return served
    session = await _session(service, tenant, request, fields)
    if session is None:  # A stream is continued by its name, so that is its session.
        session = request_id(request.scope) if stream is None or not stream.name.id else stream.name.id
    return service.models[versions.choose(f"{tenant}\0{session}")]


async def _session(service: ApiService, tenant: str, request: Request, fields: Mapping[str, Any]) -> str | None:
    """Return what a client calls the session of a request; None if it says nothing."""
    conversation = fields.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for given in (header(request.scope, b"x-session-id"), fields.get("prompt_cache_key"), conversation):
        if given and isinstance(given, str):
            return given
    previous = fields.get("previous_response_id")
    if not isinstance(previous, str) or not is_response_id(previous):
        return None
    (packed,) = await service.responses.store.get(tenant, [previous])
    chain = [] if packed is None else StoredResponse.unpacked(packed).chain
    return chain[0] if chain else previous
