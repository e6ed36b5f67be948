"""Grammars of unknown origin are tried in a process that is killed when one takes too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import psutil
import pytest

from engine.base.awake_clock import STILL_S
from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar
from engine.grammar.trial import TooComplex, Trial, TrialLimits
from engine.grammar.vocabulary import Vocabulary
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, tokenizer
from tests.engine.support.grammar_walks import walk

ENDLESS = Grammar("json_schema", '{"type":"integer","multipleOf":99999999}')
FUEL = json.dumps(
    {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23, 29, 31)]}
)
FINE = Grammar("json_object")


def vocabulary() -> Vocabulary:
    return Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS])


@pytest.fixture
def trial() -> Iterator[Trial]:
    trial = Trial(vocabulary(), TrialLimits(cpu_seconds=0.3))
    yield trial
    trial.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[Trial]:
    trial = Trial(vocabulary(), TrialLimits(cpu_seconds=30))
    yield trial
    trial.close()


def test_a_check_that_takes_too_long_is_killed_and_replaced(trial: Trial) -> None:
    trial.check(FINE)
    first = trial.pid
    with pytest.raises(TooComplex, match=r"more than 0\.3 s"):
        trial.check(ENDLESS)
    assert first is not None and not psutil.pid_exists(first)
    trial.check(FINE)
    assert trial.pid not in (None, first)


def test_a_check_that_takes_too_much_memory_is_killed() -> None:
    trial = Trial(vocabulary(), TrialLimits(cpu_seconds=60, memory_bytes=16 * 2**20))
    try:
        with pytest.raises(TooComplex, match="16 MiB"):
            trial.check(ENDLESS)
    finally:
        trial.close()


def test_a_process_that_died_in_between_is_no_fault_of_the_next_grammar(trial: Trial) -> None:
    trial.check(FINE)
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGKILL)
    psutil.Process(trial.pid).wait(timeout=60)
    trial.check(FINE)


def test_a_process_that_is_killed_as_it_starts_is_started_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = subprocess.Popen, list[Any]()

    def killed_at_first(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", killed_at_first)
    assert trial.check(FINE).compiled_bytes > 0
    assert len(started) == 2


def test_a_trial_process_that_others_kill_gives_no_verdict_on_the_grammar(trial: Trial) -> None:
    trial.check(FINE)
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        checking = thread.submit(trial.check, FINE)
        os.kill(trial.pid, signal.SIGKILL)
        assert checking.result().compiled_bytes > 0


@pytest.mark.parametrize("continues", [True, False])
def test_a_process_that_stands_still_is_given_up_unless_this_one_stood_still_too(
    continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours pass between two readings of the clock, as if all were frozen, or half a second does."""
    monkeypatch.setattr("engine.grammar.trial._TIMEOUT_S", 3.0)
    now, readings = 0.0, 0

    def clock() -> float:
        nonlocal now, readings
        readings += 1
        if is_frozen:
            now += 7200.0 if continues else STILL_S
        if continues and readings == 4:
            assert trial.pid is not None
            os.kill(trial.pid, signal.SIGCONT)
        return now

    is_frozen, trial = False, Trial(vocabulary(), TrialLimits(cpu_seconds=30), clock)
    trial.check(FINE)
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGSTOP)
    is_frozen, readings = True, 0
    if continues:
        assert trial.check(FINE).compiled_bytes
    else:
        with pytest.raises(TooComplex):
            trial.check(FINE)
    trial.close()


