"""Which GPUs are counted: as CUDA would see them, and with a reason where that cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.config.machine import HardwareNode, VisibleGpu
from deployments.control.hardware import CannotTell, of_ray, this_node, torch_builds, visible
from deployments.control.nvml import NvmlDevice

GIB = 2**30
A, B = NvmlDevice("GPU-aaaa-1", "NVIDIA H100", 80 * GIB), NvmlDevice("GPU-bbbb-2", "NVIDIA H100", 80 * GIB)
SMALL = NvmlDevice("GPU-cccc-3", "NVIDIA L4", 22 * GIB)
PARTS = (NvmlDevice("MIG-1111", "NVIDIA A100 MIG 3g.20gb", 20 * GIB), NvmlDevice("MIG-2222", "same", 20 * GIB))
DIVIDED = NvmlDevice("GPU-dddd-4", "NVIDIA A100", 40 * GIB, PARTS)


def names(found: Sequence[NvmlDevice], named: str | None, order: str | None = None) -> list[tuple[str, int]]:
    return [(gpu.name, (gpu.memory_bytes or 0) // GIB) for gpu in visible(found, named, order)]


@pytest.mark.parametrize("hidden", ["", " ", "-1", "NoDevFiles", "none"])
def test_hidden_gpus_do_not_count(hidden: str) -> None:
    assert names([A, B], hidden) == []


def test_all_count_or_those_that_are_named() -> None:
    h100 = ("NVIDIA H100", 80)
    assert names([A, B], None) == [h100, h100]
    assert names([A, B], "1") == names([A, B], "GPU-bbbb") == names([A, B], "1,-1,0") == [h100]
    assert names([A, SMALL], "GPU-cccc-3,GPU-aaaa") == [("NVIDIA L4", 22), h100]


def test_numbers_of_different_gpus_count_as_the_smallest_because_cuda_orders_them_by_speed() -> None:
    assert names([A, SMALL], "0") == [("NVIDIA L4", 22)]
    assert names([A, SMALL], "0", "PCI_BUS_ID") == [("NVIDIA H100", 80)]


def test_instances_of_mig_count_when_they_are_named() -> None:
    assert names([DIVIDED], "MIG-1111,MIG-2222") == [("NVIDIA A100 MIG 3g.20gb", 20), ("same", 20)]
    for named in (None, "0", "GPU-dddd"):
        with pytest.raises(CannotTell, match=r"divided by MIG.*CUDA_VISIBLE_DEVICES=MIG-1111,MIG-2222"):
            visible([DIVIDED], named)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("2", "names GPU 2, but there are 2"),
        ("0,0", "names a GPU twice"),
        ("GPU-", "several of GPU-aaaa-1, GPU-bbbb-2"),
        ("GPU-zzzz", "none of"),
        ("0,", "none of"),
    ],
)
def test_a_list_of_gpus_that_cuda_would_cut_off_in_silence_is_refused(named: str, message: str) -> None:
    with pytest.raises(CannotTell, match=message):
        visible([A, B], named)


class FakeNvml:
    """NVML's functions, as ctypes calls them, over `found`."""

    def __init__(self, found: Sequence[NvmlDevice], init: int = 0, refused: int | None = None) -> None:
        self._all = [*found, *(part for device in found for part in device.instances or ())]
        self._found, self._init, self._refused = found, init, refused

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, *given: Any) -> int:
        if name == "nvmlInit_v2":
            return self._init
        out: Any = getattr(given[-1], "_obj", None) if given else None
        if name == "nvmlDeviceGetCount_v2":
            out.value = len(self._found)
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            out.value = given[0].value + 1
            return 4 if given[0].value == self._refused else 0
        elif name.startswith("nvmlDevice"):
            return self._of(self._all[given[0].value - 1], name, given, out)
        return 0

    def _of(self, device: NvmlDevice, name: str, given: tuple[Any, ...], out: Any) -> int:
        if name in ("nvmlDeviceGetName", "nvmlDeviceGetUUID"):
            given[1].value = (device.name if name.endswith("Name") else device.uuid).encode()
        elif name == "nvmlDeviceGetMemoryInfo":
            out.total = device.memory_bytes
        elif name == "nvmlDeviceGetMigMode":
            given[1]._obj.value = device.instances is not None
            return 0 if device.instances is not None or "A100" in device.name else 3
        elif name == "nvmlDeviceGetMaxMigDeviceCount":
            out.value = 7
        elif name == "nvmlDeviceGetMigDeviceHandleByIndex":
            parts = device.instances or ()
            if given[1].value >= len(parts):
                return 6
            out.value = self._all.index(parts[given[1].value]) + 1
        return 0


def node(library: Any, root: Path, environment: Mapping[str, str] | None = None) -> HardwareNode:
    return this_node((environment or {}).get, lambda: library, root)


def test_nvml_is_asked_for_names_memory_and_instances(tmp_path: Path) -> None:
    found = node(FakeNvml([A, SMALL]), tmp_path)
    assert (
        found.gpus == (VisibleGpu("NVIDIA H100", 80 * GIB), VisibleGpu("NVIDIA L4", 22 * GIB))
        and not found.unknown
    )
    instances = node(FakeNvml([DIVIDED]), tmp_path, {"CUDA_VISIBLE_DEVICES": "MIG-2222", "OMP_NUM_THREADS": "3"})
    assert instances.gpus == (VisibleGpu("same", 20 * GIB),) and instances.omp_threads == 3
    assert node(FakeNvml([A, B], refused=0), tmp_path).gpus == (VisibleGpu("NVIDIA H100", 80 * GIB),), (
        "one may not be used"
    )


def test_no_driver_is_no_gpu_and_a_driver_that_is_silent_is_unknown(tmp_path: Path) -> None:
    assert (node(None, tmp_path).gpus, node(None, tmp_path).unknown) == ((), "")
    assert (node(FakeNvml([], init=9), tmp_path).gpus, node(FakeNvml([], init=9), tmp_path).unknown) == ((), "")
    assert "nvmlInit failed with 18" in node(FakeNvml([A], init=18), tmp_path).unknown
    assert "divided by MIG" in node(FakeNvml([DIVIDED]), tmp_path).unknown
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "NVML) is missing" in node(None, tmp_path).unknown


def test_the_build_of_torch_is_read_from_torch() -> None:
    import torch

    assert torch_builds() == (torch.version.cuda is not None, torch.version.hip is not None)


def test_ray_counts_the_gpus_of_a_cluster_s_node_and_the_node_knows_them() -> None:
    answer = HardwareNode(8, 16, (VisibleGpu("H100", 80 * GIB), VisibleGpu("L4", 22 * GIB)), cache="/c")
    assert of_ray({"CPU": 16, "GPU": 2}, answer).gpus == (VisibleGpu("L4", 22 * GIB), VisibleGpu("H100", 80 * GIB))
    assert of_ray({"CPU": 16, "GPU": 1}, answer).gpus == (VisibleGpu("L4", 22 * GIB),)
    assert of_ray({"CPU": 4, "GPU": 3}, answer).gpus[2] == VisibleGpu("GPU", None)
    assert of_ray({"CPU": 4}, answer) == HardwareNode(4, 4, cache="/c")
    assert of_ray({"CPU": 0}, answer).cores == 0, "a head that runs nothing"
    assert of_ray({"CPU": 4, "GPU": 1}, None) == HardwareNode(4, 4, (VisibleGpu("GPU", None),))
