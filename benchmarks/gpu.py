"""Measure Raydix on a GPU against the GPU's limits: correctness and speed of kernels, and models of real shapes.

    python -m benchmarks.gpu [--minutes 9] [--models qwen3-0.6b] [--only decode,prefill] [--out PATH] [--tiny]
    python -m benchmarks.gpu --plan first --out first      # the parts and the limit of a run for certain questions

Needs torch, Triton, transformers, safetensors and numpy: no network, no model; weights are random. Sections that
need more, as Ray or pytest, are left out without it. The machine's bandwidth of reads and its matrix rate are
measured first, and each figure is a share of what they allow, and of what the GPU's data sheet allows
(`benchmarks/gpu_sections/limits.py`). Sections that the time does not suffice for are left out and named.
Results are written after each section, to benchmarks/results/gpu_<name>.json and .txt, and at the end, where
matplotlib is installed, .png; what is printed is a summary of at most 10,000 characters. vLLM and SGLang run the
offline workload too where they are installed. The exit status is 1 when a kernel computes wrong numbers or a
section fails; a failed section, the machine's included, costs no other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also as a script, where nothing is installed

from benchmarks.gpu_sections.messages import PEERS, Measurement  # noqa: E402
from benchmarks.gpu_sections.report import Report  # noqa: E402
from benchmarks.gpu_sections.shapes import MODELS  # noqa: E402


class Share(NamedTuple):
    """A section's share of the time, in seconds."""

    least: int
    """A section is not started with less time."""
    most: int
    """A section that takes longer hangs, and is ended."""


SECTIONS: dict[str, Share] = {
    "machine": Share(5, 60),
    "attention": Share(20, 150),
    "operations": Share(10, 60),
    "sampler": Share(10, 40),
    "experts": Share(10, 60),
    "check": Share(20, 60),
    "check_mixture": Share(20, 60),
    "proofs": Share(30, 160),
    "ranks": Share(30, 90),
    "decode": Share(30, 100),
    "anatomy": Share(15, 60),
    "prefill": Share(20, 60),
    "offline": Share(30, 90),
    "prefix": Share(15, 40),
    "start": Share(25, 90),
    "speed": Share(20, 90),
    "prompts": Share(15, 70),
    "recurrent": Share(10, 50),
    "mixed": Share(20, 75),
    "fp8_kv": Share(30, 60),
    "fp8_weights": Share(30, 60),
    "long": Share(30, 60),
    "host": Share(40, 90),
    "compiled": Share(30, 75),
    "server": Share(60, 150),
    "second_gpu": Share(20, 45),
    "links": Share(15, 45),
    "tensor_ranks": Share(25, 60),
    "stages": Share(25, 60),
    "context_ranks": Share(25, 60),
    "expert_ranks": Share(30, 75),
    "transformers": Share(40, 110),
    "vllm": Share(90, 240),
    "sglang": Share(90, 240),
}
_MODEL_SECTIONS = ("decode", "anatomy", "prefill", "offline", "prefix")
_CLOSER = ("llama-3.1-8b", "tiny")
"""Models whose starts are timed, and whose decodes are measured with eight bits too."""
_FOR_PLANS = (
    *("proofs", "ranks", "server", "second_gpu", "links"),
    *("tensor_ranks", "stages", "context_ranks", "expert_ranks"),
)
"""Sections that run only in plans, or if they are named: they need more than one GPU and what computes there."""
_CHECKS = ("attention", "operations", "sampler", "experts")
_START_S = 120.0
"""Seconds for a process to import torch, from a cold disk too."""
_TINY_PATIENCE = 10
"""How many times as long toy sizes may take: CPUs are slow, and other programs use them, too."""
_WRITE_S = 1.0
"""Seconds of the budget reserved for writing."""


class Job(NamedTuple):
    """One process's work."""

    sections: tuple[str, ...]
    model: str = ""

    def name(self, section: str) -> str:
        """Return a section's name in the report."""
        return f"{self.model} {section}" if self.model else section


def jobs(models: Sequence[str], only: Sequence[str]) -> Iterator[Job]:
    """Yield the jobs after the measurement of the machine, the most important first."""
    wanted = [section for section in SECTIONS if (section in only if only else section not in _FOR_PLANS)]
    checks, engine = (tuple(s for s in wanted if s in some) for some in (_CHECKS, _MODEL_SECTIONS))
    if checks:
        yield Job(checks)
    if "check" in wanted:
        yield Job(("check",))
    yield from (Job(engine, model) for model in models if engine)
    closer = [model for model in models if model in _CLOSER]
    if "start" in wanted:
        yield from (Job(("start",), model) for model in closer)
    yield from (Job((section,)) for section in ("speed", "prompts", "recurrent") if section in wanted)
    for section in ("fp8_kv", "fp8_weights", "mixed", "long", "host", "compiled"):
        yield from (Job((section,), model) for model in closer if section in wanted)
    if "check_mixture" in wanted:
        yield Job(("check_mixture",))
    named = {section: job for plan in PLANS.values() for job in plan.jobs for section in job.sections}
    yield from (named[section] for section in wanted if section in _FOR_PLANS)
    for section in PEERS:
        yield from (Job((section,), model) for model in models if section in wanted)


