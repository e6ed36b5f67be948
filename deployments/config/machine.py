"""The cores and GPUs of each node, on which the defaults of omitted settings depend."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deployments.config.placement import Placement, num_engines


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU, or an instance of one that MIG divides, that an engine can have to itself."""

    name: str
    memory_bytes: int | None
    """All of its memory; None where it could not be read."""


@dataclass(frozen=True, slots=True)
class HardwareNode:
    """A machine on which engines and ingresses can run."""

    cores: int
    """Cores that its processes may use, as `engine.base.machine.usable_cores` counts them."""
    cpus: float
    """Most CPUs that Ray can count there."""
    gpus: tuple[VisibleGpu, ...] = ()
    """Those that are visible to what Ray starts there."""
    has_cuda: bool = True
    """Whether its torch is built for CUDA."""
    unknown: str = ""
    """Why its GPUs are unknown, and what to do; "" if they are known."""
    omp_threads: int | None = None
    """OMP_NUM_THREADS with which its processes start."""
    cache: str = ""
    """Directory of the server's user in which processes of this node may keep files; "" where it is not known."""

    @property
    def usable(self) -> tuple[VisibleGpu, ...]:
        """GPUs on which engines can compute."""
        return self.gpus if self.has_cuda else ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """All nodes: this machine, or those of a cluster."""

    nodes: tuple[HardwareNode, ...]
    may_grow: bool = False
    """Whether nodes may be added, so that what does not fit now may fit later."""

    @property
    def gpus(self) -> tuple[VisibleGpu, ...]:
        """GPUs of all nodes on which engines can compute."""
        return tuple(gpu for node in self.nodes for gpu in node.usable)

    @property
    def most_gpus(self) -> int:
        """Number of GPUs of the node that has most."""
        return max((len(node.usable) for node in self.nodes), default=0)

    @property
    def cores(self) -> int:
        """Cores of all nodes."""
        return sum(node.cores for node in self.nodes)

    @property
    def cpus(self) -> float:
        """CPUs of all nodes as Ray counts them."""
        return sum(node.cpus for node in self.nodes)

    @property
    def unknown(self) -> str:
        """Why the GPUs of some node are unknown; "" if they are known."""
        return next((node.unknown for node in self.nodes if node.unknown), "")

    @property
    def least_memory(self) -> int | None:
        """Bytes of the smallest GPU, on which any engine may come to run; None where one is not known."""
        sizes = [gpu.memory_bytes for gpu in self.gpus]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    def engines(self, gpus: float, cpus: float = 0.0, num_stages: int = 1, placement: Placement = "pack") -> int:
        """Number of engines that fit, if each of their stages needs this many GPUs and CPUs of one node."""
        room = []
        for node in self.nodes:
            fitting = [
                int(there / each + 1e-9) for there, each in ((len(node.usable), gpus), (node.cpus, cpus)) if each
            ]
            room.append(min(fitting, default=num_stages))
        return num_engines(room, num_stages, placement)

    def described_nodes(self) -> str:
        """Say in words how many GPUs and CPUs each node has."""
        kinds = Counter((len(node.usable), node.cpus) for node in self.nodes)
        return ", ".join(f"{count} with {gpus} GPUs and {cpus:g} CPUs" for (gpus, cpus), count in kinds.items())

    def described(self) -> str:
        """Say in words which GPUs are visible."""
        if self.gpus:
            kinds = dict.fromkeys(_title(gpu) for gpu in self.gpus)
            return f"{_are(len(self.gpus))} visible ({', '.join(kinds)})"
        hidden = sum(len(node.gpus) for node in self.nodes)
        if hidden:
            return f"{_are(hidden)} visible, but torch is built without CUDA here"
        return "no GPU is visible"


def _are(number: int) -> str:
    return f"{number} GPU{'s are' if number != 1 else ' is'}"


def _title(gpu: VisibleGpu) -> str:
    return gpu.name if gpu.memory_bytes is None else f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB"
