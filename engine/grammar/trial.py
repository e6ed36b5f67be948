"""Compiles clients' grammars safely: in a process that is killed when a grammar takes too long.

Trial.check ──▶ stdin: one grammar a line ──▶ [timer on, compile, random answers, timer off] ──▶ stdout: a verdict

The process's own timer, which counts processor time, kills it: a busy machine rejects no grammar that an idle one
accepts, and no process continues after its parent has ended. Its memory is bounded too. Because it does nothing
else, it can measure how much memory a compiled grammar takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from engine.base.awake_clock import LOOK_S, Patience
from engine.base.errors import InvalidGrammar
from engine.grammar.heap import allocated_bytes
from engine.grammar.spec import Grammar, MatcherName
from engine.grammar.vocabulary import LoadedVocabulary, Vocabulary

# Seconds after which a process that used less processor time counts as dead, unless this one was paused too.
_TIMEOUT_S = 120.0
_ATTEMPTS = 3
"""Processes in a row that may be killed from outside before a grammar is given up."""
_NICENESS = 10
_DYING_S = 5.0
"""Seconds that a process has to end after the end of its output."""
_POLL_S = 0.005


class TooComplex(InvalidGrammar):
    """The grammar takes too much time or memory; its process was killed."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits on compiling one grammar."""

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 * 2**20
    """Memory in addition to that of the tokenizer."""


class Trial:
    """One such process, started when first needed and again after it was killed. For one thread at a time."""

    def __init__(
        self, vocabulary: Vocabulary, limits: TrialLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is monotonic."""
        self._vocabulary, self._limits, self._clock = vocabulary, limits, clock
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar with the measured bytes and the library that follows it faster.

        Raises InvalidGrammar, including TooComplex.
        """
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
        compiled_bytes, matcher = verdict
        return replace(grammar, compiled_bytes=compiled_bytes, matcher=matcher)

    def _too_complex(self) -> TooComplex:
        limits = self._limits
        return TooComplex(
            f"it is too complex: it takes more than {limits.cpu_seconds:g} s or "
            f"{limits.memory_bytes / 2**20:g} MiB to compile; simplify it"
        )

    def _was_killed(self) -> bool:
        """Whether the process was killed from outside, for example by the kernel because memory ran out."""
        assert self._process is not None
        patience = Patience(_DYING_S, self._clock)
        while (status := self._process.poll()) is None and not patience.is_over():
            time.sleep(_POLL_S)
        return status == -signal.SIGKILL  # None: the process runs but does not answer

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

    def _begin(self) -> Any:
        """Start the process and send it the vocabulary. Return its answer; a text is an error.

        Raises EOFError if it died.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Only the parent gets the terminal's interrupts; this process ends with it.
        )
        return self._ask({"vocabulary": asdict(self._vocabulary), "limits": asdict(self._limits)})

    def _ask(self, question: dict[str, Any]) -> Any:
        """Return the answer; a text is an error.

        Raises EOFError when the process has died or does not answer.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        answers, patience = select.poll(), Patience(_TIMEOUT_S, self._clock)
        answers.register(process.stdout, select.POLLIN | select.POLLHUP)
        while not (has_answered := answers.poll(LOOK_S * 1000)) and not patience.is_over():
            pass
        line = process.stdout.readline() if has_answered else b""
        if not line:
            raise EOFError
        return json.loads(line)


def main(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Run the process: read the vocabulary, then grammars until the end of input."""
    import resource

    os.nice(_NICENESS)  # Engines and ingresses take precedence, because a request for a grammar can wait.
    first = json.loads(questions.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        vocabulary = Vocabulary(**first["vocabulary"]).load()
    except InvalidGrammar as error:
        return _tell(answers, str(error))
    measure = _Measure(TrialLimits(**first["limits"]))
    _tell(answers, None)
    for line in questions:
        _tell(answers, measure.verdict(Grammar(**json.loads(line)), vocabulary))


class _Measure:
    """Compiles grammars within limits on processor time and memory."""

    def __init__(self, limits: TrialLimits) -> None:
        self._limits = limits
        self._allocated = 0
        """Bytes that were allocated before the grammar was compiled."""
        self._bound_memory()

    def verdict(self, grammar: Grammar, vocabulary: LoadedVocabulary) -> str | tuple[int, MatcherName]:
        """Return a grammar's error, or its bytes and the library that follows it faster."""
        from engine.grammar.compiler import compile_grammar, matcher_name

        self._allocated = allocated_bytes()
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_seconds)
        try:
            compiled = compile_grammar(grammar, vocabulary, self._paused)
        except InvalidGrammar as error:
            return str(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return max(allocated_bytes() - self._allocated, 1), matcher_name(compiled)

    def _bound_memory(self) -> None:
        import resource

        with open("/proc/self/statm") as sizes:
            size = int(sizes.read().split()[0]) * resource.getpagesize()
        self._set_bound(size + self._limits.memory_bytes)

    def _set_bound(self, num_bytes: int) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Exclude work that belongs to no grammar: the timer restarts after it, and its memory is not counted."""
        import resource

        signal.setitimer(signal.ITIMER_PROF, 0)
        self._set_bound(resource.getrlimit(resource.RLIMIT_AS)[1])
        before = allocated_bytes()
        yield
        self._allocated += allocated_bytes() - before
        self._bound_memory()
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_seconds)


def _tell(answers: IO[bytes], verdict: Any) -> None:
    answers.write(json.dumps(verdict).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