class Plan(NamedTuple):
    """A run for a machine that is there for minutes only."""

    seconds: int
    """Limit of everything."""
    jobs: tuple[Job, ...]
    """In their order, the most important first."""


_06B, _8B, _30B = "qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b"
PLANS: dict[str, Plan] = {
    "first": Plan(
        430,
        (
            Job(("start",), _8B),
            Job(("check",)),
            Job(("proofs",)),
            Job(("anatomy",), _8B),
            Job(("anatomy",), _06B),
            Job(("prompts",)),
            Job(("mixed",), _8B),
            Job(("fp8_kv",), _8B),
            Job(("fp8_weights",), _8B),
            Job(("experts",)),
            Job(("recurrent",)),
            Job(("check_mixture",)),
            Job(("decode", "prefill"), _30B),
            Job(("ranks",)),
        ),
    ),
    "second": Plan(
        290,
        (
            Job(("server",), _06B),
            Job(("long",), _8B),
            Job(("offline", "decode"), _06B),
            Job(("offline",), _8B),
            Job(("transformers",), _06B),
            Job(("compiled",), _8B),
        ),
    ),
    "several": Plan(
        360,
        (
            Job(("ranks",)),
            Job(("second_gpu",)),
            Job(("links",)),
            Job(("tensor_ranks",), _8B),
            Job(("stages",), _8B),
            Job(("expert_ranks",), _30B),
            Job(("context_ranks",), _8B),
        ),
    ),
}
"""What the first runs on a GPU answer: whether all is right and where time goes, then a server and others; and on
several GPUs, whether all is right and how fast.
"""


