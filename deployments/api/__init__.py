"""The OpenAI-compatible HTTP API over any `EngineClient`. It depends neither on Ray nor on the transport to
engines.

Its exports are imported on first use, because the metrics hub needs one of the API's modules, but not the API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.api.application.app import create_app
    from deployments.api.served.served_model import ModelCard, ServedModel
    from deployments.api.served.text_codec import TextCodec
    from deployments.api.service.api_service import ApiService
    from deployments.config.limits import Limits

__all__ = ["ApiService", "Limits", "ModelCard", "ServedModel", "TextCodec", "create_app"]

_MODULES = {
    "ApiService": "deployments.api.service.api_service",
    "Limits": "deployments.config.limits",
    "ModelCard": "deployments.api.served.served_model",
    "ServedModel": "deployments.api.served.served_model",
    "TextCodec": "deployments.api.served.text_codec",
    "create_app": "deployments.api.application.app",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
