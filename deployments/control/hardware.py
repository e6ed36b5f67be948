"""Finds the cores and GPUs of this machine, or of each node of a cluster, for `deployments/config/chosen.py`.

GPUs are counted as CUDA would see them in a process that Ray starts, according to CUDA_VISIBLE_DEVICES and MIG. If
that is unknown, it is reported (`HardwareNode.unknown`), and does not count as "no GPU".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.config.machine import Hardware, HardwareNode, VisibleGpu
from deployments.control.nvml import NvmlDevice, NvmlError, devices, load_nvml
from engine.base.files import users_cache
from engine.base.machine import started_with, usable_cores

logger = logging.getLogger("ray.serve")
ANSWER_S = 30.0
"""Seconds that other nodes have to answer; for silent ones, Ray's numbers count."""
_GIVE = "give engine.device, and for cuda engines.count and engine.tensor_parallel_size"
_NONE = ("", "-1", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


class CannotTell(ValueError):
    """It is unknown which GPUs CUDA would see; the message says why, and what to do."""


def this_machine() -> Hardware:
    """Return the hardware here, for a Ray that has yet to be started."""
    return Hardware((this_node(),))


def this_node(
    environment: Callable[[str], str | None] = started_with,
    load: Callable[[], Any | None] = load_nvml,
    root: Path = Path("/"),
) -> HardwareNode:
    """Return the hardware here. `environment` returns a variable with which processes start; None if unset."""
    threads = (environment("OMP_NUM_THREADS") or "").split(",")[0].strip()
    node = HardwareNode(
        cores=usable_cores(),
        cpus=os.cpu_count() or 1,
        omp_threads=int(threads) if threads.isdecimal() and int(threads) else None,
        cache=str(users_cache()),
    )
    cuda, rocm = torch_builds()
    try:
        if rocm and (root / "dev/kfd").exists():
            raise CannotTell(f"torch is built for ROCm here, whose GPUs Raydix cannot count: {_GIVE}")
        return replace(node, gpus=_visible(environment, load, root), has_cuda=cuda)
    except CannotTell as error:
        return replace(node, unknown=str(error), has_cuda=cuda)


def torch_builds() -> tuple[bool, bool]:
    """Return whether the installed torch is built for CUDA, and whether for ROCm. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False, False
    text = (Path(spec.origin).parent / "version.py").read_text()
    built = {
        name: re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None for name in ("cuda", "hip")
    }
    return built["cuda"], built["hip"]


def _visible(
    environment: Callable[[str], str | None], load: Callable[[], Any | None], root: Path
) -> tuple[VisibleGpu, ...]:
    """Return the GPUs that CUDA would see. Raises CannotTell."""
    library = load()
    if library is None:
        if (root / "dev/nvidiactl").exists():
            raise CannotTell(f"there is an NVIDIA driver, but libnvidia-ml.so.1 (NVML) is missing: {_GIVE}")
        return ()
    try:
        found = devices(library)
    except NvmlError as error:
        raise CannotTell(f"NVML cannot list the GPUs ({error}); see nvidia-smi: {_GIVE}") from None
    return visible(found, environment("CUDA_VISIBLE_DEVICES"), environment("CUDA_DEVICE_ORDER"))


def visible(found: Sequence[NvmlDevice], named: str | None, order: str | None = None) -> tuple[VisibleGpu, ...]:
    """Return the devices that CUDA sees with these CUDA_VISIBLE_DEVICES (`named`) and CUDA_DEVICE_ORDER (`order`).

    Raises CannotTell if CUDA would silently ignore an entry, and if a GPU that MIG divides is named as a whole,
    because CUDA then uses only the first of its instances.
    """
    if named is not None and named.strip() in _NONE:
        return ()
    if named is None:
        for device in found:
            _check_whole(device)
        return tuple(VisibleGpu(device.name, device.memory_bytes) for device in found)
    entries = [entry.strip() for entry in named.split(",")]
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    if len(set(entries)) < len(entries):
        raise CannotTell(f"CUDA_VISIBLE_DEVICES={named} names a GPU twice, so CUDA sees none: correct it")
    picked = [_named(found, entry, named) for entry in entries]
    is_by_number = any(entry.isdecimal() for entry in entries)
    if is_by_number and order != "PCI_BUS_ID" and len({device.memory_bytes for device in found}) > 1:
        # CUDA numbers the fastest first, which NVML does not report: count on the smallest.
        smallest = min(found, key=lambda device: device.memory_bytes)
        return (VisibleGpu(smallest.name, smallest.memory_bytes),) * len(picked)
    return tuple(VisibleGpu(device.name, device.memory_bytes) for device in picked)


def _named(found: Sequence[NvmlDevice], entry: str, named: str) -> NvmlDevice:
    if entry.isdecimal():
        if int(entry) >= len(found):
            raise CannotTell(
                f"CUDA_VISIBLE_DEVICES={named} names GPU {entry}, but there are {len(found)}, numbered from 0: "
                "correct it"
            )
        _check_whole(found[int(entry)])
        return found[int(entry)]
    everything = [*found, *(instance for device in found for instance in device.instances or ())]
    matching = [device for device in everything if entry and device.uuid.startswith(entry)]
    if len(matching) != 1:
        raise CannotTell(
            f"CUDA_VISIBLE_DEVICES={named} names {entry!r}, which is {'several' if matching else 'none'} of "
            f"{', '.join(device.uuid for device in everything) or 'no GPUs'}: correct it"
        )
    _check_whole(matching[0])
    return matching[0]


def _check_whole(device: NvmlDevice) -> None:
    if device.instances is not None:
        names = ",".join(instance.uuid for instance in device.instances) or "none yet"
        raise CannotTell(
            f"{device.name} ({device.uuid}) is divided by MIG, and CUDA would use only its first instance: name "
            f"the instances to use, as in CUDA_VISIBLE_DEVICES={names}, or {_GIVE}"
        )


# --- a cluster ------------------------------------------------------------------------------------------


def cluster() -> Hardware:
    """Return the nodes of the cluster that this process is connected to; without one, this machine."""
    import ray

    if not ray.is_initialized():
        return this_machine()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = _ask(nodes)
    return Hardware(tuple(of_ray(node["Resources"], answers.get(node["NodeID"])) for node in nodes), may_grow=True)


def of_ray(resources: Mapping[str, float], answer: HardwareNode | None) -> HardwareNode:
    """Return a node with as many GPUs as Ray counts there, even if it was started with others: the smallest in the
    node's own `answer`. Without an answer their memory is unknown.
    """
    cpus, count = resources.get("CPU", 0.0), int(resources.get("GPU", 0.0))
    if answer is None:
        return HardwareNode(max(1, int(cpus)), cpus, (VisibleGpu("GPU", None),) * count)
    answer = replace(answer, cpus=cpus, cores=min(answer.cores, int(cpus)), unknown="")
    known = sorted(answer.gpus, key=lambda gpu: gpu.memory_bytes or 0)[:count]
    return replace(answer, gpus=(*known, *(VisibleGpu("GPU", None),) * (count - len(known))))


def _ask(nodes: Sequence[Mapping[str, Any]]) -> dict[str, HardwareNode]:
    """Return each node's answer about itself, by its id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A Ray worker answers for its own node itself: a task there would wait until another worker has started.
    here = ray.get_runtime_context().get_node_id() if "RAY_RAYLET_PID" in os.environ else None
    ask = ray.remote(num_cpus=0, max_retries=0)(this_node)
    asked = {
        node["NodeID"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
        if node["NodeID"] != here
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else None
    found = {}
    for node in nodes:
        name = node["NodeID"]
        try:
            found[name] = this_node() if name == here else ray.get(asked[name], timeout=0)
        except Exception as error:
            logger.warning(
                "node %s does not say which cores and GPUs it has (%s): Ray's numbers are used",
                node["NodeManagerAddress"],
                type(error).__name__,
            )
    return found
