"""How the engine in process and a server take turns, and that the server stands still meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil
import pytest

from benchmarks import server_share
from benchmarks.peers.protocol import Job
from benchmarks.peers.servers import Running
from benchmarks.server_share import Turn, rows_of, stopped, take_turns


def workloads(number: int) -> dict[str, list[Job]]:
    """Two workloads that no other set has."""
    return {name: [Job([[number]], [1])] for name in ("one", "other")}


def test_both_are_asked_the_same_in_an_order_that_every_other_turn_reverses() -> None:
    asked: list[tuple[str, int]] = []

    def ask(who: str, rate: float, jobs: Sequence[Job]) -> float:
        asked.append((who, jobs[0].prompts[0][0]))
        return rate

    turns = take_turns(
        [workloads(0), workloads(1)],
        lambda jobs: ask("engine", 8.0, jobs),
        lambda jobs: ask("server", 6.0, jobs),
    )
    there, back = [("engine", 0), ("server", 0)], [("server", 1), ("engine", 1)]
    assert asked == [*there, *there, *back, *back]
    assert turns == [Turn("one", 8.0, 6.0), Turn("other", 8.0, 6.0)] * 2


def test_a_share_is_the_median_of_the_turns_shares() -> None:
    turns = [Turn("one", 10, 9), Turn("one", 20, 10), Turn("other", 1, 1), Turn("one", 5, 4)]
    one, other = rows_of("direct", turns)
    assert (one["workload"], other["workload"], one["server"]) == ("one", "other", "direct")
    assert (one["in_process_tokens_per_second"], one["tokens_per_second"]) == (10, 9)
    assert one["shares"] == [0.9, 0.5, 0.8] and one["share"] == 0.8  # not 9 / 10
    assert other["share"] == 1


@pytest.fixture
def server() -> Iterator[Running]:
    """A process that another one started, as a server's processes are."""
    starts_one = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", starts_one], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield Running("direct", "", "", (psutil.Process(process.pid),))
        process.communicate(b"\n")
    assert process.returncode == 0


def states(server: Running) -> set[bool]:
    return {process.status() == psutil.STATUS_STOPPED for process in server.processes()}


def test_all_processes_of_a_server_are_paused_and_always_resume(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_share, "REST_S", 0.0)
    assert states(server) == {False} and len(list(server.processes())) == 2

    with stopped(server):
        assert states(server) == {True}
    assert states(server) == {False}

    with pytest.raises(RuntimeError, match="broken"), stopped(server):
        raise RuntimeError("broken")
    assert states(server) == {False}
