"""Computes how many KV pages an engine gets."""

from __future__ import annotations

import os
from pathlib import Path

from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.parallel.stage import WHOLE, Stage
from engine.settings.config import EngineConfig


def pages_for(
    config: EngineConfig,
    bytes_free: int,
    bytes_per_token: int,
    max_model_len: int,
    groups: LayerGroups | None = None,
) -> int:
    """Return the number of KV pages for `bytes_free` bytes of unused memory. A page takes `bytes_per_token` for
    each of its tokens that this rank keeps, `config.page_size`.

    This is `config.kv_pages` if it is set, for each of the `groups` of layers with their own pages; otherwise as
    many as fit in `config.kv_memory_share` of the free memory, but no more than the largest batch of the longest
    requests can use. Raises ValueError if not even one page fits.
    """
    if config.kv_pages is not None:
        return config.kv_pages * (1 if groups is None else groups.num_groups)
    bytes_per_page = bytes_per_token * config.page_size
    fitting = int(bytes_free * config.kv_memory_share) // bytes_per_page
    longest = -(-max_model_len // config.page_tokens)
    if groups is not None:
        longest = groups.pages_for(max_model_len, config.page_size, config.max_step_tokens)
    useful = config.max_running * longest
    if fitting < 1:
        raise ValueError(
            f"no memory for KV pages: one page takes {bytes_per_page / 2**20:.1f} MiB, but pages may take only "
            f"{config.kv_memory_share:.0%} of the free {bytes_free / 2**20:.0f} MiB; raise kv_memory_share or "
            "free memory"
        )
    return min(fitting, useful)


def slots_for(config: EngineConfig, bytes_free: int | None, state_bytes: int) -> int:
    """Return the number of slots for recurrent states: one for each running request, and those for snapshots.

    Without `config.state_snapshots` there are as many snapshots as requests, but no more than leave half of the
    memory for KV pages. `bytes_free` is as for `pages_for`; None if `config.kv_pages` sets the number of pages.
    Raises ValueError if they leave no memory for KV pages.
    """
    running, snapshots = config.max_running, config.state_snapshots
    if not config.prefix_cache:
        snapshots = 0
    if bytes_free is None:
        return running + (running if snapshots is None else snapshots)
    budget = int(bytes_free * config.kv_memory_share)
    if snapshots is None:
        snapshots = min(running, max(1, budget // 2 // state_bytes - running))
    if (running + snapshots) * state_bytes >= budget:
        raise ValueError(
            f"no memory for KV pages after recurrent states: {running} states of running requests (max_running) "
            f"and {snapshots} snapshots (state_snapshots) of {state_bytes / 2**20:.1f} MiB each do not leave room "
            f"in {_gib(budget)}, {config.kv_memory_share:.0%} of the free memory; lower max_running, for example "
            f"to {max(1, budget // 2 // state_bytes - snapshots)}, lower state_snapshots, or raise kv_memory_share"
        )
    return running + snapshots


def free_after_slots(config: EngineConfig, bytes_free: int, slots_bytes: int) -> int:
    """Return the memory for `pages_for` if slots for recurrent states take a part of the same share."""
    return max(0, bytes_free - int(slots_bytes / config.kv_memory_share))


def check_room(
    config: EngineConfig,
    model: ModelConfig,
    element_bytes: int,
    kv_bytes_per_token: int,
    max_model_len: int,
    bytes_free: int,
    num_gpus: int = 1,
    stage: Stage = WHOLE,
) -> None:
    """Raise ValueError unless a GPU's free memory holds the weights and the KV of `config.kv_pages`, or else of
    the longest request; steps need some more memory. The error names the largest settings that fit.

    `model` is the whole model, whose `stage` `num_gpus` share; memory and `kv_bytes_per_token` are one GPU's.
    `element_bytes` is the size of a plain weight.
    """
    bytes_per_page = kv_bytes_per_token * config.page_size
    pages = config.kv_pages or -(-max_model_len // config.page_tokens)

    def copies_of(quantization: str | None) -> int:
        return config.expert_copies * model.bytes_per_expert(element_bytes, quantization)

    def weights_of(quantization: str | None) -> int:
        return stage.weight_bytes(model, element_bytes, quantization) // num_gpus + copies_of(quantization)

    weights = weights_of(config.quantization)
    if weights + pages * bytes_per_page <= bytes_free:
        return
    advice = []
    if fitting := max(0, bytes_free - weights) // bytes_per_page:
        advice.append(f"set {_kv_setting(config, fitting)}")
    if config.quantization is None and model.weight_format is None:
        rounded = weights_of("fp8")
        if fitting := max(0, bytes_free - rounded) // bytes_per_page:
            most = "" if fitting >= pages else f" and {_kv_setting(config, fitting)}"
            advice.append(f'set quantization to "fp8" (weights then take {_gib(rounded)}){most}')
    if config.expert_copies:
        advice.append(f"lower expert_copies ({_gib(copies_of(config.quantization))} of the weights are copies)")
    wanted = f"{pages} KV pages" if config.kv_pages else f"KV of the longest request, {max_model_len:,} tokens,"
    fault = "the model does not fit: its weights take"
    if stage.count > 1:
        fault = f"the model does not fit: the weights of stage {stage.number} of {stage.count} take"
    raise ValueError(
        f"{fault} {_gib(weights)}, {wanted} {_gib(pages * bytes_per_page)}, and "
        f"{_gib(bytes_free)} of GPU memory are free; "
        + (" or ".join(advice) or "use a GPU with more free memory, or a smaller model or one with fewer bits")
    )


def _kv_setting(config: EngineConfig, fitting: int) -> str:
    """Return the largest setting for which `fitting` pages are enough."""
    if config.kv_pages:
        return f"kv_pages to at most {fitting}"
    return f"max_model_len to at most {fitting * config.page_tokens}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def host_pages_for(
    config: EngineConfig, bytes_per_token: int, bytes_free: int | None = None, state_bytes: int = 0
) -> int:
    """Return the number of host pages for KV, given `bytes_free` bytes of RAM (None: all available RAM). A page
    takes `bytes_per_token` for each of its tokens; a recurrent state takes as many pages as it fills.

    Raises ValueError if `config.host_kv_gib` is more than that, or less than a page and a state.
    """
    if not config.host_kv_gib:
        return 0
    bytes_free = available_ram() if bytes_free is None else bytes_free
    wanted, bytes_per_page = int(config.host_kv_gib * 2**30), bytes_per_token * config.page_size
    least = bytes_per_page + -(-state_bytes // bytes_per_page) * bytes_per_page
    if not least <= wanted <= bytes_free:
        what = "a page with a recurrent state takes" if state_bytes else "a page takes"
        raise ValueError(
            f"host_kv_gib is {config.host_kv_gib:g}, but {what} {least / 2**30:.6f} GiB and "
            f"{bytes_free / 2**30:.1f} GiB of RAM are free; set it between these, or to 0 for no host memory"
        )
    return wanted // bytes_per_page


def available_ram() -> int:
    """Return the bytes of RAM that are available: the machine's, or the container's if that is less."""
    limits = [_machine_ram(Path("/proc/meminfo")), _container_ram(Path("/sys/fs/cgroup"))]
    return min(limit for limit in limits if limit is not None)


def _machine_ram(meminfo: Path) -> int:
    """Return Linux's MemAvailable (free memory plus releasable caches); elsewhere, the free pages."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_ram(cgroup: Path) -> int | None:
    """Return the bytes that the control group (v2 or v1) still allows; None if it has no limit."""
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
    """Return the bytes of file cache that count as used but are released on demand, such as mapped weights."""
    for line in (limit.parent / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            return int(value)
    return 0
