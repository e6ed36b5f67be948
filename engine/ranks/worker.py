"""A rank other than the first: loads its share of the model, then computes every step that rank 0 sends.

It lives as long as its connection to rank 0. A separate thread reads the connection, so that the process ends as
soon as it closes, even while it computes or waits.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec
import torch

from engine.attention.part_reader import PartReader
from engine.kv_tier.rank_pages import RankPages
from engine.loading.load_model import load_model
from engine.parallel.collective import find_store, join
from engine.parallel.shard import Shard
from engine.parallel.stage import Stage
from engine.ranks.launcher import RankSpec
from engine.ranks.messages import (
    CopyExperts,
    FinishTask,
    LendPage,
    LoadTask,
    MovedPage,
    PagePart,
    PageTask,
    RankFailed,
    RankReady,
    ReadPage,
    ReplayTask,
    Report,
    StepTask,
    StoredPage,
    Work,
    WritePage,
    encode,
    read_load_task,
    read_work,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_runner import Begun, StageRunner
from engine.values.plan import StepResult, StepUnderway, result_of

_CONNECT_S = 30.0


def work(spec: RankSpec, leave: Callable[[], None]) -> None:
    """Serve rank 0 until its connection closes. `leave` is then called from another thread and need not return."""
    connection = connect(spec)
    reports = _Reports(connection)
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox, leave), daemon=True).start()
    try:
        first = inbox.get()
        if first is not None:
            _compute(spec, read_load_task(first), reports, inbox)
    except BaseException as error:
        failed = RankFailed(f"rank {spec.rank} failed: {type(error).__name__}: {error}")
        try:
            reports.send(failed)
        except OSError:  # Rank 0 has ended, so this rank failed, too.
            return
        raise


def connect(spec: RankSpec) -> Connection:
    """Connect to rank 0; both sides prove the key. Raises OSError and AuthenticationError."""
    connection = Connection(spec.network.connect(spec.port, _CONNECT_S).detach())
    answer_challenge(connection, spec.key)
    deliver_challenge(connection, spec.key)
    return connection


class _Reports:
    """Sends reports to rank 0, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, report: Report) -> None:
        """Send a report. Raises OSError if rank 0 has ended."""
        with self._lock:
            self._connection.send_bytes(encode(report))


def _compute(spec: RankSpec, task: LoadTask, reports: _Reports, inbox: queue.SimpleQueue[bytes | None]) -> None:
    config, shard = task.config, Shard.of_engine(task.config, spec.rank)
    stage = Stage(spec.rank // shard.size, task.starts)
    device = torch.device(config.device, spec.gpu) if config.device == "cuda" else torch.device("cpu")
    reports.send(RankReady(spec.rank, device_name(device)))
    store = find_store(spec.network, task.store_port, shard.size * stage.count)
    ranks = join(store, shard, device, config.one_shot_kib, stage, spec.network, config.context_parallel_size)
    runner = load_model(config, ranks=ranks)  # on the GPU that `join` selected for this thread
    pages: RankPages | None = None
    if config.kv_tier is not None:
        pages = runner.rank_pages(config.kv_tier, lambda moved: reports.send(MovedPage(*moved)))
    parts = runner.part_reader(lambda number, data: reports.send(PagePart(spec.rank, number, memoryview(data))))
    doing = _Doing(runner, pages, parts, reports, device)
    try:
        while (message := inbox.get()) is not None:
            doing.do(read_work(message))
    finally:
        for closing in (pages, parts):
            if closing is not None:
                closing.close()


class _Doing:
    """Runs the tasks that rank 0 sends, in order."""

    def __init__(
        self,
        runner: ModelRunner,
        pages: RankPages | None,
        parts: PartReader | None,
        reports: _Reports,
        device: torch.device,
    ) -> None:
        self._runner, self._pages, self._parts = runner, pages, parts
        self._reports, self._device = reports, device
        self._begun: deque[Begun] = deque()
        """The steps that are on later stages, if this rank is of the first of several."""
        self._last: StepResult | StepUnderway = StepResult((), ())
        """The last step, which the device may still run: only rank 0 waits for tokens."""

    def do(self, work: Work) -> None:
        """Run a step, or move a page after the earlier steps."""
        if isinstance(work, ReplayTask):
            self._last = self._runner.replay(work.step())
            return
        if isinstance(work, StepTask):
            self._run(work.step(self._device))
            return
        if isinstance(work, CopyExperts):
            self._runner.place_copies(work.changes)
            return
        if isinstance(work, FinishTask):
            assert isinstance(self._runner, StageRunner), "only stages finish steps"
            self._runner.finish(self._begun.popleft())
            return
        self._last = result_of(self._last)  # The GPU may still copy pages.
        self._move(work)

    def _run(self, step: PreparedStep) -> None:
        if not isinstance(self._runner, StageRunner):
            self._last = self._runner.compute(step)
        elif self._runner.is_first:
            self._begun.append(self._runner.begin(step))
        else:
            self._runner.begin(step)

    def _move(self, task: PageTask) -> None:
        if isinstance(task, WritePage | ReadPage):
            assert self._pages is not None, "only ranks with files get tasks to move pages to and from them"
            if isinstance(task, WritePage):
                self._pages.write(task.key, task.page, task.blocks)
            else:
                self._pages.read(task.key, task.page)
            return
        assert self._parts is not None, "only ranks with host pages get tasks to lend and store pages"
        if isinstance(task, LendPage):
            self._parts.read(task.number, task.is_device, task.page)
            return
        self._parts.write(task.page, task.data)
        self._reports.send(StoredPage())


def device_name(device: torch.device) -> str:
    """Return the maker's name of a GPU, "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _receive(connection: Connection, inbox: queue.SimpleQueue[bytes | None], leave: Callable[[], None]) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        inbox.put(None)
        leave()


if __name__ == "__main__":
    work(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankSpec), lambda: os._exit(0))
