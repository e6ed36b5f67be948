"""Settings of the file tier: `engine.kv_tier` in `deployments.yaml`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTier:
    """Files for prefixes for which host memory has no room, and their limits. Raises ValueError when a value is
    out of range.
    """

    directory: str
    """An existing directory, on this machine or shared by several: all engines of one model may share it.
    "{fingerprint}" in its name is replaced by that of the model, and the directory is then created: each version
    of a model has its own."""
    disk_gib: float = 16.0
    """Largest size of the files in it, in GiB; the least recently used are deleted first."""
    rescan_s: float = 5.0
    """Seconds between two searches for the files of other engines."""
    expected_mib_per_s: float = 200.0
    """Rate by which routers predict loading times before a page was loaded."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("kv_tier.directory must name a directory, got an empty text")
        for name in ("disk_gib", "rescan_s", "expected_mib_per_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"kv_tier.{name} must be a number above 0, got {value}")
