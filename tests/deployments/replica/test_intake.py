"""What a replica does with requests that come twice, with suspects, and with grammars that are to be compiled."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from deployments.replica.intake import GRAMMAR_THREADS, Refusal
from deployments.wire.messages import CLEARED_TOKENS, Generate, Trial, pack_tokens
from deployments.wire.server import WireTimings
from engine.grammar.spec import Grammar
from engine.values.sampling_params import SamplingParams
from tests.deployments.support.in_process_engines import InProcessEngines


@pytest.mark.parametrize(
    ("second", "refused"), [("an ingress", []), ("another", [("another", "a", "never_fits")])]
)
def test_a_request_that_its_ingress_sends_again_is_neither_run_twice_nor_refused(
    second: str, refused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the wire's look and the engine's lies the time in which a grammar is compiled."""
    engines, told = InProcessEngines(1, WireTimings(absent_ingress_s=60)), list[Any]()
    try:
        replica = engines.replicas[0]
        monkeypatch.setattr(replica.wire, "refuse", lambda *refusal: told.append(refusal[:3]))
        asked = Generate(1, "a", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=40))
        replica.intake.on_generate("an ingress", asked)
        replica.intake.on_generate(second, asked)
        assert told == refused
    finally:
        engines.close()


def test_a_suspect_that_must_run_by_itself_is_refused_while_another_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, told = InProcessEngines(1, WireTimings(absent_ingress_s=60)), list[Any]()
    try:
        replica, runner = engines.replicas[0], engines.runners[0]
        monkeypatch.setattr(replica.wire, "refuse", lambda *refusal: told.append(refusal[1:3]))

        def send(name: str, trial: Trial | None) -> None:
            asked = Generate(1, name, pack_tokens([1]), SamplingParams(max_tokens=2 * CLEARED_TOKENS), trial=trial)
            replica.intake.on_generate(f"ingress of {name}", asked)

        runner.gate.clear()
        for name, trial in (("a", "beside"), ("b", "beside"), ("c", None), ("d", "alone")):
            send(name, cast(Trial | None, trial))
        assert told == [("d", "queue_full")]
        runner.gate.set()
        while any(replica.wire.is_beginning(name, CLEARED_TOKENS) for name in "ab"):
            time.sleep(0.001)
        runner.gate.clear()
        for name, trial in (("e", "alone"), ("f", "beside"), ("g", "alone")):
            send(name, cast(Trial, trial))
        assert told == [("d", "queue_full"), ("g", "queue_full")]
    finally:
        engines.close()


class Compilers:
    """A replica whose grammars are compiled when the test says so."""

    def __init__(self, engines: InProcessEngines, monkeypatch: pytest.MonkeyPatch) -> None:
        self.intake = engines.replicas[0].intake
        self.begun: queue.Queue[str] = queue.Queue()
        self.told: queue.Queue[Any] = queue.Queue()
        self.may_continue = threading.Semaphore(0)
        monkeypatch.setattr(self.intake, "compile", self._compile)
        monkeypatch.setattr(engines.replicas[0].wire, "refuse", lambda *refusal: self.told.put(refusal[:3]))

    def _compile(self, grammar: Grammar) -> Refusal:
        self.begun.put(grammar.source)
        assert self.may_continue.acquire(timeout=60)
        if grammar.source == "defect":
            raise RuntimeError(grammar.source)
        return Refusal("never_fits", grammar.source)

    def send(self, name: str, tenant: str, source: str | None = None) -> None:
        sampling = SamplingParams(grammar=Grammar("regex", source or name))
        self.intake.on_generate("i", Generate(1, name, pack_tokens([1]), sampling, tenant=tenant))

    def is_over(self, names: str) -> bool:
        """Let all go on; return whether each of these, and nothing else, is told that it is not run."""
        self.may_continue.release(100)
        told = sorted(self.told.get(timeout=60)[1] for _ in names)
        return told == sorted(names) and not self.intake.num_compiling


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    engines = InProcessEngines(1, WireTimings(absent_ingress_s=60))
    yield Compilers(engines, monkeypatch)
    engines.close()


def test_a_tenants_grammars_wait_for_their_turns_and_not_for_all_of_anothers(compilers: Compilers) -> None:
    for name in "abcdef":
        compilers.send(name, "flood")
    assert {compilers.begun.get(timeout=60) for _ in range(GRAMMAR_THREADS)} == {"a", "b"}
    compilers.send("z", "another")
    compilers.may_continue.release(2)
    assert "z" in {compilers.begun.get(timeout=60) for _ in range(2)}
    assert compilers.is_over("abcdefz")


def test_a_grammar_whose_client_has_left_is_not_compiled(compilers: Compilers) -> None:
    for name in "abc":
        compilers.send(name, "t")
    compilers.intake.on_withdrawn("i", "c")
    assert compilers.is_over("ab")
    assert {compilers.begun.get(timeout=60) for _ in range(2)} == {"a", "b"} and compilers.begun.empty()


def test_a_defect_in_compiling_is_reported_immediately_and_leaves_nothing(compilers: Compilers) -> None:
    compilers.send("a", "t", "defect")
    compilers.may_continue.release()
    assert compilers.told.get(timeout=60) == ("i", "a", "failed")
    assert compilers.intake.num_compiling == 0
