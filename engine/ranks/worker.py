"""A rank other than the first: loads its share of the model, then computes every step that rank 0 tells it of.

It lives as long as its connection to rank 0: a thread of its own reads that, so that the process ends at once when
it closes, whatever the process computes or waits for.
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
from engine.ranks.launcher import Seat
from engine.ranks.messages import Failed, Hello, Task, encode, read_task, read_work


def work(seat: Seat, leave: Callable[[], None]) -> None:
    """Serve rank 0 until it is gone; `leave` is called then, from another thread, and need not return."""
    connection = Client((HOST, seat.port), authkey=seat.key)
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox, leave), daemon=True).start()
    try:
        first = inbox.get()
        if first is not None:
            _compute(seat, read_task(first), connection, inbox)
    except BaseException as error:
        failed = Failed(f"rank {seat.rank} failed: {type(error).__name__}: {error}")
        try:
            connection.send_bytes(encode(failed))
        except OSError:  # rank 0 is gone: that is why
            return
        raise


def _compute(seat: Seat, task: Task, connection: Connection, inbox: queue.SimpleQueue[bytes | None]) -> None:
    config, shard = task.config, Shard.of_engine(task.config, seat.rank)
    device = torch.device(config.device, seat.gpu) if config.device == "cuda" else torch.device("cpu")
    connection.send_bytes(encode(Hello(seat.rank, device_name(device))))
    ranks = join(find_store(task.store_port, shard.size), shard, device)
    runner = load_model(config, ranks=ranks)  # on the GPU that `join` made this thread's
    while (message := inbox.get()) is not None:
        runner.compute(read_work(message).step(device))


def device_name(device: torch.device) -> str:
    """Its maker's name for a GPU, "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _receive(connection: Connection, inbox: queue.SimpleQueue[bytes | None], leave: Callable[[], None]) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        inbox.put(None)
        leave()


if __name__ == "__main__":
    work(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Seat), lambda: os._exit(0))
