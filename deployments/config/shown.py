"""Selects the parts of the configuration that clients may see: no keys, tenants, texts or credentials."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from deployments.config.args import AppArgs

HIDDEN = ("tenants", "admin_key_hash", "access_file", "shared_prefixes")


def shown_settings(args: AppArgs) -> dict[str, Any]:
    """Return the settings as the YAML has them, defaults included; URLs without credentials and queries."""
    one_model = {"engine", "engines", "chat"} if args.models else {"models"}
    shown: dict[str, Any] = _without_credentials(args.model_dump(mode="json", exclude={*HIDDEN, *one_model}))
    return shown


def _without_credentials(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_credentials(inner) for inner in value]
    if isinstance(value, str) and "://" in value:
        url = urlsplit(value)
        return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return value
