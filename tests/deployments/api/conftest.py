"""The fixtures of the scripted API."""

from tests.deployments.support.scripted_api import client, codec, engine, metrics, service, transport

__all__ = ["client", "codec", "engine", "metrics", "service", "transport"]
