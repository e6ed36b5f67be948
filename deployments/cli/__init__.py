"""The `raydix` command: serve a model, talk to it, run one offline, look at one."""

from deployments.cli.app import main

__all__ = ["main"]
