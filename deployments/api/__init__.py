"""The OpenAI-compatible HTTP API over any `EngineClient`. It knows neither Ray nor how engines are reached."""

from deployments.api.app import create_app
from deployments.api.service import ApiService, ModelCard, ServedModel
from deployments.api.text_codec import TextCodec
from deployments.config.limits import Limits

__all__ = ["ApiService", "Limits", "ModelCard", "ServedModel", "TextCodec", "create_app"]
