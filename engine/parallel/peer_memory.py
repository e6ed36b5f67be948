"""Memory of each GPU that all ranks' kernels can read and write: torch's symmetric memory."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d

from engine.parallel.shard import Shard

_c10d: Any = _distributed_c10d  # torch declares it only in part
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class PeerMemory(NamedTuple):
    """Equal amounts of memory on all ranks, at fixed addresses."""

    own: torch.Tensor
    """uint8 [bytes], this rank's, zero at the start."""
    addresses: torch.Tensor
    """int64 [ranks], on the device: the addresses at which this rank reaches each rank's memory."""
    handle: object = None
    """Keeps the memory mapped and the group known."""


def open_peer_memory(store: Any, shard: Shard, device: torch.device, num_bytes: int) -> PeerMemory:
    """Allocate memory on each rank and map that of all others; all ranks call this together.

    store: torch's, through which the ranks find each other. Raises RuntimeError if the GPUs cannot reach each
    other's memory, or torch has no symmetric memory.
    """
    # A rank that sees only its own GPU, as Ray's workers do, calls it number 0, as do all others.
    os.environ.setdefault(_OVERLAPPING, "1")
    name, group = _named_group(store, shard, "raydix-one-shot")
    symmetric = _c10d._SymmetricMemory
    own = symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, name)
    offset = getattr(handle, "offset", 0)
    addresses = torch.tensor([address + offset for address in handle.buffer_ptrs], dtype=torch.int64)
    return PeerMemory(own, addresses.to(device), (handle, group))


def _named_group(store: Any, shard: Shard, name: str) -> tuple[str, Any]:
    """Register the ranks with torch as a group, in both ways in which its versions look it up by name.

    Returns the name and the group, which torch knows as long as it lives.
    """
    prefixed = _c10d.PrefixStore(name, store)
    name = f"{name}-{id(store):x}-of-{os.getpid()}"
    group = _c10d.ProcessGroup(prefixed, shard.rank, shard.size)
    group._set_group_name(name)
    _c10d._register_process_group(name, group)
    _c10d._SymmetricMemory.set_group_info(name, shard.rank, shard.size, prefixed)
    return name, group