def test_nothing_is_left_when_it_is_closed(trial: Trial) -> None:
    trial.check(FINE)
    process = psutil.Process(trial.pid)
    trial.close()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (Grammar("json_schema", '{"type":"array","uniqueItems":true}'), "uniqueItems is not supported"),
        (Grammar("json_schema", '{"if":{},"then":{}}'), "if and then are not supported"),
        (Grammar("json_schema", '{"not":{},"x-guidance":{"lenient":true}}'), "not is not supported"),
        (Grammar("json_schema", '{"$ref":"http://127.0.0.1:1/schema"}'), "127.0.0.1"),
        (Grammar("json_schema", '{"$ref":"file:///etc/hosts"}'), "etc/hosts"),
        (Grammar("json_schema", '{"$ref":"#/nowhere"}'), "'/nowhere' does not exist"),
        (Grammar("json_schema", '{"oneOf":[{"minimum":1},{"maximum":5}]}'), "oneOf"),
        (
            Grammar("json_schema", '{"items":[{"minProperties":3,"required":["a"]}]}'),
            "minProperties is not supported",
        ),
        (Grammar("json_schema", '{"type":"text"}'), "Invalid type: text"),
        (Grammar("json_schema", '{"type":"integer","minimum":3,"maximum":1}'), "minimum"),
        (Grammar("json_schema", '{"pattern":"(?=a)b"}'), "look-around"),
        (Grammar("json_schema", '{"type":'), "must be a JSON object"),
        (Grammar("json_schema", "[1]"), "must be a JSON object"),
        (Grammar("json_schema", '{"anyOf":' * 500 + "1" + "}" * 500), "recursion limit"),
        (Grammar("json_schema", '{"$ref":"#"}'), "leads back to itself without end"),
        (Grammar("regex", "(a"), "^regex parse error: .* unclosed group$"),
        (Grammar("regex", r"(a)\1"), "backreferences are not supported$"),
        (
            Grammar("json_schema", '{"type":"string","pattern":"^aaa$","maxLength":2}'),
            "^no text matches its patterns and its bounds on lengths$",
        ),
        (Grammar("regex", "(" * 20000), "regex"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", '["a",1]'), "array of at least one string"),
        (Grammar("lark", ""), "Empty grammar"),
        (Grammar("lark", "start: foo"), 'unknown name: "foo"$'),
        (Grammar("lark", 'start: start "a"'), "no output"),
        (Grammar("json_schema", FUEL), "fuel exhausted"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(patient: Trial, grammar: Grammar, complaint: str) -> None:
    with pytest.raises(InvalidGrammar, match=complaint) as caught:
        patient.check(grammar)
    assert not isinstance(caught.value, TooComplex)
    assert len(str(caught.value)) < 400


def test_an_error_that_would_appear_only_in_an_answer_is_refused_immediately(patient: Trial) -> None:
    """More rules begin with the same letter than the parser follows at once; the letter is not the first."""
    rules = " | ".join(f'"a{number}"' for number in range(5000))
    with pytest.raises(
        InvalidGrammar, match=r"too complex to follow: a random answer takes too much after \d tokens"
    ):
        patient.check(Grammar("lark", f'start: "-" ({rules})'))


def optional(number: int) -> dict[str, Any]:
    names = {f"p{at}": {"type": "string", "maxLength": 5} for at in range(number)}
    return {"type": "object", "properties": names, "additionalProperties": False}


@pytest.mark.parametrize("number", [600, 1000])
@pytest.mark.parametrize("before", ["", "start: %json ", 'start: "call " %json '])
def test_any_number_of_properties_may_be_optional(patient: Trial, number: int, before: str) -> None:
    schema = json.dumps(optional(number))
    grammar = Grammar("lark", before + schema) if before else Grammar("json_schema", schema)
    assert patient.check(grammar).matcher == "llguidance"
    end, text = walk(grammar, [7, 40, 11, 3, 99, 5, 2000, 17], 60)
    assert end == "complete"
    jsonschema.validate(json.loads(text.removeprefix("call ")), optional(number))


def test_its_priority_is_lower_than_that_of_the_serving_process(trial: Trial) -> None:
    trial.check(FINE)
    assert psutil.Process(trial.pid).nice() == min(psutil.Process().nice() + 10, 19)


def test_the_verdict_names_the_better_matcher_of_a_grammar(patient: Trial) -> None:
    recursive = Grammar("gbnf", "root ::= [a-z ] root | [a-z ]")
    assert patient.check(recursive).matcher == "xgrammar"
    assert 0 < patient.check(recursive).compiled_bytes < 2**20
    assert patient.check(FINE).matcher == "llguidance"


def test_a_model_that_never_ends_can_have_no_grammar() -> None:
    with pytest.raises(InvalidGrammar, match="no end-of-text token"):
        Vocabulary.of(tokenizer(), NUM_TOKENS, [])
