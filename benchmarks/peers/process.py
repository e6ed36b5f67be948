"""An engine's process as the comparison holds it: started, asked, ended; what it prints goes to a log."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Job, Settings, encode

RAYDIX = "raydix"
PEERS = ("vllm", "openvino", "llamacpp", "transformers")
REPOSITORY = Path(__file__).resolve().parents[2]


class PeerFailed(RuntimeError):
    """A peer ended or kept silent; the message says how, and where its log lies."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a job."""

    seconds: float
    tokens: list[list[int]]


def interpreter(name: str, home: Path) -> Path | None:
    """The Python that runs engine `name`, or None where it is not installed under `home`."""
    found = Path(sys.executable) if name == RAYDIX else home / name / "bin" / "python"
    return found if found.exists() else None


class Peer:
    """A loaded engine. Raises PeerFailed when it cannot be loaded, and once it has failed."""

    def __init__(self, name: str, home: Path, settings: Settings, log: Path, timeout_s: float) -> None:
        python = interpreter(name, home)
        if python is None:
            raise PeerFailed(f"{name} is not installed in {home / name}: see benchmarks/peers/install.sh")
        self.name, self._log, self._timeout_s = name, log, timeout_s
        adapter = importlib.import_module(f"benchmarks.peers.{name}")
        special = adapter.environment(home / name, settings.threads) if hasattr(adapter, "environment") else {}
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{name}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                cwd=REPOSITORY,
                env=os.environ | special,
                start_new_session=True,  # so that what it starts ends with it
            )
        self.version: str = self._ask(encode(settings))["version"]

    def run(self, job: Job) -> Answer:
        """Run a job. Raises PeerFailed also when an answer does not have the requested length."""
        answer = Answer(**self._ask(encode(job)))
        counts = [len(tokens) for tokens in answer.tokens]
        if counts != job.max_tokens:
            wrong = next(pair for pair in zip(counts, job.max_tokens, strict=False) if pair[0] != pair[1])
            raise self._failed(f"answered with {wrong[0]} tokens where {wrong[1]} were asked for")
        return answer

    def stop(self) -> None:
        """End the engine and all processes that it started."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it writes what it could not write before
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        try:
            to.write(line.encode())
            to.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        if not select.select([back], [], [], self._timeout_s)[0]:
            raise self._failed(f"gave no answer in {self._timeout_s:g} s")
        answer = back.readline()
        if not answer:
            raise self._failed("ended")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _failed(self, how: str) -> PeerFailed:
        self.stop()
        lines = self._log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if "error" in line.lower()] or lines or [""]
        return PeerFailed(f"{self.name} {how}: {telling[-1].strip()[:200]} (log: {self._log})")
