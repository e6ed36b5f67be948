"""Restricts administration to clients with the admin key."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request

from deployments.api.base.errors import ApiError


def require_admin(request: Request, key_hash: str | None) -> None:
    """Raise `ApiError` 401 or 403 unless the request has the key with this SHA-256 (hex)."""
    if key_hash is None:
        message = "Administration is off: set admin_key_hash, the SHA-256 of a key of your choice, in the config."
        raise ApiError(403, message, code="admin_key_not_configured")
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        headers = {"www-authenticate": "Bearer"}
        message = "This endpoint needs the admin key; send it as Authorization: Bearer KEY."
        raise ApiError(401, message, code="admin_key_missing", headers=headers)
    given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
    if not hmac.compare_digest(given, key_hash):
        raise ApiError(403, "This is not the admin key.", code="admin_key_wrong")
