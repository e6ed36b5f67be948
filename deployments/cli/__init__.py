"""The `raydix` command: serve, chat with, run offline, describe and plan models."""

from deployments.cli.app import main

__all__ = ["main"]
