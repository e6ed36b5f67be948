"""Operations that the ranks of a model do together: NCCL's on GPUs, gloo's on CPUs, none with one rank.

All ranks of a stage call all of these in the same order. NCCL works on the stream that a step runs on, so graphs
record it; our own kernel computes small sums (`one_shot.py`). Process groups are made without torch's global one,
so that a process may have several engines. The ranks of a stage are on one machine; stages may be on several.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from engine.layers.linear import Rounded
from engine.layers.operations import Operations
from engine.parallel.context_group import ContextGroup
from engine.parallel.in_stream import finish, in_stream
from engine.parallel.links import StageLink
from engine.parallel.one_shot import OneShotSum, open_one_shot
from engine.parallel.rank_network import ONE_MACHINE, RankNetwork, let_nccl_use
from engine.parallel.shard import Shard
from engine.parallel.stage import Stage

# A rank that dies ends the operation immediately, because its connections close. This timeout is for a rank that
# is alive but slow; users set the health check's `stall_timeout_s`.
_TIMEOUT = timedelta(minutes=30)
_torch: Any = dist  # torch declares the types of stores and groups only in part
_c10d: Any = _distributed_c10d
_CPU = torch.device("cpu")


class Collective:
    """One rank's end of the group of its stage, and of the links to the other stages."""

    def __init__(self, shard: Shard, group: Any = None, stage: Stage | None = None, everyone: Any = None) -> None:
        """`group`: a process group of torch with the `shard.size` ranks of this stage; None if there is only this
        one. `everyone`: one with the ranks of all stages, on the host; None if there is one stage.
        """
        self.shard = shard
        self.stage = stage or Stage()
        self.before: StageLink | None = None
        """The link from the previous stage, which for the first is the last; None if there is one stage."""
        self.after: StageLink | None = None
        """The link to the next stage, which for the last is the first."""
        self._everyone = everyone
        self.context: ContextGroup | None = None
        """The ranks that divide a request's KV; None if each rank has all of it."""
        self.one_shot: OneShotSum | None = None
        """Computes small sums, if GPUs can read each other's memory."""
        self._group = group

    @property
    def rank(self) -> int:
        """The number of this rank among those of all stages."""
        return self.stage.number * self.shard.size + self.shard.rank

    @property
    def context_size(self) -> int:
        """Number of ranks that divide a request's KV."""
        return 1 if self.context is None else self.context.size

    @property
    def size(self) -> int:
        """Number of ranks in all stages."""
        return self.stage.count * self.shard.size

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `part`, the same on each rank. May overwrite `part`."""
        if self._group is not None:
            part = part.contiguous()
            finish(self._group.allreduce([part], in_stream(dist.AllreduceOptions())))
        return part

    def add_norm(
        self,
        operations: Operations,
        x: torch.Tensor,
        part: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        rounds: int,
    ) -> tuple[torch.Tensor, torch.Tensor | Rounded]:
        """Add the sum of all ranks' `part`, if there is one, to `x` and norm it, as `Operations.add_norm` does, or
        `Operations.add_norm_fp8` if the layer that reads it rounds `rounds` numbers with one scale.
        """
        if part is not None and self.one_shot is not None and self.one_shot.takes(part):
            return x, self.one_shot.add_norm(x, part, weight, eps, rounds)
        branch = None if part is None else self.sum(part)
        if rounds:
            return operations.add_norm_fp8(x, branch, weight, eps, rounds)
        return operations.add_norm(x, branch, weight, eps)

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` columns of all ranks' [R, own] side by side."""
        if self._group is None:
            return part
        rows, own = part.shape
        parts = part.new_empty(self.shard.size * rows, own)
        finish(self._group._allgather_base(parts, part.contiguous(), in_stream(_c10d.AllgatherOptions())))
        return parts.view(-1, rows, own).transpose(0, 1).reshape(rows, -1)[:, :count]

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, which overwrites `tensor` on the other ranks."""
        return self.from_rank(tensor, 0)

    def from_rank(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the tensor of a rank of this stage, which overwrites `tensor` on the other ranks."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = rank
            finish(self._group.broadcast([tensor], in_stream(options)))
        return tensor

    def all_of(self, count: int, device: torch.device) -> list[int]:
        """Return the number of each rank of all stages."""
        group, where = (self._group, device) if self._everyone is None else (self._everyone, _CPU)
        if group is None:
            return [count]
        found = [torch.zeros(1, dtype=torch.int64, device=where) for _ in range(group.size())]
        group.allgather([found], [torch.tensor([count], device=where)]).wait()
        return [int(number) for number in found]

    def least(self, count: int, device: torch.device) -> int:
        """Return the smallest of the numbers of the ranks of all stages."""
        return min(self.all_of(count, device))

    def abort(self) -> None:
        """End operations that wait for a lost rank, from any thread. The group cannot be used afterwards."""
        if self.one_shot is not None:
            self.one_shot.abort()
        for group in (self._group, self._everyone, self.before, self.after, self.context):
            if group is not None:
                group.abort()


ALONE = Collective(Shard())
"""The only rank."""


def open_store(size: int, network: RankNetwork = ONE_MACHINE) -> tuple[Any, int]:
    """Open the store through which `size` ranks connect, at rank 0's address; returns it and its port."""
    listener = network.listen()
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return _torch.TCPStore(network.host, port, size, **options), port


