"""The real application, but for its engines, which replay scripts: `build` is what Ray Serve imports."""

# No `from __future__ import annotations` here: Serve reads the type of `build`'s argument from its annotation.
from ray.serve import Application

from deployments.app import build_with
from deployments.config.args import AppArgs
from tests.clients.support.scripted_runner import engines


def build(args: AppArgs) -> Application:
    """Build the application that `args` describes."""
    return build_with(args, engines)
