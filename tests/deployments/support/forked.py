"""Processes of tests, made by a server that has imported once what they need."""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing.context import ForkServerContext

_NEEDED = ["deployments.api", "deployments.client.remote_engines", "deployments.wire.server"]


@cache
def forked() -> ForkServerContext:
    """Return the context of processes that have neither this one's threads nor its environment of the moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_NEEDED)
    return context
