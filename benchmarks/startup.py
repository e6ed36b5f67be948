"""Measure the time from the start of the application to its first answer, and what it is spent on.

    python -m benchmarks.startup [--with empty serve raydix] [--bytecode compiled none] [--rounds 3]
        [--baseline CHECKOUT] [--json FILE]

Starts `raydix serve` (or `serve run`) on deployments.yaml with a Ray of its own on free ports, asks one
question as soon as the port accepts connections, and ends it. In turn with it, `empty` is `serve run` on an
application with one replica that does nothing (`benchmarks/empty_app.py`): what Ray and Serve themselves take.
The times are seconds since the command, from the logs of Serve's controller and replicas; processor seconds are
those of all processes, and disturbed less than the clock by other work on the machine. `--baseline` measures
another checkout in turn. The first round does not count: it warms the page cache, and compiles bytecode into a
directory that all `compiled` starts read. Starts with `none` find no bytecode and may write none, not even that
of the standard library, as in a container whose image has none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.private_ray import free_port

ROOT = Path(__file__).resolve().parents[1]
QUESTION = {
    "model": "demo",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What does itertools.chain do?"}],
}
PATIENCE_S = 300.0
COMMANDS = ("empty", "serve", "raydix")
EMPTY_APP = {
    "proxy_location": "HeadOnly",
    "applications": [{"name": "empty", "import_path": "benchmarks.empty_app:app", "route_prefix": "/"}],
}
STAGES = (
    ("controller", "controller_*", "Controller starting"),
    ("build", "controller_*", "Importing and building app"),
    ("built", "controller_*", "Imported and built app"),
    ("empty_ready", "replica_*Empty_*", "Finished initializing replica"),
    ("engine_process", "replica_*EngineReplica_*", "Started initializing replica"),
    ("engine_loaded", "replica_*EngineReplica_*", "Finished initializing replica"),
    ("ingress_process", "replica_*Ingress_*", "Started initializing replica"),
    ("ingress_ready", "replica_*Ingress_*", "Finished initializing replica"),
    ("hub_process", "replica_*MetricsHub_*", "Started initializing replica"),
    ("hub_ready", "replica_*MetricsHub_*", "Finished initializing replica"),
)
"""Stages: name, log files and the line that marks the stage; the last such line counts."""


class Processes(threading.Thread):
    """Watches the processor time of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self._done = psutil.Process(pid), threading.Event()
        self.cpu: dict[int, tuple[str, float]] = {}
        """Name and processor seconds by process id, as last seen."""

    def run(self) -> None:
        while not self._done.wait(0.5):  # each look itself uses some milliseconds of processor time
            self.look()

    def look(self) -> None:
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                self.cpu[process.pid] = (_role(process.cmdline()), times.user + times.system)
            except psutil.Error:  # the process has just ended
                continue

    def stop(self) -> None:
        self._done.set()
        self.join()

    def seconds(self) -> dict[str, float]:
        """Return processor seconds by the role of a process."""
        totals: dict[str, float] = defaultdict(float)
        for role, seconds in self.cpu.values():
            totals[role] += seconds
        return {role: round(seconds, 2) for role, seconds in sorted(totals.items(), key=lambda item: -item[1])}

    def kill(self) -> None:
        """Kill the processes that have not ended by themselves."""
        for pid in self.cpu:
            try:
                psutil.Process(pid).kill()
            except psutil.Error:
                continue


def _role(command: list[str]) -> str:
    line = " ".join(command)
    found = re.search(
        r"ServeReplica:\w+:(\w+)|(SERVE_PROXY|ServeController|SERVE_CONTROLLER)|ray-?(dashboard)", line
    )
    if found:
        name: str = next(filter(None, found.groups()))
        return {"SERVE_PROXY": "proxy", "SERVE_CONTROLLER": "ServeController"}.get(name, name)
    for part in ("gcs_server", "raylet", "dashboard", "monitor.py", "runtime_env", "ProxyActor", "default_worker"):
        if part in line:
            return {"ProxyActor": "proxy", "default_worker": "other workers"}.get(part, part)
    return "other workers" if line.startswith("ray::") else "command"


