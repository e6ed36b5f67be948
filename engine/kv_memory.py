"""How many KV pages an engine gets."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import EngineConfig


def pages_for(config: EngineConfig, bytes_free: int, bytes_per_token: int, max_model_len: int) -> int:
    """KV pages for `bytes_free` bytes of memory that nothing else needs.

    `config.kv_pages` when it is set; else what fits in `config.kv_memory_share` of the free memory, but no more
    than the largest batch of the longest requests can use. Raises ValueError when not even one page fits.
    """
    if config.kv_pages is not None:
        return config.kv_pages
    bytes_per_page = bytes_per_token * config.page_size
    fitting = int(bytes_free * config.kv_memory_share) // bytes_per_page
    useful = config.max_running * -(-max_model_len // config.page_size)
    if fitting < 1:
        raise ValueError(
            f"no memory for KV pages: one takes {bytes_per_page / 2**20:.1f} MiB, {config.kv_memory_share:.0%} of "
            f"the free {bytes_free / 2**20:.0f} MiB is allowed; raise kv_memory_share or free memory"
        )
    return min(fitting, useful)


def host_pages_for(config: EngineConfig, bytes_per_token: int, bytes_free: int | None = None) -> int:
    """Pages of host memory for the KV of preempted requests, of `bytes_free` bytes of RAM (None: all there are).

    Raises ValueError when `config.host_kv_gib` is more than that, or less than a page.
    """
    if config.preemption == "recompute" or not config.host_kv_gib:
        return 0
    bytes_free = available_ram() if bytes_free is None else bytes_free
    wanted, bytes_per_page = int(config.host_kv_gib * 2**30), bytes_per_token * config.page_size
    if not bytes_per_page <= wanted <= bytes_free:
        raise ValueError(
            f"host_kv_gib is {config.host_kv_gib:g}, but a page takes {bytes_per_page / 2**30:.6f} GiB and "
            f"{bytes_free / 2**30:.1f} GiB of RAM are free; set it between these, or to 0 to do without"
        )
    return wanted // bytes_per_page


def available_ram() -> int:
    """Bytes of RAM that can still be taken: the machine's, or the container's where that is less."""
    limits = [_machine_ram(Path("/proc/meminfo")), _container_ram(Path("/sys/fs/cgroup"))]
    return min(limit for limit in limits if limit is not None)


def _machine_ram(meminfo: Path) -> int:
    """Linux's MemAvailable (free plus what caches would give up); elsewhere all physical memory's free pages."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_ram(cgroup: Path) -> int | None:
    """What the control group (v2 or v1) leaves; None where there is no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())
            return max(0, left + _reclaimable(cgroup / limit))
        except (OSError, ValueError):  # not this version, or "max": no limit
            continue
    return None


def _reclaimable(limit: Path) -> int:
    """Bytes of file cache that count as used but are given up on demand: mapped weights, above all."""
    for line in (limit.parent / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            return int(value)
    return 0
