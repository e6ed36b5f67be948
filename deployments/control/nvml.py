"""Asks NVIDIA's management library for GPUs and their memory, without CUDA and without torch.

A CUDA context would take memory on each GPU, and importing torch takes seconds. NVML comes with the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SUCCESS, _NO_PERMISSION, _NO_DRIVER = 0, 4, 9
_NAME_BYTES = 128


class NvmlError(RuntimeError):
    """The library is installed, but does not answer."""


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU, or an instance of one."""

    uuid: str
    name: str
    memory_bytes: int
    instances: tuple[NvmlDevice, ...] | None = None
    """Instances into which MIG divides it; None where MIG is off."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def load_nvml() -> Any | None:
    """Return the library; None if no driver is installed."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def devices(library: Any) -> tuple[NvmlDevice, ...]:
    """Return the GPUs in the order of their PCI buses, without those forbidden to this user. Raises NvmlError."""
    code = library.nvmlInit_v2()
    if code == _NO_DRIVER:
        return ()
    _check(code, "nvmlInit")
    try:
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        return tuple(_devices(library, count.value))
    finally:
        library.nvmlShutdown()


def _devices(library: Any, count: int) -> Iterator[NvmlDevice]:
    for index in range(count):
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        if code == _NO_PERMISSION:
            continue
        _check(code, "nvmlDeviceGetHandleByIndex")
        yield _described(library, handle, _instances(library, handle))


def _described(
    library: Any, handle: ctypes.c_void_p, instances: tuple[NvmlDevice, ...] | None = None
) -> NvmlDevice:
    name, uuid = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
    memory = _Memory()
    _check(library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)), "nvmlDeviceGetName")
    _check(library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_NAME_BYTES)), "nvmlDeviceGetUUID")
    _check(library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
    return NvmlDevice(uuid.value.decode(), name.value.decode(), memory.total, instances)


def _instances(library: Any, handle: ctypes.c_void_p) -> tuple[NvmlDevice, ...] | None:
    """Return a GPU's MIG instances; None if it has no MIG, or MIG is off."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
    if code != _SUCCESS or not current.value:  # GPUs without MIG answer "not supported"
        return None
    _check(library.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(most)), "nvmlDeviceGetMaxMigDeviceCount")
    found = []
    for index in range(most.value):
        instance = ctypes.c_void_p()
        code = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, ctypes.c_uint(index), ctypes.byref(instance))
        if code == _SUCCESS:  # "not found" for places without an instance
            found.append(_described(library, instance))
    return tuple(found)


def _check(code: int, what: str) -> None:
    if code != _SUCCESS:
        raise NvmlError(f"{what} failed with {code}")