def find_store(network: RankNetwork, port: int, size: int) -> Any:
    """Connect to the store that rank 0 opened."""
    return _torch.TCPStore(network.host, port, size, is_master=False)


def join(
    store: Any,
    shard: Shard,
    device: torch.device,
    one_shot_kib: int = 0,
    stage: Stage | None = None,
    network: RankNetwork = ONE_MACHINE,
    context_size: int = 1,
) -> Collective:
    """Form the groups with the other ranks; returns when all have joined. A GPU becomes this thread's current one.

    one_shot_kib: largest sum for `Collective.one_shot`, in KiB; 0: there is none.
    context_size: how many ranks divide a request's KV.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if not network.is_one_machine:
            let_nccl_use(network.own_address())
    stage = stage or Stage()
    own = _Groups(store, f"stage{stage.number}", device, network)
    group = own.group(shard.rank, shard.size) if shard.size > 1 else None
    ranks = Collective(shard, group, stage)
    if one_shot_kib and device.type == "cuda" and shard.size > 1:
        found = open_one_shot(own.store, shard, device, one_shot_kib * 1024)
        if ranks.least(found is not None, device):
            ranks.one_shot = found
    if context_size > 1:
        number, rank = divmod(shard.rank, context_size)
        name = f"stage{stage.number}.context{number}"
        with_same_heads = _Groups(store, name, device, network).group(rank, context_size)
        ranks.context = ContextGroup(with_same_heads, rank, context_size)
    if stage.count > 1:
        ranks._everyone = _Groups(store, "everyone", _CPU, network).group(ranks.rank, ranks.size)
        for number in range(stage.count):  # in the same order on all ranks, because both ends wait for each other
            arrow = _Groups(store, f"from{number}.{shard.rank}", device, network)
            if number == stage.number:
                ranks.after = StageLink(arrow.group(0, 2))
            elif (number + 1) % stage.count == stage.number:
                ranks.before = StageLink(arrow.group(1, 2))
    return ranks


class _Groups:
    """Makes process groups on one kind of device, through a part of the ranks' store."""

    def __init__(self, store: Any, name: str, device: torch.device, network: RankNetwork) -> None:
        self.store = _torch.PrefixStore(name, store)
        self._network = network
        self._kind = _torch.ProcessGroupNCCL if device.type == "cuda" else _torch.ProcessGroupGloo
        self._on_gpu = device.type == "cuda"

    def group(self, rank: int, size: int) -> Any:
        """Form a group of `size` ranks."""
        if self._on_gpu:
            options = self._kind.Options()
        else:
            options = self._kind._Options()
            options._devices = [self._kind.create_device(hostname=self._network.own_address())]
        options._timeout = _TIMEOUT
        with self._network.ending_when_lost():
            return self._kind(self.store, rank, size, options)
