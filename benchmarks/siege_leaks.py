"""What the application still holds when its attackers have gone: gauges, connections, descriptors, threads."""

from __future__ import annotations

import asyncio
import time

from benchmarks.siege_app import Target

PATIENCE_S = 180.0
"""Longest time for the last of it to be given back: an engine keeps what a lost ingress asked for 10 s."""
GAUGES = (
    "raydix_requests_running",
    "raydix_requests_waiting",
    "raydix_waiting_prefill_tokens",
    "raydix_admission_waiting_requests",
    "raydix_admission_waiting_tokens",
    "raydix_http_inflight_requests",
)


async def leaked(target: Target) -> list[str]:
    """Wait until nothing is held; return what still is after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while held := await _held(target):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(1.0)
    return held


async def _held(target: Target) -> list[str]:
    samples = target.app.samples
    if not await samples("raydix_engine_up"):
        return ["/metrics has no engine"]
    held = [f"{name} {labels} is {value:g}" for name in GAUGES for labels, value in await samples(name) if value]
    pages = await samples("raydix_kv_pages", state="active")
    return held + [f"{value:g} KV pages of {labels['replica']} are in use" for labels, value in pages if value]
