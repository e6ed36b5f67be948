"""The fixtures of the scripted API, for commands that ask a server."""

from tests.deployments.support.scripted_api import codec, engine, metrics, service

__all__ = ["codec", "engine", "metrics", "service"]
