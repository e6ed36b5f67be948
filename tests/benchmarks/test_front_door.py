"""How the front door's servers take turns, and what is counted for which of them; no Raydix is started."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks import front_door, report
from benchmarks.front_door import Row, take_turns
from benchmarks.peers.process import PeerFailed
from benchmarks.peers.servers import Running


@dataclass
class Process:
    """A process as psutil shows it."""

    command: str
    seconds: float = 0.0
    descendants: tuple[Process, ...] = ()

    def children(self, recursive: bool) -> list[Process]:
        assert recursive
        return list(self.descendants)

    def cmdline(self) -> list[str]:
        return self.command.split()

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.seconds, system=self.seconds / 4)


def server(name: str, *roots: Process) -> Running:
    return Running(name, "", "", cast(tuple[psutil.Process, ...], roots))


def figures(server: Running, what: str, per_second: float, **processor_ms: float) -> Row:
    return {"server": server.name, "what": what, "per_second": per_second, "processor_ms": processor_ms}


def test_servers_take_turns_in_an_order_that_every_other_round_reverses() -> None:
    asked: list[tuple[str, str]] = []

    def few(server: Running) -> Row:
        asked.append((server.name, "few"))
        return figures(server, "few", 1.0)

    def many(server: Running) -> Row:
        asked.append((server.name, "many"))
        return figures(server, "many", 1.0)

    take_turns([server("a"), server("b"), server("c")], [few, many], rounds=3)
    forth = [(name, load) for load in ("few", "many") for name in "abc"]
    back = [(name, load) for load in ("few", "many") for name in "cba"]
    assert asked == forth + back + forth


def test_a_figure_is_the_median_of_its_own_server_and_load() -> None:
    """The machine runs at a tenth of its speed in one round, and processes come and go."""
    speeds = {"a": iter([100.0, 9.0, 80.0]), "b": iter([200.0, 20.0, 160.0])}
    spent = {
        "a": iter([{"ingress": 1.0}, {"ingress": 9.0, "proxy": 3.0}, {"ingress": 2.0}]),
        "b": iter([{"engine": 4.0}, {"engine": 5.0}, {"engine": 6.0}]),
    }

    def load(server: Running) -> Row:
        return figures(server, "load", next(speeds[server.name]), **next(spent[server.name]))

    def steady(server: Running) -> Row:
        return {**figures(server, "steady", 7.0), "tokens_per_event": 2.0}

    slow, fast, *others = take_turns([server("a"), server("b")], [load, steady], rounds=3)
    assert slow == {
        **figures(server("a"), "load", 80.0, ingress=2.0, proxy=0.0),
        "per_second_by_round": [100.0, 9.0, 80.0],
    }
    assert fast == {**figures(server("b"), "load", 160.0, engine=5.0), "per_second_by_round": [200.0, 20.0, 160.0]}
    assert [(row["server"], row["what"], row["tokens_per_event"]) for row in others] == [
        ("a", "steady", 2.0),
        ("b", "steady", 2.0),
    ]


def test_the_time_that_idle_servers_take_counts_for_no_server() -> None:
    """One server's processes work for its requests, while those of the other take time of their own."""
    engine, other = Process("ray::EngineReplica", 5.0), Process("door", 7.0)
    asked = server("asked", Process("serve", 1.0, (engine, Process("python agent.py", 2.0))))
    before = front_door.processor_seconds(asked)
    engine.seconds += 4.0
    other.seconds += 100.0
    after = front_door.processor_seconds(asked)
    assert {role: after[role] - before[role] for role in after} == {"engine": 5.0, "Ray": 0.0}
    assert front_door.processor_seconds(server("idle", other)) == {"Ray": 107 * 1.25}


def test_a_bare_server_that_ends_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(PeerFailed, match="starlette ended before it answered"), front_door.bare("starlette"):
        pass


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        front_door.parse_args(["--rounds", "0"])
    assert "--rounds must be at least 1, not 0" in capsys.readouterr().err


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The recorded figures of the front door, which a test may change before it renders the page."""
    directory = tmp_path / "results"
    shutil.copytree(report.RESULTS, directory)
    monkeypatch.setattr(report, "RESULTS", directory)
    yield json.loads((directory / "front_door.json").read_text())


@pytest.mark.parametrize("turns", [None, {"seconds": 2.0, "rounds": 5, "stream_rounds": 3}])
def test_the_page_speaks_of_turns_where_they_were_taken(
    results: dict[str, Any], turns: dict[str, float] | None
) -> None:
    results.pop("turns", None)
    if turns is not None:
        results["turns"] = turns
    (report.RESULTS / "front_door.json").write_text(json.dumps(results))
    page = report.render("benchmarks.md.jinja")
    assert ("requests in turns of 2 s" in page) == ("medians of 5 rounds, of 3" in page) == (turns is not None)
