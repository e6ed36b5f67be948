"""Which cores an engine uses, and how its threads wait, on the machines that are found in practice."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.machine import (
    cpu_list,
    default_threads,
    prepare_process,
    shared_threads,
    usable_cores,
    use_cpu_policy,
)
from engine.settings.config import EngineConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process's CPUs are known on Linux only")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs, two for each core: 0 and 4, 1 and 5, ... A process may use them all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 4},{cpu % 4 + 4}\n",
        )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hyperthreads_of_a_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(machine) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5})
    assert usable_cores(machine) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2})
    assert usable_cores(machine) == 1


def test_where_the_topology_is_unknown_each_cpu_is_a_core(tmp_path: Path, machine: Path) -> None:
    assert usable_cores(tmp_path / "elsewhere") == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),  # half a CPU still runs one thread
        ({"cpu.max": "1600000 100000"}, 4),
        ({"cpu.max": "nonsense"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu,cpuacct/pods/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/pods/a/cpu.cfs_period_us": "50000"}, 2),
        ({"slice/cpu.max": "300000 100000", "slice/unit/cpu.max": "max 100000"}, 3),  # the outer group limits too
    ],
)
def test_a_containers_quota_bounds_them(machine: Path, files: dict[str, str], cores: int) -> None:
    write(machine / "proc/self/cgroup", "7:memory:/\n3:cpu,cpuacct:/pods/a\n0::/slice/unit\n")
    for name, text in files.items():
        write(machine / "sys/fs/cgroup" / name, text + "\n")
    assert usable_cores(machine) == cores


@pytest.mark.parametrize(
    ("num_engines", "cores", "threads"),
    [(1, 1, 1), (1, 2, 2), (2, 2, 1), (3, 2, 1), (1, 4, 3), (2, 4, 1), (2, 8, 3), (1, 64, 63), (0, 2, 2)],
)
def test_engines_share_the_cores_that_the_ingress_leaves(num_engines: int, cores: int, threads: int) -> None:
    assert shared_threads(num_engines, cores) == threads


@pytest.mark.parametrize(
    ("said", "threads"), [("3", 3), ("5,2", 5), (" 6 ", 6), ("", None), ("0", None), ("x", None)]
)
def test_omp_num_threads_takes_precedence(monkeypatch: pytest.MonkeyPatch, said: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert default_threads() == (threads or usable_cores())


def test_lists_of_cpus() -> None:
    assert cpu_list("0-3,8") == {0, 1, 2, 3, 8}
    assert cpu_list(" 2 , 5 - 6") == {2, 5, 6}


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "0-9999999", "1.5"])
def test_an_invalid_list_of_cpus_is_refused_with_the_settings(text: str) -> None:
    with pytest.raises(ValueError, match="cpus"):
        EngineConfig(cpus=text)


def test_cpus_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match=r"cpus names 65535, but this process may use only"):
        prepare_process("65535")


PINS = """
import os, threading
from engine.base.machine import prepare_process
go, seen = threading.Event(), []
early = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))
early.start()
cpu = min(os.sched_getaffinity(0))
prepare_process(str(cpu))
go.set(), early.join()
assert seen == [{cpu}] == [os.sched_getaffinity(0)], seen
"""


def test_all_threads_of_the_process_keep_to_the_cpus() -> None:
    subprocess.run([sys.executable, "-c", PINS], check=True)


WAITS = """
import os
import platform
from engine.base.machine import FEW_CORES, prepare_process, usable_cores
import engine.base.machine as machine
machine.usable_cores = lambda: {cores}
{before}
prepare_process()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("cores", "before", "said", "spin_count"),
    [
        (2, "", {}, "1000"),
        (8, "", {}, "None"),  # a core each: spinning takes no core from another thread
        (2, "", {"GOMP_SPINCOUNT": "500"}, "500"),
        (2, "", {"OMP_WAIT_POLICY": "active"}, "None"),
        (2, "import torch", {}, "None"),  # too late: it would only reach processes started from here
    ],
)
def test_few_cores_are_not_spun_on_for_long_unless_the_user_says_so(
    cores: int, before: str, said: dict[str, str], spin_count: str
) -> None:
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith(("GOMP_", "OMP_WAIT"))}
    code = WAITS.format(cores=cores, before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | said, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == spin_count


_POLICIES = """
import os, threading
from engine.base.machine import use_cpu_policy

def with_a_thread():
    ending = threading.Event()
    threading.Thread(target=ending.wait).start()
    return ending

before = with_a_thread()
use_cpu_policy({policy!r})
after = with_a_thread()
print(sorted({{os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}}))
before.set(), after.set()
"""


@pytest.mark.parametrize(("policy", "found"), [("batch", os.SCHED_BATCH), ("normal", os.SCHED_OTHER)])
def test_all_threads_have_the_policy_those_before_it_and_those_after(policy: str, found: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _POLICIES.format(policy=policy)], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == f"[{found}]"


def test_a_policy_that_was_chosen_before_is_kept() -> None:
    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    told = subprocess.run(
        [sys.executable, "-c", _POLICIES.format(policy="batch")],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=idle,
    )
    assert told.stdout.strip() == f"[{os.SCHED_IDLE}]"


def test_a_process_that_may_not_choose_its_policy_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(thread: int, policy: int, param: os.sched_param) -> None:
        asked.append(policy)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    use_cpu_policy("batch")
    assert asked == [os.SCHED_BATCH]


RELEASED = """
import psutil
from engine.base.machine import return_memory

def megabytes():
    return psutil.Process().memory_info().rss // 2**20

return_memory()
before, kept = megabytes(), []
for size in (2**23, 2**20):
    large = []
    for _ in range(2**27 // size):
        large.append(b"x" * size)
        kept.append(b"x" * 2**16)
    del large
print(megabytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that keeps such memory")
def test_memory_freed_between_blocks_that_stay_goes_back_to_the_kernel() -> None:
    """Of twice 128 MiB. By default, glibc keeps the second half."""
    grown = subprocess.run([sys.executable, "-c", RELEASED], check=True, capture_output=True, text=True)
    assert int(grown.stdout) < 32
