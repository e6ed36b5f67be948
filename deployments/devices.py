"""The GPUs that this process may use, as torch sees them: Ray counts GPUs and does not know their memory."""

from __future__ import annotations

from typing import Any


def gpus_of(device: str) -> list[dict[str, Any]]:
    """Name, uuid and memory in bytes of each GPU of an engine on `device`; none for one on CPUs.

    An engine on CPUs does not look: looking would take memory on a GPU that is not its own.
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
