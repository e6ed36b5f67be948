"""What chaos.py takes for a transfer under way, and how it spoils the KV tier."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.chaos_faults import NotPossible
from benchmarks.chaos_transfers import LEAST_BYTES, TransferWatch, _spoil
from engine.kv_tier.page_files import PageFiles


def _send(port: int, amounts: Connection) -> None:
    """Send as many bytes as it is told, each time that it is told."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while amount := amounts.recv():
            connection.sendall(b"x" * amount)
            amounts.send(None)


def test_pages_that_come_from_another_process_are_a_transfer_and_messages_are_none() -> None:
    told, tells = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = multiprocessing.get_context("spawn").Process(target=_send, args=(server.getsockname()[1], tells))
        source.start()
        accepted, _ = server.accept()
        assert source.pid is not None
        with accepted:
            try:
                watch = TransferWatch([os.getpid(), source.pid])
            except NotPossible as reason:
                pytest.skip(str(reason))
            with watch:
                for amount in (LEAST_BYTES // 2, LEAST_BYTES):
                    assert watch.wait(0.0) is None
                    told.send(amount)
                    told.recv()
                found = watch.wait(60.0)
            assert found is not None and found.num_bytes > LEAST_BYTES
            assert (found.source, found.receiver) == (source.pid, os.getpid())
        told.send(0)
        source.join()


def test_spoilt_pages_are_found_out(tmp_path: Path) -> None:
    pages = PageFiles(tmp_path, {"model": "m"}, [4096], 2**20)
    keys = [bytes([number]) * 32 for number in range(8)]
    for key in keys:
        pages.write(key, memoryview(bytearray(4096)))
    assert _spoil(tmp_path, random.Random(1)) == len(keys)
    assert not any(pages.read(key, memoryview(bytearray(4096))) for key in keys)
