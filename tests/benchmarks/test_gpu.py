"""The GPU script as on a bare machine: every section in toy shapes, and nothing imported that is not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu
from benchmarks.gpu import ROOT, jobs, parse_args
from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.proofs import FILE
from benchmarks.gpu_sections.report import Report
from benchmarks.gpu_sections.shapes import MODELS, Size
from benchmarks.gpu_sections.workload import FULL

THERE = ("torch", "triton", "transformers", "safetensors", "numpy")
NOT_THERE = {"ray", "zmq", "msgspec", "xxhash", "llguidance", "prometheus_client", "fastapi", "pydantic", "rich"}
"""Whatever other packages may bring along."""
QUICKENED = """
if "TRITON_INTERPRET" in os.environ:
    from tests.engine.support.quick_interpreter import quicken
    quicken()
"""
H200 = Rates(4.3e12, 790e12)


def test_it_runs_where_only_torch_triton_and_transformers_are_installed(tmp_path: Path) -> None:
    """Every section, in processes that find nothing but those packages and what these need themselves."""
    blocked = sorted({*_modules(), *NOT_THERE} - ({*_modules(_needed(THERE))} - NOT_THERE))
    site = tmp_path / "sitecustomize.py"
    site.write_text(f"import os, sys\nfor name in {blocked!r}:\n    sys.modules[name] = None\n{QUICKENED}")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    out = tmp_path / "results" / "gpu_here"
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--minutes", "30", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr

    found = json.loads(out.with_suffix(".json").read_text())
    assert not found["failed"]
    assert found["left_out"] == {
        "tiny vllm": "it is not installed",
        "tiny sglang": "it is not installed",
    }
    assert "everything: " in ended.stdout and "checks: " in ended.stdout
    checks = [line for line in found["measurements"] if line["passed"] is not None]
    assert {"triton", "reference"} <= {line["by"] for line in checks}
    assert all(line["passed"] for line in checks)
    ours = [line for line in found["measurements"] if line["model"] and line["by"] == "raydix"]
    [start] = [line for line in ours if line["what"] == "start"]
    assert start["ms"] > 0
    speeds = {line["what"]: line for line in ours if line["tokens_per_s"] is not None}
    assert {
        "anatomy, 3 rows: step",
        "3 prompts of 40 together, steps of 96",
        "3 prompts of 40 next to 2 decodes, steps of 64",
        "long, second of 300",
        "long, decode, 4 rows after 300",
        "host memory, first of 300",
        "host memory, first again of 300",
        "decode, 3 rows, KV fp8",
        "prefill, 96, weights fp8",
    } <= set(speeds)
    told = {line["what"]: line for line in found["measurements"]}
    assert {
        "anatomy, 3 rows: products",
        "anatomy, 3 rows: attention",
        "copies out, 8 neighbours",
        "copies in, 8 single pages",
        "prompt, 2 x 20",
        "engine, prompts cached, mixture of experts",
        "clocks",
    } <= set(told)
    assert {line["by"] for line in found["measurements"] if line["what"] == "decode, 1 row"} == {
        "raydix",
        "torch.compile",
    }
    assert found["facts"]["commit"] != "not known"
    assert {"decode, 1 row", "decode, 3 rows", "prefill, 96", "prefix, cold", "prefix, warm"} <= set(speeds)
    assert all(line["tokens_per_s"] > 0 and line["limit_share"] > 0 for line in speeds.values())
    assert "64 of 72 tokens cached" in speeds["prefix, warm"]["note"]
    assert speeds["host memory, first again of 300"]["note"] == "288 tokens cached"
    assert re.search(r"the first of this length took [\d.]+ times as long", speeds["prefill, 96"]["note"])
    assert found["facts"]["settings"] == "tiny, max_step_stretch null"
    assert any(line["by"] == "transformers" for line in found["measurements"])
    assert "no picture: " in ended.stdout
    assert "all that ran is right" in out.with_suffix(".txt").read_text()


def test_proofs_need_only_pytest_and_hypothesis_in_addition() -> None:
    """Those of ranks, which need msgspec, are skipped, and others leave grammars out."""
    script = f"import sys\nfor name in {sorted(NOT_THERE)!r}:\n    sys.modules[name] = None\nimport pytest\n"
    script += f"sys.exit(pytest.main(['{FILE}', '-vv', '-p', 'no:cacheprovider', '-k', 'step_late or rank_that']))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed, 4 skipped" in ran.stdout


def _needed(names: tuple[str, ...]) -> set[str]:
    """Distributions that these need, themselves included."""
    found: set[str] = set()
    to_do = [*names]
    while to_do:
        name = canonicalize_name(to_do.pop())
        if name not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):  # needed elsewhere, not on this machine
                needed = map(Requirement, metadata.requires(name) or [])
                to_do += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _modules(only: set[str] | None = None) -> Iterator[str]:
    """Top-level modules of installed distributions, but for our own."""
    for module, names in metadata.packages_distributions().items():
        distributions = {canonicalize_name(name) for name in names}
        if "raydix" not in distributions and (only is None or distributions & only):
            yield module


def test_the_offline_workload_is_the_one_others_measure() -> None:
    offline = FULL.offline()
    assert (len(offline.prompts), sum(offline.outputs)) == (256, 133_966)
    assert offline.prompts[0][:3] == [6311, 6890, 663]


@pytest.mark.parametrize(
    ("model", "weights_gb", "decode", "prefill", "offline"),
    [
        ("qwen3-0.6b", 1.19, {1: 3284, 128: 33_924}, 791_000, 36_200),
        ("llama-3.1-8b", 15.01, {1: 284, 32: 7128, 256: 19_915}, 55_500, 13_300),
        ("qwen3-14b", 27.98, {8: 1173, 64: 7108}, 29_400, 8100),
    ],
)
def test_limits_are_those_that_the_aims_were_set_by(
    model: str, weights_gb: float, decode: dict[int, int], prefill: int, offline: int
) -> None:
    size = Size.of(MODELS[model])
    limits = Limits(size, H200, Bytes())
    assert 2e-9 * (size.matrices + size.head) == pytest.approx(weights_gb, rel=0.005)
    for rows, tokens_per_s in decode.items():
        assert rows / limits.decode(rows, rows * 1024) == pytest.approx(tokens_per_s, rel=0.001)
    assert 1024 / limits.prefill(0, 1024) == pytest.approx(prefill, rel=0.002)
    work = FULL.offline()
    seconds = limits.offline([len(prompt) for prompt in work.prompts], work.outputs)
    assert sum(work.outputs) / seconds == pytest.approx(offline, rel=0.005)


def test_a_wrong_kernel_shows_in_the_table_and_in_the_verdict(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = Report(tmp_path / "gpu_x", {})
    report.measurements.append(Measurement("decode, 1 row", "m", tokens_per_s=9.0, limit_share=0.5, aim=0.75))
    assert report.is_good
    report.measurements.append(Measurement("attention", by="triton", passed=False, note="error 1.0"))
    report.left_out["m offline"] = "the time was over"
    report.write()
    assert not report.is_good
    table = (tmp_path / "gpu_x.txt").read_text()
    assert "WRONG: attention by triton: error 1.0" in table
    assert "left out: m offline: the time was over" in table
    assert report.draw() == "drawn: gpu_x.png"
    assert (tmp_path / "gpu_x.png").stat().st_size > 1000


def process(*told: str, then: str) -> str:
    """A program that tells so much, and then does something."""
    return f"import os, time\nfor line in {told!r}:\n    print(line, flush=True)\n{then}"


@pytest.fixture
def run_instead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Let the next processes run these programs instead; returns the commands that they were to run."""

    def given(*programs: str) -> list[list[str]]:
        commands: list[list[str]] = []
        popen, left = subprocess.Popen, iter(programs)

        def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
            commands.append(command)
            return popen([sys.executable, "-c", next(left)], **options)

        monkeypatch.setattr(subprocess, "Popen", start)
        return commands

    return given


