"""The GPUs that this process may use, as torch sees them, because Ray does not know their memory."""

from __future__ import annotations

from typing import Any


def gpu_utilization(device: str) -> float | None:
    """Return the share of the last fraction of a second in which the engine's GPU was busy, 0 to 1, by NVML.

    None for an engine on CPUs, and where NVML or its Python binding (nvidia-ml-py, the extra `gpu`) is missing.
    Does not wait for the device.
    """
    if not device.startswith("cuda"):
        return None
    import torch

    try:
        return float(torch.cuda.utilization(torch.device(device))) / 100
    except Exception:  # a missing module, library or driver: different errors
        return None


def gpus_of(device: str) -> list[dict[str, Any]]:
    """Return name, uuid and memory in bytes of each GPU of an engine on `device`; an empty list for one on CPUs.

    For an engine on CPUs no GPU is queried, because a query would take memory on a GPU of another engine.
    """
    if not device.startswith("cuda"):
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        uuid = str(getattr(properties, "uuid", index))
        found.append(
            {"name": properties.name, "uuid": uuid, "memory_bytes": total, "free_memory_bytes": free},
        )
    return found
