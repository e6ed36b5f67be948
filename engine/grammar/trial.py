"""Compiles clients' grammars safely: in a process that is killed when a grammar takes too long.

Trial.check ──▶ stdin: one grammar a line ──▶ [timer on, compile, first mask, timer off] ──▶ stdout: a verdict

The process is killed by its own timer, which counts processor time: a busy machine refuses no grammar that an idle
one accepts, and no process keeps computing after its parent is gone. Its memory is bounded too. As it does nothing
else, it can tell how much memory a compiled grammar takes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any

from engine.errors import InvalidGrammar
from engine.grammar.heap import allocated_bytes
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary

# Wall-clock seconds after which a process that used less processor time counts as dead.
_TIMEOUT_S = 120.0
_ATTEMPTS = 3
"""Processes that others may kill, one after the other, before a grammar is given up."""
_DYING_S = 5.0
"""Seconds that a process whose output has ended has for its own end."""


class TooComplex(InvalidGrammar):
    """The grammar takes too much time or memory; its process was killed."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits on compiling one grammar."""

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 * 2**20
    """Memory beyond what the tokenizer takes."""


class Trial:
    """One such process, started when first needed and again after it was killed. For one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> int:
        """Return how many bytes the compiled grammar takes. Raises InvalidGrammar, or TooComplex, which is one."""
        attempts = _ATTEMPTS
        while True:
            self._start()
            try:
                verdict = self._ask(asdict(grammar))
                break
            except EOFError:
                attempts -= 1
                is_its_fault = not self._was_killed()
                self.close()
                if is_its_fault or not attempts:
                    raise self._too_complex() from None
        if isinstance(verdict, str):
            raise InvalidGrammar(verdict)
        return verdict

    def _too_complex(self) -> TooComplex:
        limits = self._limits
        return TooComplex(
            f"it is too complex: it takes more than {limits.cpu_seconds:g} s or "
            f"{limits.memory_bytes / 2**20:g} MiB to compile; simplify it"
        )

    def _was_killed(self) -> bool:
        """Whether somebody else ended the process, such as the kernel for want of memory elsewhere."""
        assert self._process is not None
        try:
            return self._process.wait(_DYING_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:  # it lives, and does not answer
            return False

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Kill the process, if there is one. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        for _ in range(_ATTEMPTS):
            self.close()
            try:
                error = self._begin()
            except EOFError:
                if self._was_killed():
                    continue
                break
            if isinstance(error, str):
                self.close()
                raise InvalidGrammar(error)
            return
        self.close()
        raise RuntimeError("the process that compiles grammars on trial died while starting")

    def _begin(self) -> str | int:
        """Start the process and tell it what it needs. Return what is wrong, or 0. Raises EOFError if it died."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # The terminal's interrupts go to the parent alone, with which it ends.
        )
        return self._ask({"vocabulary": asdict(self._vocabulary), "limits": asdict(self._limits)})

    def _ask(self, question: dict[str, Any]) -> str | int:
        """Return what is wrong, or a number. Raises EOFError when the process has died or does not answer."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        answers = select.poll()
        answers.register(process.stdout, select.POLLIN | select.POLLHUP)
        line = process.stdout.readline() if answers.poll(_TIMEOUT_S * 1000) else b""
        if not line:
            raise EOFError
        answer: str | int = json.loads(line)
        return answer


def main(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Run the process: read the vocabulary, then grammars until the end of input."""
    import resource

    from engine.grammar.compiler import compile_grammar

    first = json.loads(questions.readline())
    limits = TrialLimits(**first["limits"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        tokenizer = Vocabulary(**first["vocabulary"]).load()
    except InvalidGrammar as error:
        return _tell(answers, str(error))
    with open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory_bytes,) * 2)
    _tell(answers, 0)
    for line in questions:
        grammar, before = Grammar(**json.loads(line)), allocated_bytes()
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        try:
            compiled = compile_grammar(grammar, tokenizer)
            verdict: str | int = max(allocated_bytes() - before, 1)
            del compiled
        except InvalidGrammar as error:
            verdict = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _tell(answers, verdict)


def _tell(answers: IO[bytes], verdict: str | int) -> None:
    answers.write(json.dumps(verdict).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
