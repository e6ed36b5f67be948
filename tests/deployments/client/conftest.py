"""The tokenizer of the scripted API, for tests that have an API before their engines."""

from tests.deployments.support.scripted_api import codec

__all__ = ["codec"]
