"""Compiled grammars are kept within a bound in bytes, which counts what they take, and replaced when worn."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cache import Namespace
from engine.grammar.compiled import MOST_MASKS, STATES_BYTES, weight
from engine.grammar.compiler import Compiler
from engine.grammar.constraint import Constraint
from engine.grammar.spec import Grammar
from engine.grammar.trial import Trial, TrialLimits
from engine.grammar.vocabulary import Vocabulary
from engine.sampling.masks import GrammarMasks
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, ids, tokenizer

MIB = 2**20
A, B, C = (Grammar("regex", letter, compiled_bytes=MIB) for letter in "abc")
EACH = weight(A)


def vocabulary() -> Vocabulary:
    return Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS])


def multiple_of(number: int) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial(vocabulary(), TrialLimits(cpu_seconds=60))
    trial.check(A)
    yield trial
    trial.close()


def test_the_least_recently_used_grammar_makes_room() -> None:
    compiler = Compiler(vocabulary, 2 * EACH)
    first, second = compiler.compile(A), compiler.compile(B)
    assert compiler.compile(A) is first and compiler.num_bytes == 2 * EACH
    del second
    compiler.compile(C)
    assert compiler.compile(A) is first and compiler.num_bytes == 2 * EACH
    assert (compiler.num_hits, compiler.num_misses) == (2, 3)
    compiler.compile(B)
    assert compiler.num_misses == 4


def test_a_grammar_above_the_bound_is_shared_while_it_is_used_and_not_kept() -> None:
    compiler = Compiler(vocabulary, 2 * EACH)
    small = compiler.compile(A)
    heavy = Grammar("regex", "h", compiled_bytes=2 * EACH)
    used = compiler.compile(heavy)
    assert compiler.compile(heavy) is used and compiler.num_bytes == EACH
    del used
    misses = compiler.num_misses
    compiler.compile(heavy)
    assert compiler.num_misses == misses + 1 and compiler.compile(A) is small


def test_a_grammar_is_the_same_whether_or_not_it_was_measured() -> None:
    compiler = Compiler(vocabulary)
    assert compiler.compile(Grammar("regex", "a")) is compiler.compile(A)


def test_an_unmeasured_grammar_counts_more_the_longer_it_is() -> None:
    short, long = Grammar("regex", "a"), Grammar("regex", "a" * 10_000)
    assert STATES_BYTES < weight(short) < weight(long) - MIB


# --- use ----------------------------------------------------------------------------------------------------


class Use:
    """Requests with one grammar whose answers are given."""

    def __init__(self, compiler: Compiler, grammar: Grammar) -> None:
        self._compiler, self._grammar = compiler, grammar
        self._masks = GrammarMasks([EOS])
        self.num_masks = 0

    def answer(self, text: str) -> bool:
        """Compute a mask for each letter of an answer's beginning; return whether the grammar never failed."""
        request = Request.make(
            "r", [7], SamplingParams(max_tokens=500), arrival=0.0, seed=0, namespace=Namespace("m")
        )
        request.constraint = Constraint(self._compiler.compile(self._grammar))
        logits = torch.zeros(1, NUM_TOKENS)
        for letter in text:
            self.num_masks += 1
            if self._masks.apply(logits, [SamplingRow.of(request)]):
                return False
            request.tokens += ids(letter)
        return True


def test_a_grammar_that_requests_have_used_up_is_whole_again_for_the_next() -> None:
    """A state of this one says where an e is among the last letters: 50,000 of them are soon there."""
    use, draw = Use(Compiler(vocabulary), Grammar("regex", "[a-z]*e[a-z]{17}0")), random.Random(1)
    words = ["".join(draw.choices("et", k=40)) for _ in range(60)]
    used_up = next(number for number, word in enumerate(words) if not use.answer(word))
    assert use.num_masks < MOST_MASKS
    assert all(use.answer(word) for word in words[used_up : used_up + 10])


