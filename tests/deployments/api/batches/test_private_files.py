"""What an ingress writes can be read by the server's user only, whatever the umask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from dataclasses import replace

from deployments.api.responses.kept import KeptResponses
from deployments.config.settings import ResponseSettings
from tests.deployments.api.batches.conftest import PATIENCE_S, Ingress, Office, lines


def test_all_that_is_written_is_private(office: Office) -> None:
    """Uploads, batches while they run and at their end, responses, conversations, locks and marks."""
    store = ResponseSettings(store=f"file://{office.directory}/responses")
    office.service = replace(office.service, responses=KeptResponses(store))
    modes: dict[str, int] = {}

    def look() -> None:
        for folder, folders, names in os.walk(office.directory):
            for path in (os.path.join(folder, name) for name in (*folders, *names)):
                with contextlib.suppress(FileNotFoundError):  # a batch goes on meanwhile
                    modes[path] = os.stat(path).st_mode

    async def scene(ingress: Ingress) -> None:
        batch = await ingress.until(await ingress.begin(lines("a", "b")), "in_progress", "completed")
        look()
        await ingress.until(batch, "completed")
        office.engine.hangs = True
        other = await ingress.until(await ingress.begin(lines("c")), "in_progress")
        async with asyncio.timeout(PATIENCE_S):
            while not any(path.endswith("/reserved") for path in modes):
                await asyncio.sleep(0.005)
                look()
        await ingress.ai.batches.cancel(other.id)
        look()
        office.engine.hangs = False
        await ingress.http.post("/v1/responses", json={"model": "demo", "input": "a"})
        made = (await ingress.http.post("/v1/conversations", json={})).json()
        await ingress.http.post(f"/v1/conversations/{made['id']}", json={"metadata": {"a": "b"}})
        look()

    before = os.umask(0)
    try:
        office.play(scene)
    finally:
        os.umask(before)
    found = {path.rpartition("/")[2].split("-")[0].split("_")[0] for path in modes}
    assert {
        "content",
        "about.json",
        "state.json",
        "input.jsonl",
        "cancel",
        "reserved",
        "lock",
        "resp",
        "conv",
    } <= found
    for path, mode in modes.items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path
