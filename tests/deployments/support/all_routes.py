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


def with_all_routes(service: ApiService, files: Path) -> ApiService:
    """The service with all routes, whose model generates and embeds."""
    served = service.models["demo"]
    card = replace(served.card, tasks=("generate", "embed"), hidden_size=4)
    return replace(
        service,
        models={"demo": replace(served, card=card)},
        cluster=Cluster(),
        admin_key_hash=hashlib.sha256(b"root").hexdigest(),
        spool=Spool(FileSettings(directory=str(files))),
    )