def test_a_grammar_is_compiled_again_before_it_can_be_used_up() -> None:
    compiler = Compiler(vocabulary)
    use = Use(compiler, A)
    while compiler.num_misses < 2:
        assert use.answer("a")
    assert MOST_MASKS <= use.num_masks <= MOST_MASKS + 3


# --- what is counted is what is taken ------------------------------------------------------------------------


def ask(program: str, grammar: Grammar, count: int = 0) -> float:
    """Run a program in a process of its own, and return the number that it prints."""
    asked = vocabulary()
    question = {
        "vocabulary": [asked.tokenizer_json, asked.num_logits, asked.eos_token_ids],
        "grammar": [grammar.kind, grammar.source],
        "count": count,
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, check=True)
    return float(done.stdout)


KEEP = """
import json, sys
import psutil
from engine.grammar.compiler import compile_grammar
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
question = json.loads(sys.stdin.readline())
tokenizer = Vocabulary(*question["vocabulary"]).load()
grammar = Grammar(*question["grammar"])
kept = [compile_grammar(grammar, tokenizer)]
before = psutil.Process().memory_info().rss
kept += [compile_grammar(grammar, tokenizer) for _ in range(question["count"])]
print((psutil.Process().memory_info().rss - before) / question["count"])
"""


@pytest.mark.parametrize(
    ("grammar", "count"),
    [
        (multiple_of(29_989), 5),
        (
            Grammar(
                "json_schema",
                json.dumps({"properties": {f"p{number}": {"type": "string"} for number in range(200)}}),
            ),
            50,
        ),
        (Grammar("choice", json.dumps([f"the choice {number} of many" for number in range(1000)])), 100),
    ],
    ids=["multipleOf", "200 properties", "1000 choices"],
)
def test_a_trial_measures_the_memory_that_each_kept_grammar_takes_in_a_process(
    trial: Trial, grammar: Grammar, count: int
) -> None:
    grown = ask(KEEP, grammar, count)
    assert [trial.check(grammar).compiled_bytes for _ in range(2)] == pytest.approx(
        [grown] * 2, rel=0.3, abs=20_000
    )


USE = """
import json, random, sys
import numpy as np
from engine.grammar.compiled import MOST_MASKS
from engine.grammar.compiler import compile_grammar
from engine.grammar.heap import allocated_bytes
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
question = json.loads(sys.stdin.readline())
tokenizer = Vocabulary(*question["vocabulary"]).load()
matcher = compile_grammar(Grammar(*question["grammar"]), tokenizer)
draw, before, num_masks = random.Random(0), allocated_bytes(), 0
while num_masks < MOST_MASKS:
    used = matcher.deep_copy()
    for _ in range(200):
        num_masks += 1
        mask = np.frombuffer(used.compute_bitmask(), dtype=np.uint8)
        token = int(draw.choice(np.unpackbits(mask, bitorder="little").nonzero()[0]))
        if used.is_stopped() or not used.consume_token(token):
            break
    assert not used.is_error(), used.get_error()
    del used
print(allocated_bytes() - before)
"""


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": {
                        "mail": {"type": "string", "pattern": "^[a-z]{1,30}@[a-z]{1,30}[.](com|org)$"},
                        "when": {"type": "string", "format": "date-time"},
                        "text": {"type": "string", "maxLength": 300},
                        "kind": {"enum": [f"kind {number}" for number in range(50)]},
                    },
                    "required": ["mail", "when", "text", "kind"],
                }
            ),
        ),
        multiple_of(4999),
        Grammar("regex", "([a-z ]*)e[a-z ]{9}"),
    ],
    ids=["any object", "schema", "multipleOf", "pattern"],
)
def test_the_use_of_a_grammar_adds_no_more_memory_than_is_counted_for_it(grammar: Grammar) -> None:
    assert ask(USE, grammar) < STATES_BYTES


def test_large_grammars_leave_nothing_in_the_process_that_tries_them(trial: Trial) -> None:
    first = trial.check(multiple_of(9973)).compiled_bytes
    assert first > 4 * MIB
    for _ in range(20):
        assert trial.check(multiple_of(9973)).compiled_bytes == pytest.approx(first, rel=0.05)
