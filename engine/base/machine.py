"""The cores that this process may use, and how its threads wait and wake.

                   affinity ∩ cores, hyperthreads counted once ∩ the container's quota
default_threads ── OMP_NUM_THREADS, or else all of these; `shared_threads`: one engine's part of a shared machine
prepare_process ── before torch loads OpenMP's library, which reads its settings once
use_cpu_policy ─── whether a waking thread interrupts a running one
return_memory ──── the memory of freed large values returns to the kernel
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path
from typing import Literal

CpuPolicy = Literal["batch", "normal"]

_M_MMAP_THRESHOLD = -3
"""Its number in malloc.h."""
_LARGE_BYTES = 128 * 1024
"""glibc's own first value. A value of this size costs two system calls, which take less than filling it does."""
FEW_CORES = 4
"""With this many cores or fewer, a thread that spins while it waits takes a core that another one needs."""
_FEW_SPINS = 1000
"""Some 50 us, which is enough between two operations; libgomp's default is milliseconds."""


def use_cpu_policy(policy: CpuPolicy) -> None:
    """Schedule the threads of this process, and those that they start, by `policy` (sched(7)).

    "batch" is Linux's SCHED_BATCH: a thread that wakes waits for a core instead of interrupting the thread that
    runs there and has its data in the processor's caches. "normal" changes nothing, nor does a policy that the
    kernel does not have or does not grant. Threads whose policy was chosen when the process was started keep it.
    """
    if policy == "normal" or not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.sched_getscheduler(int(thread)) == os.SCHED_OTHER:
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def return_memory() -> None:
    """Return the memory of freed large values to the kernel, if the C library is glibc.

    glibc maps large values separately, but raises the size from which it does so (M_MMAP_THRESHOLD) to that of
    each one that is freed. Later values of that size are then placed between small ones that stay, and their
    memory is not returned.
    """
    with contextlib.suppress(AttributeError, OSError):  # The function or the library does not exist.
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def default_threads(num_ranks: int = 1) -> int:
    """Return the default number of threads: OMP_NUM_THREADS, or one for each core that this process may use,
    divided among the `num_ranks` ranks of its model.

    Ray sets OMP_NUM_THREADS in its workers to the number of cores that they reserve, at least 1.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, usable_cores() // num_ranks)


def was_started_with(variable: str) -> bool:
    """Whether the user set an environment variable before this process began; Ray sets some later."""
    return started_with(variable) is not None


def started_with(variable: str) -> str | None:
    """Return the value that an environment variable had when this process began; None where it had none."""
    try:
        entries = _initial_environment()
    except OSError:
        return os.environ.get(variable)
    name = f"{variable}=".encode()
    return next((os.fsdecode(entry[len(name) :]) for entry in entries if entry.startswith(name)), None)


def shared_threads(num_engines: int, cores: int) -> int:
    """Return one engine's share of a machine's cores, which `num_engines` share with an ingress.

    With FEW_CORES or more, one core is left for the processes that deliver the tokens; with fewer, none.
    """
    left = cores - 1 if cores >= FEW_CORES else cores
    return max(1, left // max(1, num_engines))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, at least 1: those of its CPUs, bounded by its control groups'
    quota.

    Two CPUs of one core (hyperthreads) count once, because one computing thread fills a core.
    """
    cpus = _affinity()
    topology = root / "sys/devices/system/cpu"
    cores = len({_siblings(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})
    return max(1, int(min(cores, _quota(root))))


def prepare_process(cpus: str | None = None) -> None:
    """Pin this process to `cpus`, if given, and set how its threads wait, by the number of cores.

    Variables that the user has set in the environment stay. Raises ValueError if a CPU is not available.
    """
    if cpus is not None:
        _keep_to(cpu_list(cpus))
    is_set = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if not is_set and "torch" not in sys.modules and usable_cores() <= FEW_CORES:
        os.environ["GOMP_SPINCOUNT"] = str(_FEW_SPINS)


def cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs such as "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or int(last or first) < int(first):
            raise ValueError(f'cpus must be a list of CPUs such as "0-3,8", got {text!r}')
        if int(last or first) >= 2**16:
            raise ValueError(f"cpus names CPU {last or first}, which no machine has; leave it out")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _keep_to(cpus: frozenset[int]) -> None:
    if sys.platform != "linux":
        raise ValueError("cpus can be set on Linux only; leave it out")
    missing = sorted(cpus - _affinity())
    if missing:
        names = ", ".join(map(str, missing[:8]))
        there = ", ".join(map(str, sorted(_affinity())[:64]))
        raise ValueError(f"cpus names {names}, but this process may use only {there}; change it or leave it out")
    # Each thread has its own affinity, which the threads that it starts inherit.
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:  # The thread has just ended.
            continue


def _initial_environment() -> list[bytes]:
    return Path("/proc/self/environ").read_bytes().split(b"\0")


def _affinity() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _siblings(path: Path) -> str | None:
    """Return the CPUs of one core; None if the system does not list them."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _quota(root: Path) -> float:
    """Return how many CPUs this process's control groups (v2 or v1) grant it; infinity without a limit."""
    grants = [math.inf]
    for hierarchy, group in _groups(root / "proc/self/cgroup"):
        # In a container the process's own group looks like the root, and the path in /proc may not exist.
        base = root / "sys/fs/cgroup" / hierarchy
        inner = base / group.lstrip("/")
        for directory in {base, inner, *(parent for parent in inner.parents if base in parent.parents)}:
            grants.append(_granted(directory))
    return min(grants)


def _groups(listing: Path) -> list[tuple[str, str]]:
    """Return each hierarchy that may limit CPU time with this process's group in it, v2 first."""
    found = [("", "/")]
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append(("", path))
        elif "cpu" in controllers.split(","):
            found.append((controllers, path))
            found.append(("cpu", path))
    return found


def _granted(directory: Path) -> float:
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit here
        return math.inf
