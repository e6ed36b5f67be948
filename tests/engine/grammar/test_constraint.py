"""A constraint follows any history of a request, and its masks are those of that history."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cache import Namespace
from engine.grammar.compiler import Compiler
from engine.grammar.constraint import Constraint, ConstraintStatus
from engine.grammar.failure import GrammarFailure
from engine.grammar.mask_pace import MaskPace, MaskThreads
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.sampling.masks import GrammarMasks
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, compiler, ids, tokenizer

SCHEMA = Grammar(
    "json_schema", '{"type":"array","items":{"type":"integer","minimum":0,"maximum":999},"maxItems":9}'
)
PROMPT = [7, 7, 7]
TEXT = "[12,345,6,78]"


def constraint(grammar: Grammar = SCHEMA) -> Constraint:
    return Constraint(compiler().compile(grammar))


def row(at: Constraint, certain: Sequence[int], tail: Sequence[int] = (), **sampling: Any) -> SamplingRow:
    params = SamplingParams(max_tokens=100, **sampling)
    request = Request.make("r", PROMPT, params, arrival=0.0, seed=0, namespace=Namespace("m"), output_ids=certain)
    request.constraint = at
    return SamplingRow(request, len(PROMPT) + len(certain), tail)


def allowed(*rows: SamplingRow, width: int = NUM_TOKENS) -> list[set[int]]:
    """Return the tokens that each row may choose from."""
    logits = torch.zeros(len(rows), width)
    assert GrammarMasks([EOS]).apply(logits, rows) == {}
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits]


def test_it_allows_the_same_as_a_fresh_one_from_any_earlier_position() -> None:
    """The constraint moves forwards by any number of tokens, and back over wrong draft tokens."""
    draw, tokens = random.Random(5), ids(TEXT)
    wandering = constraint()
    num_certain = 0
    while num_certain < len(tokens):
        num_certain = draw.randint(num_certain, len(tokens))
        draft = ids(draw.choice(["", "5,", "9]", TEXT, "no"]))
        wandering.follow(row(wandering, tokens[:num_certain], draft))
        tail = tokens[num_certain : draw.randint(num_certain, len(tokens))]
        (here,) = allowed(row(wandering, tokens[:num_certain], tail))
        (fresh,) = allowed(row(constraint(), [*tokens[:num_certain], *tail]))
        assert here == fresh


def test_the_end_is_allowed_exactly_when_the_grammar_is_satisfied() -> None:
    tokens = ids(TEXT)
    for cut in range(len(tokens)):
        assert EOS not in allowed(row(constraint(), tokens[:cut]))[0]
    assert allowed(row(constraint(), tokens)) == [{EOS}]
    either = constraint(Grammar("regex", "ab+"))
    assert EOS in allowed(row(either, ids("ab")))[0] and len(allowed(row(either, ids("ab")))[0]) > 1


def test_ends_that_are_forbidden_are_allowed_when_nothing_else_is() -> None:
    open_end, closed = constraint(Grammar("regex", "ab*")), constraint(Grammar("regex", "ab"))
    rows = [row(open_end, ids("a"), min_tokens=9), row(closed, ids("ab"), min_tokens=9)]
    may_continue, must_end = allowed(*rows)
    assert EOS not in may_continue and ids("b")[0] in may_continue
    assert must_end == {EOS}


def test_drafts_are_masked_as_if_they_were_the_history() -> None:
    tokens = ids(TEXT)
    one, other = constraint(), constraint(Grammar("choice", '["yes","no"]'))
    rows = [row(one, tokens[:2], tokens[2 : 2 + k]) for k in range(4)]
    masks = allowed(*rows, row(other, []))
    assert masks[:4] == [allowed(row(constraint(), tokens[: 2 + k]))[0] for k in range(4)]
    assert masks[4] == allowed(row(constraint(Grammar("choice", '["yes","no"]')), []))[0]
    assert allowed(row(one, tokens[:3])) == [masks[1]]  # the drafts after it are forgotten


def test_rows_after_a_forbidden_draft_token_are_not_constrained() -> None:
    tokens, wrong = ids(TEXT), ids("zebra")[0]
    one = constraint()
    rows = [row(one, tokens[:1], [wrong, tokens[1]][:k]) for k in range(3)]
    masks = allowed(*rows)
    assert wrong not in masks[0]
    assert len(masks[1]) == len(masks[2]) == NUM_TOKENS
    assert allowed(row(one, tokens[:1], [wrong])) == [set(range(NUM_TOKENS))]
    assert allowed(row(one, tokens[:2])) == allowed(row(constraint(), tokens[:2]))


DEAD_END = Grammar("lark", 'start: "yes" (bad | "no")\nbad: "," void\nvoid[max_tokens=5]: /[^\\s\\S]/')
"""After "yes," nothing may follow."""


@pytest.mark.parametrize("failure", GrammarFailure)
def test_a_grammar_that_fails_affects_no_other(failure: GrammarFailure) -> None:
    """One history is not allowed by the grammar, another leads nowhere, and one costs more than a mask may."""
    if failure is GrammarFailure.DEFECT:
        bad = row(constraint(), ids("zebra"))
    elif failure is GrammarFailure.DEAD_END:
        bad = row(constraint(DEAD_END), ids("yes,"))
    elif failure is GrammarFailure.OVER_BUDGET:
        spent = MaskPace(MaskThreads(), budget_s=1e-9, is_slow=True)
        bad = row(Constraint(compiler().compile(SCHEMA), spent), [])
        assert bad.request.constraint is not None
        while not bad.request.constraint.is_ready(bad):
            time.sleep(0.001)
    else:  # begins well, but has more rules at once than the parser takes, which a random answer would have shown
        rules = " | ".join(f'"a{number}"' for number in range(5000))
        bad = row(constraint(Grammar("lark", f"start: {rules}", matcher="llguidance")), ids("a"))
    logits = torch.zeros(3, NUM_TOKENS)
    healthy = [row(constraint(), []), row(constraint(), ids(TEXT))]
    assert GrammarMasks([EOS]).apply(logits, [healthy[0], bad, healthy[1]]) == {1: failure}
    assert torch.isfinite(logits).sum(-1).tolist() == [len(allowed(healthy[0])[0]), NUM_TOKENS, 1]


def test_a_draft_that_leads_nowhere_fails_no_token_before_it() -> None:
    one, healthy = constraint(DEAD_END), row(constraint(), [])
    drafts = ids(",")
    rows = [row(one, ids("yes"), drafts[:k]) for k in range(len(drafts) + 1)]
    for _ in range(2):
        logits = torch.zeros(len(rows) + 1, NUM_TOKENS)
        failed = GrammarMasks([EOS]).apply(logits, [*rows, healthy])
        assert failed == {len(rows) - 1: GrammarFailure.DEAD_END}
        assert ids("no")[0] in set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())
        assert torch.isfinite(logits[-1]).sum() == len(allowed(healthy)[0])


def test_logits_wider_or_narrower_than_the_tokenizer() -> None:
    """If the model's table is padded, ids that stand for no text are never allowed."""
    anything = constraint(Grammar("regex", "(.|\n)*"))
    (narrow,) = allowed(row(anything, []), width=1000)
    assert narrow and max(narrow) < 1000
    padded = Compiler(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS + 77, [EOS])).compile(Grammar("regex", ".*"))
    (wide,) = allowed(row(Constraint(padded), []), width=NUM_TOKENS + 77)
    assert wide and max(wide) < NUM_TOKENS


def test_tokens_that_are_certain_are_not_compared_again() -> None:
    """A long output costs only its new tokens."""

    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, at: Any) -> Any:
            got = super().__getitem__(at)
            Counted.num_read += len(got) if isinstance(got, list) else 1
            return got

    long = row(constraint(Grammar("json_schema", '{"type":"array","items":{"type":"integer"}}')), [])
    long.request.tokens = Counted([*PROMPT, *ids("[" + "1," * 2000)])
    at = long.request.constraint
    assert at is not None and at.follow(SamplingRow.of(long.request)) is ConstraintStatus.ALLOWED
    Counted.num_read = 0
    long.request.tokens += ids("1")
    assert at.follow(SamplingRow.of(long.request)) is ConstraintStatus.ALLOWED
    assert Counted.num_read < 10
