"""A rank that takes part in sums of several sizes: by NCCL, by our one-shot kernel, and by torch's kernels.

python -m benchmarks.gpu_sections.rank_sums DEVICE NUM_RANKS PORT RANK

All ranks run the same sums in the same order; the first one prints their times, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import recorded_seconds_of
from engine.parallel.collective import Collective, find_store, join
from engine.parallel.rank_network import ONE_MACHINE
from engine.parallel.shard import Shard

_HIDDEN = 4096
_KIB = (8, 64, 512, 2048, 8192)
_TINY_KIB = (8, 64)


def sums(ranks: Collective, device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield who sums, KiB of a rank's part, and the call."""
    is_gpu = device.type == "cuda"
    for kib in _KIB if is_gpu else _TINY_KIB:
        rows = kib * 512 // _HIDDEN
        part = torch.ones(rows, _HIDDEN, dtype=torch.bfloat16, device=device)
        yield "nccl" if is_gpu else "gloo", kib, partial(ranks.sum, part)
        if ranks.one_shot is not None and ranks.one_shot.takes(part):
            weight = torch.ones(_HIDDEN, dtype=part.dtype, device=device)
            yield (
                "one-shot, with the norm",
                kib,
                partial(ranks.one_shot.add_norm, part.clone(), part, weight, 1e-5),
            )
    if is_gpu:
        yield from _of_torch(device)


def _of_torch(device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield torch's kernels for memory that all ranks map."""
    from torch.distributed import _symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    for kib in _KIB:
        memory = symmetric.empty(kib * 512, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(memory, group)
        for name in ("two_shot_all_reduce_", "multimem_all_reduce_"):
            yield (
                f"torch, {name}",
                kib,
                partial(getattr(torch.ops.symm_mem, name), memory, "sum", group.group_name),
            )


def main() -> None:
    kind, (count, port, rank) = sys.argv[1], map(int, sys.argv[2:])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    store = find_store(ONE_MACHINE, port, count + 1)
    ranks = join(store, Shard(rank, count), device, max(_KIB))
    if kind == "cuda":
        own = _c10d.PrefixStore("torch", store)
        dist.init_process_group("nccl", store=own, rank=rank, world_size=count, device_id=device)
    for by, kib, call in sums(ranks, device):
        what = f"sum of {kib} KiB over {count} ranks"
        try:
            line = Measurement(what, by=by, ms=1000 * recorded_seconds_of([call], device))
        except (RuntimeError, AttributeError) as error:
            line = Measurement(what, by=by, note=f"left out: {str(error)[:150]}")
        if rank == 0:
            print(json.dumps(asdict(line)), file=out, flush=True)
    # Exit at once: torch ends groups of several kinds in any order, and ranks could wait for each other.
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
