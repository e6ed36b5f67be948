"""A process that works on the batches of a spool until it is killed: it answers as many requests as it is told.

python -m tests.deployments.batch.support.worker_process DIRECTORY COUNT
"""

from __future__ import annotations

import asyncio
import sys

from deployments.batch.batch_worker import BatchWorker
from deployments.batch.runner import Reply
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from deployments.config.settings import BatchSettings
from tests.deployments.batch.support.batch_files import Shuffling


class Tiring(Shuffling):
    """Answers `count` requests, and no more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    async def post(self, url: str, body: bytes) -> Reply:
        if len(self.bodies) == self._count:
            await asyncio.Event().wait()
        return await super().post(url, body)


async def work(directory: str, count: int) -> None:
    spool = Spool(FileSettings(directory=directory, poll_s=0.01))
    api = Tiring(count)
    BatchWorker(spool, BatchSettings(max_in_flight=4), lambda tenant: api.post, 10_000).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
