"""The fixtures of the scripted API, for what an ingress does with it."""

from tests.deployments.support.scripted_api import codec, engine, metrics, service

__all__ = ["codec", "engine", "metrics", "service"]
