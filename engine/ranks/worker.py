"""A rank other than the first: loads its share of the model, then computes every step that rank 0 sends.

It lives as long as its connection to rank 0. A separate thread reads the connection, so that the process ends as
soon as it closes, whatever the process computes or waits for.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection

import msgspec
import torch

from engine.loading.load_model import load_model
from engine.parallel.collective import HOST, find_store, join
from engine.parallel.shard import Shard
from engine.ranks.launcher import RankSpec
from engine.ranks.messages import LoadTask, RankFailed, RankReady, encode, read_load_task, read_step_task


def work(spec: RankSpec, leave: Callable[[], None]) -> None:
    """Serve rank 0 until its connection closes. `leave` is then called from another thread and need not return."""
    connection = Client((HOST, spec.port), authkey=spec.key)
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox, leave), daemon=True).start()
    try:
        first = inbox.get()
        if first is not None:
            _compute(spec, read_load_task(first), connection, inbox)
    except BaseException as error:
        failed = RankFailed(f"rank {spec.rank} failed: {type(error).__name__}: {error}")
        try:
            connection.send_bytes(encode(failed))
        except OSError:  # rank 0 has ended, which is why this rank failed
            return
        raise


def _compute(
    spec: RankSpec, task: LoadTask, connection: Connection, inbox: queue.SimpleQueue[bytes | None]
) -> None:
    config, shard = task.config, Shard.of_engine(task.config, spec.rank)
    device = torch.device(config.device, spec.gpu) if config.device == "cuda" else torch.device("cpu")
    connection.send_bytes(encode(RankReady(spec.rank, device_name(device))))
    ranks = join(find_store(task.store_port, shard.size), shard, device)
    runner = load_model(config, ranks=ranks)  # on the GPU that `join` selected for this thread
    while (message := inbox.get()) is not None:
        runner.compute(read_step_task(message).step(device))


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
