"""The scripted service with a spool, and workers on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from deployments.api import ApiService, create_app
from deployments.batch.batch_worker import BatchWorker
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from deployments.config.settings import BatchSettings
from deployments.ingress.batches import batch_worker
from tests.deployments.support.scripted_api import ScriptedEngine

__all__ = ["office"]
CHAT: Final = "/v1/chat/completions"
PATIENCE_S = 60.0


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    """A request of a batch."""
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": custom_id}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": asked})


def lines(*names: str) -> bytes:
    """A file of requests."""
    return "\n".join(map(line, names)).encode()


BOUNDARY = "----b0undary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """A part of a form."""
    given = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{given}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")


class Clock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Office:
    """A service whose ingress has a spool; several with the same directory are several ingresses."""

    service: ApiService
    engine: ScriptedEngine
    directory: Path
    clock: Clock
    settings: FileSettings
    batch: BatchSettings

    def ingress(self, **files: Any) -> Ingress:
        settings = self.settings.model_copy(update=files)
        spool = Spool(settings, self.clock)
        return Ingress(replace(self.service, spool=spool), spool, self.batch)

    def play(self, scene: Callable[[Ingress], Awaitable[None]], **files: Any) -> None:
        """Play a scene at an ingress that works on batches."""

        async def run() -> None:
            async with self.ingress(**files).working() as ingress:
                await scene(ingress)

        asyncio.run(run())


class Ingress:
    """One process's API and worker."""

    def __init__(self, service: ApiService, spool: Spool, batch: BatchSettings) -> None:
        self.service, self.spool = service, spool
        app = create_app(service)
        self.worker: BatchWorker = batch_worker(spool, app, service, batch)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)
        self.ai = self.client("none")

    def client(self, key: str) -> openai.AsyncOpenAI:
        options: dict[str, Any] = {"http_client": self.http}
        return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, **options)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Ingress]:
        self.worker.start()
        try:
            yield self
        finally:
            await self.worker.aclose()
            await self.http.aclose()

    async def upload(self, content: bytes, ai: openai.AsyncOpenAI | None = None) -> Any:
        return await (ai or self.ai).files.create(file=("in.jsonl", content), purpose="batch")

    async def begin(self, content: bytes, endpoint: str = CHAT, window: str = "24h", **options: Any) -> Any:
        file = await self.upload(content)
        given: Any = {"endpoint": endpoint, "completion_window": window, **options}
        return await self.ai.batches.create(input_file_id=file.id, **given)

    async def until(self, batch: Any, *statuses: str) -> Any:
        """Wait until a batch has one of these statuses."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.ai.batches.retrieve(batch.id)).status not in statuses:
                await asyncio.sleep(0.005)
        return found

    async def read(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """Return a file's lines by their names."""
        assert file_id is not None
        text = (await self.ai.files.content(file_id)).text
        found = [json.loads(each) for each in text.splitlines()]
        return {each["custom_id"]: each for each in found}


@pytest.fixture
def office(service: ApiService, engine: ScriptedEngine, tmp_path: Path) -> Office:
    settings = FileSettings(directory=str(tmp_path / "spool"), poll_s=0.01)
    batch = BatchSettings(max_in_flight=4, max_attempts=1)
    return Office(service, engine, tmp_path / "spool", Clock(), settings, batch)