class Run:
    """One run: starts processes, and collects their measurements."""

    def __init__(self, report: Report, asked: argparse.Namespace, start_s: float = _START_S) -> None:
        """`start_s`: most seconds until a process has begun its first section."""
        self._report, self._asked, self._start_s = report, asked, start_s
        seconds = PLANS[asked.plan].seconds if asked.plan else 60 * asked.minutes
        self._deadline = time.time() + seconds * (_TINY_PATIENCE if asked.plan and asked.tiny else 1) - _WRITE_S
        self._settings: dict[str, Any] = dict(asked.set)
        self._patience = _TINY_PATIENCE if asked.tiny else 1

    def all(self, models: Sequence[str]) -> None:
        """Run everything that was requested."""
        self.job(Job(("machine",)))
        asked = self._asked
        planned = list(PLANS[asked.plan].jobs if asked.plan else jobs(models, asked.only))
        if asked.tiny:
            planned = [job._replace(model="tiny" if job.model else "") for job in planned]
        for job in dict.fromkeys(planned):
            self.job(job)
            if "attention" in job.sections:
                self._settings |= self._right_attention()

    def job(self, job: Job) -> None:
        """Run a job's sections; those after a failed one get a new process, and a peer that is not there none."""
        missing = [section for section in job.sections if section in PEERS and find_spec(section) is None]
        self._report.left_out |= {job.name(section): "it is not installed" for section in missing}
        left = [section for section in job.sections if section not in missing]
        while left:
            self._process(job, left)
            self._report.write()

    def _process(self, job: Job, left: list[str]) -> None:
        """Run sections until their process ends; finished ones are removed from `left`."""
        current, has_begun, limit = left[0], False, self._start_s
        process = subprocess.Popen(
            self._command(job, left), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self._environment(job)
        )
        assert process.stdout is not None
        ender = self._ender(process, self._start_s)
        try:
            for line in process.stdout:
                ((kind, value),) = json.loads(line).items()
                if kind == "begin":
                    current, has_begun, limit = value, True, SECTIONS[value].most
                    ender.cancel()
                    ender = self._ender(process, SECTIONS[current].most)
                self._take(job, kind, value, left)
            status = process.wait()
        finally:
            ender.cancel()
            _end(process)
        if time.time() >= self._deadline:
            self._report.left_out |= {job.name(section): "the time was over" for section in left}
            left.clear()
        elif current in left:
            report = self._report
            noted = report.left_out if current in PEERS else report.failed
            noted[job.name(current)] = (
                f"took longer than {limit:.0f} s{'' if has_begun else ' to start'}, and was ended"
                if status == -signal.SIGKILL
                else f"its process ended with status {status}; its output is above"
            )
            left.remove(current)

    def _ender(self, process: subprocess.Popen[str], seconds: float) -> threading.Timer:
        """Return a timer that ends a process after `seconds`, or when the time is over."""
        seconds = min(seconds * self._patience, self._deadline - time.time())
        timer = threading.Timer(max(0.0, seconds), _end, [process])
        timer.daemon = True
        timer.start()
        return timer

    def _take(self, job: Job, kind: str, value: Any, left: list[str]) -> None:
        """Record a message of a process (`benchmarks/gpu_sections/messages.py`)."""
        report = self._report
        if kind == "measured":
            report.measurements.append(Measurement(**value))
        elif kind == "facts":
            report.facts.update(value)
        elif kind == "rates":
            report.rates.update(value)
        elif kind == "end":
            left.remove(value)
            report.write()
            print(f"{job.name(value)}: done, {self._deadline - time.time():.0f} s left", file=sys.stderr)
        elif kind in ("skipped", "failed"):
            left.remove(value["section"])
            noted = report.left_out if kind == "skipped" else report.failed
            noted[job.name(value["section"])] = value["reason"]

    def _command(self, job: Job, left: Sequence[str]) -> list[str]:
        asked = self._asked
        command = [sys.executable, "-m", "benchmarks.gpu_sections.child", "--deadline", f"{self._deadline}"]
        command += ["--begun", f"{time.time()}"]
        command += ["--settings", json.dumps(self._settings)]
        command += ["--model", job.model] if job.model else []
        command += ["--tiny"] if asked.tiny else []
        command += ["--rates", json.dumps(self._report.rates)] if self._report.rates else []
        return command + [f"{name}:{0 if asked.tiny else SECTIONS[name].least}" for name in left]

    def _environment(self, job: Job) -> dict[str, str]:
        found = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self._asked.tiny and job.sections[0] in (*_CHECKS, "speed", "prompts", "recurrent"):
            found["TRITON_INTERPRET"] = "1"
        return found

    def _right_attention(self) -> dict[str, str]:
        """Choose the best correct backend for the engine if a backend is wrong and the user chose none."""
        checks = [line for line in self._report.measurements if line.what.startswith("attention")]
        wrong = {line.by for line in checks if line.passed is False}
        right = [line.by for line in checks if line.by not in wrong]
        is_free = "attention" not in self._settings and not self._asked.tiny
        return {"attention": right[0]} if is_free and wrong and right else {}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started, which would still use the GPU."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended meanwhile.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    to_kill = [process.pid] if process.poll() is None else []
    for pid in to_kill:
        to_kill += parents.get(pid, [])
    for pid in to_kill:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", choices=list(PLANS), help="the parts and the time limit of a run that answers certain questions"
    )
    parser.add_argument("--commit", help="name of the measured code where there is no git")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes for everything (default: 9)")
    parser.add_argument("--models", type=_listed(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", type=_listed(SECTIONS), default=[], help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], help="a setting of the engines, as page_size=64"
    )
    parser.add_argument(
        "--out", type=Path, help="where results go: a folder that exists, or a path without an ending"
    )
    parser.add_argument("--tiny", action="store_true", help="toy shapes on the CPU: whether this script works")
    asked = parser.parse_args(argv)
    if asked.plan and asked.only:
        parser.error("--plan says which sections run: leave --only out")
    if not asked.minutes > 0:
        parser.error(f"--minutes must be above 0, got {asked.minutes}")
    return asked


def _setting(text: str) -> tuple[str, Any]:
    """Parse a name and a value, which is JSON or else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class _listed:
    """Parses names separated by commas."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = list(known)

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}: expected {', '.join(self._known)}")
        return names


def commit() -> str:
    """Return the commit of this checkout, and whether it differs."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return found.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print. Returns 0 when everything that ran is correct."""
    asked = parse_args(argv)
    settings = {"minutes": asked.minutes, "tiny": asked.tiny, "only": asked.only, "engine": dict(asked.set)}
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    settings |= {"plan": asked.plan} if asked.plan else {}
    report = Report(asked.out, {"started": started, **settings}, {"commit": asked.commit or commit()})
    try:
        Run(report, asked).all(["tiny"] if asked.tiny else asked.models)
    finally:
        report.write()
        print(report.summary())
        print(report.draw(), f"{report.path}.json", sep="\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
