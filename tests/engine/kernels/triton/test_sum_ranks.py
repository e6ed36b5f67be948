"""Sums over ranks in one kernel: processes that share memory, and a rank whose peer never comes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton import sum_ranks
from engine.kernels.triton.norm import add_norm, add_norm_fp8
from engine.layers.linear import Rounded
from engine.parallel import one_shot
from engine.parallel.collective import Collective, open_store
from engine.parallel.one_shot import OneShotSum, open_one_shot
from engine.parallel.peer_memory import open_peer_memory
from engine.parallel.shard import Shard
from tests.engine.support.operations_seen import VIEWS, Operations
from tests.engine.support.summing_ranks import CALLS, EPS, MAX_BYTES, SIZE, mapped, numbers, weight_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks share host memory")


def test_all_ranks_get_the_same_as_from_a_sum_and_a_norm_of_their_own(tmp_path: Path) -> None:
    """Bit for bit, on each rank, whatever the number of rows of the call before; in float8 too."""
    num_ranks = 3
    command = [sys.executable, "-m", "tests.engine.support.summing_ranks", str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(num_ranks)], stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(num_ranks)]
    for call, (rows, dtype, rounds) in enumerate(CALLS):
        total = torch.zeros(rows, SIZE)
        for rank in range(num_ranks):
            total += numbers(call, rank, rows, dtype).float()
        x = numbers(call, -1, rows, dtype)
        given = x, total.to(dtype), weight_of(dtype), EPS
        normed = add_norm_fp8(*given, rounds) if rounds else (add_norm(*given),)
        for calls in found:
            assert torch.equal(calls[call][0], x)
            got = calls[call][1] if rounds else calls[call][1:]
            for mine, expected in zip(got, normed, strict=True):
                assert torch.equal(mine.float(), expected.float())


@pytest.mark.parametrize("rounds", [0, SIZE, 16])
def test_the_sum_its_norm_and_the_rounding_are_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """For plain layers and for both kinds that take rounded numbers."""
    launched: list[str] = []
    monkeypatch.setattr(sum_ranks, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    ranks = Collective(Shard(0, 2))
    ranks.one_shot = OneShotSum(mapped(tmp_path / "memory", 0, 2, MAX_BYTES), Shard(0, 2), MAX_BYTES)
    x, weight = torch.zeros(3, SIZE, dtype=torch.float16), weight_of(torch.float16)
    with Operations() as operations:
        _, normed = ranks.add_norm(cast(Any, None), x, x, weight, EPS, rounds=rounds)
    assert launched == ["_sum_add_norm"]
    assert operations.seen <= VIEWS | {"aten.empty.memory_format"}
    assert isinstance(normed, Rounded) == bool(rounds)


def test_a_rank_that_waits_for_a_lost_one_continues_when_told(tmp_path: Path) -> None:
    mine = OneShotSum(mapped(tmp_path / "memory", 0, 2, MAX_BYTES), Shard(0, 2), MAX_BYTES)
    x, part = numbers(0, -1, 2, torch.float32), numbers(0, 0, 2, torch.float32)
    waiting = threading.Thread(target=mine.add_norm, args=(x, part, weight_of(torch.float32), EPS), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "it computed a sum without the other rank"
    mine.abort()
    waiting.join(60)
    assert not waiting.is_alive()


def test_larger_parts_are_for_others(tmp_path: Path) -> None:
    mine = OneShotSum(mapped(tmp_path / "memory", 0, 2, 1024), Shard(0, 2), 1024)
    assert mine.takes(torch.zeros(2, 128))
    assert not mine.takes(torch.zeros(3, 128))


def test_nccl_sums_where_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on CPUs, of which torch has no symmetric memory."""
    monkeypatch.setattr(one_shot, "_check_device", lambda _: None)
    store, _ = open_store(1)
    assert open_one_shot(store, Shard(0, 1), torch.device("cpu"), 1024) is None
    assert "NCCL computes all sums over ranks" in caplog.text
    with pytest.raises((RuntimeError, AssertionError)):
        open_peer_memory(store, Shard(0, 1), torch.device("cpu"), 1024)
