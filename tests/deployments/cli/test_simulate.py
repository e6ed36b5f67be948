"""`raydix simulate`: from a trace file to a table, JSON and a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from deployments.cli.errors import UserError
from deployments.simulator.fleet.example_trace import EXAMPLE
from tests.router.support.traffic import conversations, write_mooncake

RUNNER = CliRunner()
OWN_POLICY = """
from router.policies import Split


class Fewest:
    def decide(self, query, replicas, rng):
        split = Split(replicas)
        fewest_first = sorted(split.serving, key=lambda candidate: candidate.num_running)
        return split.decision([candidate.replica for candidate in fewest_first], "rule", "fewest", query)
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_mooncake(tmp_path / "chat.jsonl", conversations(150))


@pytest.fixture(scope="module")
def short_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For commands that end before anything runs, and for those of which only the settings matter."""
    return write_mooncake(tmp_path_factory.mktemp("short") / "chat.jsonl", conversations(50))


def simulate(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_json_and_a_picture(trace: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    output = simulate(trace, "--replicas", 4, "--policy", "cost,random", "--load", "0.5,0.9", "--ingresses", 2,
                      "--kill", "1@5", "--json", report, "--plot", picture)  # fmt: skip
    assert "load 0.5" in output
    assert "load 0.9" in output
    assert "One LRU cache of the fleet's size would find" in output
    written = json.loads(report.read_text())
    assert [(row["policy"], row["load"]) for row in written["results"]] == [
        ("cost", 0.5), ("random", 0.5), ("cost", 0.9), ("random", 0.9)
    ]  # fmt: skip
    assert written["scenario"]["kills"] == [{"replica": 1, "time": 5.0}]
    assert 0 < written["results"][0]["hit_rate"] <= written["pooled_hit_rate"] * 1.01
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_trace_there_is_an_example(tmp_path: Path) -> None:
    """Whoever has recorded nothing yet sees what the command tells, and a file whose form theirs must have."""
    report = tmp_path / "out.json"
    output = simulate("--replicas", 4, "--requests", 600, "--policy", "cost,random", "--json", report)
    assert str(EXAMPLE) in output.replace("\n", "")
    cost, other = json.loads(report.read_text())["results"]
    assert cost["hit_rate"] > other["hit_rate"] > 0.1, "routing makes no difference in it"
    assert "made-up conversations" in " ".join(RUNNER.invoke(app, ["simulate", "--help"]).output.split())


def test_host_memory_is_a_tier_of_every_policy(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    output = simulate(trace, "--replicas", 2, "--cache-tokens", 60_000, "--policy", "cost,linear",
                      "--host-tokens", 600_000, "--host-min-uses", 1, "--host-bandwidth", 12, "--kv-bytes", 65_536,
                      "--json", report)  # fmt: skip
    assert "0.1M tokens of KV + 0.6M on the host" in " ".join(output.split())
    written = json.loads(report.read_text())
    tiers = written["scenario"]["tiers"]
    assert (tiers["host_tokens"], tiers["host_min_uses"]) == (600_000, 1)
    assert (tiers["host_bandwidth"], tiers["kv_bytes_per_token"]) == (12e9, 65_536)
    assert all(row["host_share"] > 0 for row in written["results"])


def test_replicas_fetch_from_each_other_and_from_files(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    output = simulate(trace, "--replicas", 2, "--cache-tokens", 60_000, "--policy", "cost_fetch,random",
                      "--host-tokens", 60_000, "--host-min-uses", 1, "--file-tokens", 2_000_000, "--shared-files",
                      "--file-bandwidth", 5, "--peer-bandwidth", 12.5, "--peer-latency", 0.001,
                      "--json", report)  # fmt: skip
    assert "+ 2.0M in files that all share, peers at 12.5 GB/s" in " ".join(output.split())
    written = json.loads(report.read_text())
    tiers = written["scenario"]["tiers"]
    assert (tiers["peer_bandwidth"], tiers["file_bandwidth"], tiers["peer_latency_s"]) == (12.5e9, 5e9, 0.001)
    assert all(row["peer_share"] > 0 for row in written["results"])
    assert any(row["file_share"] > 0 for row in written["results"])


def test_prefill_and_decode_can_be_apart(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    output = simulate(trace, "--replicas", 4, "--policy", "cost_fetch", "--peer-bandwidth", 12.5,
                      "--roles", "prefill=3,decode=1", "--apart-above", 1000, "--json", report)  # fmt: skip
    assert "3 for prefill and 1 for decode" in " ".join(output.split())
    written = json.loads(report.read_text())
    assert written["scenario"]["roles"] == {"prefill": 3, "decode": 1, "apart_above_tokens": 1000}
    assert written["results"][0]["num_failed"] == 0


def test_a_policy_of_ones_own_is_found_in_the_current_directory(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fewest_first.py").write_text(OWN_POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    simulate(trace, "--replicas", 4, "--policy", "cost,fewest_first:Fewest", "--json", "out.json")
    rows = json.loads(Path("out.json").read_text())["results"]
    assert [row["policy"] for row in rows] == ["cost", "fewest_first:Fewest"]
    assert 0 <= rows[1]["hit_rate"] < rows[0]["hit_rate"]


def test_a_calibration_sets_the_speeds(trace: Path, tmp_path: Path) -> None:
    speeds = {"prefill_rate": 500.0, "decode_base_s": 0.01, "decode_per_request_s": 0.0}
    calibration = tmp_path / "speeds.json"
    calibration.write_text(json.dumps({"service": speeds, "machine": {"cpu": "some"}}))
    report = tmp_path / "out.json"
    simulate(trace, "--calibration", calibration, "--policy", "cost", "--json", report)
    assert json.loads(report.read_text())["scenario"]["service"] == speeds
    simulate(trace, "--calibration", calibration, "--prefill-rate", 900, "--policy", "cost", "--json", report)
    assert json.loads(report.read_text())["scenario"]["service"]["prefill_rate"] == 900.0


def test_a_trace_without_prefixes_comes_with_a_warning(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:{second:02}.5,{100 + second},4" for second in range(40)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert "hit rates mean nothing" in " ".join(simulate(path, "--policy", "cost").split())


def test_autoscaling_is_compared_as_recorded_and_in_a_burst(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    output = simulate(trace, "--autoscale", "--replicas", 2, "--load", 0.9, "--prefill-rate", 12_000,
                      "--scaling", 3, "--scaling", "min=2,max=9", "--burst", "5@20+30", "--boot", 10,
                      "--ttft-slo", 4, "--json", report)  # fmt: skip
    assert "as recorded" in output and "5 times as much from 20 s on for 30 s" in output
    assert "replica-hours" in output
    written = json.loads(report.read_text())
    assert (written["boot_s"], written["ttft_slo_s"]) == (10, 4)
    for rows in written["results"].values():
        assert [row["setting"] for row in rows] == ["fixed 3", "min=2,max=9"]
        assert rows[0]["targets"] == [[0, 3]]
        assert all(0 <= row["attainment"] <= 1 - row["turned_away"] and row["num_requests"] == 150 for row in rows)
    assert written["results"]["burst"][1]["most"] > 2


def test_autoscaling_compares_two_fixed_numbers_and_the_range_between_them_by_default(
    short_trace: Path,
) -> None:
    output = simulate(short_trace, "--autoscale", "--replicas", 1, "--policy", "cost,random")
    for setting in ("cost: fixed 1 ", "cost: fixed 10 ", "random: min=1,max=10 "):
        assert output.count(setting) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaling", "max"], "--scaling: expected a number of replicas, or fields of engines.autoscaling"),
        (
            ["--scaling", "min=3,foo=4"],
            "--scaling min=3,foo=4: unknown setting 'foo'; docs/tuning.md lists all settings",
        ),
        (["--scaling", "min=5,max=4"], r"max \(4\) must be at least min \(5\)"),
        (["--scaling", "min=0,max=4"], "min is at least 1 here"),
        (["--scaling", "0"], "max: must be greater than or equal to 1"),
        (["--burst", "10"], "a burst is FACTOR@START\\+SECONDS, such as 10@600\\+300"),
        (["--burst", "0.5@1+1"], "at least once as fast"),
        (["--ttft-slo", "0"], "must be above 0 s"),
        (["--kill", "1@5"], "--autoscale and --kill cannot be combined"),
        (["--plot", "p.png"], "--autoscale and --plot cannot be combined"),
        (["--roles", "prefill=8,decode=8", "--peer-bandwidth", "9"], "--autoscale and --roles cannot be combined"),
        (["--load", "0.5,0.6"], "--autoscale takes one --load"),
    ],
)
def test_mistakes_in_autoscaling_are_reported(short_trace: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RUNNER.invoke(app, ["simulate", str(short_trace), "--autoscale", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "unknown routing policy 'best'; there are cost"),
        (["--policy", "no_such_module:Mine"], "the module no_such_module cannot be imported"),
        (["--load", "high"], "--load: expected numbers such as 0.6,0.85, got 'high'"),
        (["--load", "0"], "load must be above 0"),
        (["--kill", "9@5", "--replicas", "4"], "there is no replica 9 to kill"),
        (["--kill", "soon"], "expected REPLICA@SECONDS"),
        (["--calibration", "missing.json"], "missing.json cannot be read: no such file"),
        (["--host-bandwidth", "0"], "host_bandwidth must be above 0 bytes/s, got 0.0"),
        (["--kv-bytes", "-1"], "kv_bytes_per_token must be above 0 bytes, got -1.0"),
        (["--peer-bandwidth", "0"], "peer_bandwidth must be above 0 bytes/s, got 0.0"),
        (["--peer-latency", "-1"], "peer_latency_s must be at least 0 s, got -1.0"),
        (["--file-bandwidth", "0"], "file_bandwidth must be above 0 bytes/s, got 0.0"),
        (["--file-tokens", "1000"], "file_tokens without host_tokens: evicted KV reaches files through"),
        (["--shared-files"], "a shared file store needs its size: set file_tokens"),
        (
            ["--host-tokens", "1000", "--file-tokens", "10"],
            "file_tokens must be at least 512, a block of the trace",
        ),
        (
            ["--roles", "prefill=16,decode=0", "--peer-bandwidth", "9"],
            "roles need at least 1 replica for each side",
        ),
        (
            ["--roles", "prefill=9,decode=9", "--peer-bandwidth", "9"],
            r"roles for 9 \+ 9 replicas, but the fleet has",
        ),
        (["--roles", "prefill=8,decode=8"], "roles send KV from replica to replica: set peer_bandwidth"),
        (["--roles", "half"], "roles are prefill=P,decode=D"),
        (["--host-tokens", "100"], "host_tokens must be at least 512, a block of the trace"),
    ],
)
def test_mistakes_are_reported(short_trace: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RUNNER.invoke(app, ["simulate", str(short_trace), *arguments], catch_exceptions=False)


def test_a_bad_line_is_named(trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    with pytest.raises(UserError, match='line 151: the field "input_length" is missing'):
        RUNNER.invoke(app, ["simulate", str(trace)], catch_exceptions=False)


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "deployments.simulator.fleet.plots", raising=False)
    with pytest.raises(UserError, match=r"pip install 'raydix\[plots\]'"):
        RUNNER.invoke(app, ["simulate", str(trace), "--plot", str(tmp_path / "p.png")], catch_exceptions=False)