def start_once(command: str, root: Path, bytecode: Path | None) -> dict[str, Any]:
    """Start once from nothing; return the timeline in seconds, and the processor seconds.

    Bytecode is read from the directory `bytecode`, and written there; None: there is none, and none is written.
    """
    with tempfile.TemporaryDirectory(prefix="rdx", ignore_cleanup_errors=True) as directory:
        port = free_port()
        if command == "empty":
            config = EMPTY_APP | {"http_options": {"host": "127.0.0.1", "port": port}}
        else:
            config = yaml.safe_load((root / "deployments.yaml").read_text())
            config["applications"][0]["args"]["ingresses"]["port"] = port
        path = Path(directory, "deployments.yaml")
        path.write_text(yaml.safe_dump(config))
        serve_run = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
        arguments = {
            "empty": serve_run,
            "serve": serve_run,
            "raydix": [sys.executable, "-m", "deployments.cli", "serve", str(path)],
        }[command]
        environment = {**os.environ, "PYTHONPATH": str(root), "RAY_TMPDIR": directory}
        environment |= _bytecode_environment(bytecode, Path(directory, "none"))
        started = time.time()
        with Path(directory, "output").open("wb") as output:
            process = subprocess.Popen(
                arguments, cwd=root, env=environment, stdout=output, stderr=output, preexec_fn=_heed_interrupts
            )
        processes = Processes(process.pid)
        processes.start()
        try:
            answered = _first_answer(f"http://127.0.0.1:{port}", process)
            processes.look()
            cpu = processes.seconds()
            logs = Path(directory, "ray/session_latest/logs/serve")
            timeline = {**_timeline(logs, started), "first_answer": round(answered - started, 2)}
        except RuntimeError as error:
            raise SystemExit(f"{error}:\n{Path(directory, 'output').read_text()[-2000:]}") from None
        finally:
            processes.stop()
            _end(process)
            processes.kill()
        return {"timeline_s": timeline, "cpu_s": round(sum(cpu.values()), 1), "cpu_by_process_s": cpu}


def _bytecode_environment(bytecode: Path | None, empty: Path) -> dict[str, str]:
    """PYTHONDONTWRITEBYTECODE says "no" when it is the empty string."""
    if bytecode is None:
        return {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(empty)}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}


def _first_answer(url: str, process: subprocess.Popen[bytes]) -> float:
    """Return the time of the first complete answer, in seconds since the epoch. Raises RuntimeError."""
    deadline = time.time() + PATIENCE_S
    with httpx.Client(timeout=PATIENCE_S) as client:
        while time.time() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the command has ended with {process.returncode}")
            with suppress(httpx.HTTPError):
                if client.post(f"{url}/v1/chat/completions", json=QUESTION).status_code == 200:
                    return time.time()
            time.sleep(0.1)
    raise RuntimeError(f"no answer within {PATIENCE_S:g} s")


def _timeline(logs: Path, started: float) -> dict[str, float]:
    """Return the seconds from `started` to each stage in the logs."""
    times: dict[str, float] = {}
    for stage, files, words in STAGES:
        for line in (line for path in logs.glob(f"{files}.log") for line in path.read_text().splitlines()):
            stamp = re.match(r"\w+ (\d{4}-\S+ \S+) ", line)
            if words in line and stamp:
                at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - started
                times[stage] = max(times.get(stage, 0.0), round(at, 2))
    return times


def _heed_interrupts() -> None:
    """Restore SIGINT, which a process in a shell's background ignores, as would the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all figures of the fastest round, and the seconds of the others."""
    best = min(rounds, key=lambda one: one["timeline_s"]["first_answer"])
    return {
        "first_answer_s": [one["timeline_s"]["first_answer"] for one in rounds],
        "cpu_s": [one["cpu_s"] for one in rounds],
        "median_cpu_s": round(statistics.median(one["cpu_s"] for one in rounds), 1),
        "fastest": best,
    }


def _times_empty(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Each start's time divided by that of the empty application, by round."""
    ratios: dict[str, list[float]] = {}
    for start, measured in rounds.items():
        beside = rounds.get("empty_raydix_none" if start.endswith("_none") else "empty_raydix", [])
        if measured is not beside and beside:
            times = [
                (one["timeline_s"]["first_answer"], empty["timeline_s"]["first_answer"])
                for one, empty in zip(measured, beside, strict=True)
            ]
            ratios[start] = [round(own / empty, 2) for own, empty in times]
    return ratios


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--bytecode", nargs="+", choices=("compiled", "none"), default=["compiled"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--cold", action="store_true", help="count the first round as well")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkouts = {"raydix": ROOT} | ({"baseline": options.baseline.resolve()} if options.baseline else {})
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rdxpyc") as bytecode:
        for number in range(options.rounds + (not options.cold)):
            for kind in options.bytecode:
                for command in options.commands:
                    for name, root in checkouts.items():
                        if command == "empty" and root != ROOT:
                            continue
                        measured = start_once(command, root, Path(bytecode) if kind == "compiled" else None)
                        start = f"{command}_{name}" + ("" if kind == "compiled" else f"_{kind}")
                        print(f"{start}:", json.dumps(measured), flush=True)
                        if number or options.cold:
                            rounds[start].append(measured)
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "note": options.note},
        "at": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{name: _summary(measured) for name, measured in rounds.items()},
        "times_empty": _times_empty(rounds),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
