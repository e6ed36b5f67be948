"""Settings of the file tier: `engine.kv_tier` in `deployments.yaml`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTier:
    """Where prefixes lie that host memory has no room for, and how much of them. Raises ValueError when a value is
    out of range.
    """

    directory: str
    """An existing directory, on this machine or shared by several: all engines of one model may use it at once.
    If "{fingerprint}" is part of its name, that of the model is put there, and the directory is made: each version
    of a model then has its own."""
    disk_gib: float = 16.0
    """Largest size of the files in it, in GiB; the least recently used go first."""
    rescan_s: float = 5.0
    """Seconds after which an engine looks for the files of others."""
    expected_mib_per_s: float = 200.0
    """Rate by which routers judge what is to be loaded before a page was."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("kv_tier.directory must name a directory, got an empty text")
        for name in ("disk_gib", "rescan_s", "expected_mib_per_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"kv_tier.{name} must be a number above 0, got {value}")