@pytest.mark.parametrize(
    ("then", "why"),
    [("os._exit(3)", "ended with status 3"), ("time.sleep(600)", "took longer than 1 s, and was ended")],
)
def test_a_section_that_crashes_or_hangs_costs_no_other(
    then: str,
    why: str,
    run_instead: Callable[..., list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What it told before is kept, and the sections after it get a process of their own."""
    first = process('{"begin": "decode"}', '{"measured": {"what": "decode, 1 row", "model": "m"}}', then=then)
    second = process('{"begin": "prefill"}', '{"end": "prefill"}', then="")
    commands = run_instead(first, second)
    monkeypatch.setitem(gpu.SECTIONS, "decode", gpu.Share(1, 1))
    report = Report(tmp_path / "gpu_x", {})
    gpu.Run(report, parse_args(["--minutes", "5"])).job(gpu.Job(("decode", "prefill"), "m"))
    assert [*report.failed] == ["m decode"] and why in report.failed["m decode"]
    assert [line.what for line in report.measurements] == ["decode, 1 row"]
    assert len(commands) == 2


def test_a_machine_that_cannot_be_measured_costs_no_other_section(
    run_instead: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """The sections after it are not told any rates."""
    commands = run_instead(
        process('{"begin": "machine"}', then="os._exit(3)"), process('{"end": "decode"}', then="")
    )
    report = Report(tmp_path, {})
    gpu.Run(report, parse_args(["--minutes", "5", "--only", "decode"])).all(["qwen3-0.6b"])
    assert [*report.failed] == ["machine"] and not report.left_out
    assert [command[-1] for command in commands] == ["machine:5", "decode:30"]
    assert "--rates" not in commands[1]
    assert "FAILED machine: its process ended with status 3" in report.summary()
    assert report.path == tmp_path / "gpu_unknown"


def test_a_process_that_does_not_start_is_ended(
    run_instead: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """Importing has a time of its own, which no section pays for."""
    run_instead(process(then="time.sleep(600)"))
    report = Report(tmp_path / "gpu_x", {})
    gpu.Run(report, parse_args(["--minutes", "5"]), start_s=0.1).job(gpu.Job(("decode",), "m"))
    assert report.failed == {"m decode": "took longer than 0 s to start, and was ended"}


def test_when_the_time_is_over_the_rest_is_left_out(
    run_instead: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    run_instead(process('{"begin": "decode"}', then="time.sleep(600)"))
    report = Report(tmp_path / "gpu_x", {})
    gpu.Run(report, parse_args(["--minutes", "0.04"])).job(gpu.Job(("decode", "prefill"), "m"))
    assert report.left_out == {"m decode": "the time was over", "m prefill": "the time was over"}
    assert not report.failed


@pytest.mark.parametrize(
    ("wrong", "asked", "chosen"),
    [
        (["triton"], [], {"attention": "flashinfer"}),
        (["triton"], ["--set", "attention=triton"], {"attention": "triton"}),
        ([], [], {}),
    ],
)
def test_the_engine_is_not_measured_with_a_backend_that_is_wrong(
    wrong: list[str],
    asked: list[str],
    chosen: dict[str, str],
    run_instead: Callable[..., list[list[str]]],
    tmp_path: Path,
) -> None:
    """It is wrong once and right once."""
    checks = [(by, False) for by in wrong] + [(by, True) for by in ("triton", "flashinfer", "reference")]
    told = [
        json.dumps({"measured": {"what": "attention, decode, bf16", "by": by, "passed": passed}})
        for by, passed in checks
    ]
    commands = run_instead(
        process('{"end": "machine"}', then=""),
        process(*told, '{"end": "attention"}', then=""),
        process('{"end": "decode"}', then=""),
    )
    report = Report(tmp_path / "gpu_x", {})
    gpu.Run(report, parse_args(["--minutes", "5", "--only", "attention,decode", *asked])).all(["qwen3-0.6b"])
    settings = [json.loads(command[command.index("--settings") + 1]) for command in commands]
    assert settings == [settings[0], settings[0], chosen] and not report.failed


def test_only_the_requested_jobs_run() -> None:
    found = list(jobs(["a", "b"], ["decode", "prefill"]))
    assert [(job.model, job.sections) for job in found] == [(name, ("decode", "prefill")) for name in "ab"]
    assert parse_args(["--set", "page_size=64", "--set", "cuda_graphs=off"]).set == [
        ("page_size", 64),
        ("cuda_graphs", "off"),
    ]
    everything = [section for job in jobs(["llama-3.1-8b"], []) for section in job.sections]
    planned = [section for plan in gpu.PLANS.values() for job in plan.jobs for section in job.sections]
    assert {*everything, *planned, "machine"} == set(gpu.SECTIONS)
    assert "server" not in everything
    assert [(job.model, job.sections) for job in jobs(["a"], ["server", "links"])] == [
        ("qwen3-0.6b", ("server",)),
        ("", ("links",)),
    ]
    for wrong in (["--only", "decodes"], ["--models", "gpt"], ["--minutes", "0"], ["--set", "page_size"]):
        with pytest.raises(SystemExit):
            parse_args(wrong)
