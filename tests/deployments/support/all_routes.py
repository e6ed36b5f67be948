"""A scripted service with all routes, those of administration, of a cluster and of files included."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.api import ApiService
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings

ADMIN = {"authorization": "Bearer root"}


class Cluster:
    """A cluster without nodes."""

    async def status(self) -> dict[str, Any]:
        return {"object": "cluster.status", "versions": {}, "missing": {}}

    async def nodes(self) -> dict[str, Any]:
        return {"object": "list", "data": [], "missing": {"nodes": "no answer"}}


class Rollouts:
    """The rollout of a second version of `demo`."""

    async def report(self) -> list[dict[str, Any]]:
        return [{"model": "demo", "weights": {"v1": 0.9, "v2": 0.1}, "rollout": ROLLOUT}]

    async def control(self, model: str, action: str) -> dict[str, Any] | None:
        return (await self.report())[0]


ROLLOUT = {
    "version": "v2", "state": "running", "percent": 10.0, "steps": [10.0, 100.0], "step": 1, "held_s": 3.5,
    "hold_s": 60.0, "measured": {"error_rate": 0.0, "ttft_p95": 0.4, "tpot_p95": None}, "num_requests": 30,
    "limits": {"error_rate": 0.05}, "reason": None, "changed_at": 1_700_000_000,
}  # fmt: skip


def with_all_routes(service: ApiService, files: Path) -> ApiService:
    """The service with all routes, whose model generates and embeds."""
    served = service.models["demo"]
    card = replace(served.card, tasks=("generate", "embed"), hidden_size=4)
    return replace(
        service,
        models={"demo": replace(served, card=card)},
        cluster=Cluster(),
        rollouts=Rollouts(),
        admin_key_hash=hashlib.sha256(b"root").hexdigest(),
        spool=Spool(FileSettings(directory=str(files))),
    )
